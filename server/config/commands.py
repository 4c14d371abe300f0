"""The options of the commands, and the numbers that follow from them and the model.

`ServeConfig` and `ProxyConfig` are what a user wrote, validated (see ``server/config/options.py`` for where values come from).
What an option that was left out means can depend on the model or on other options; the ``resolve_*`` functions say how.
They are pure, so a restart resolves to the same numbers, and with them to the same programs.
"""

from __future__ import annotations

import dataclasses
import os
import ssl
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from server.config import options
from server.config.options import option
from server.errors import StartError

DEFAULT_MAX_LEN = 2048
DEFAULT_PREFILL_CHUNK = 512
SMALLEST_BUCKET = 16
QUEUE_PER_SLOT = 4


def default_cache() -> Path:
    """Where compiled programs are kept unless ``--warmup-cache`` says otherwise: ``preheat`` in the user's cache
    folder."""
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "preheat"


def _cache(value: str) -> Path | None:
    return None if value.lower() == "off" else Path(options.text(value)).expanduser()


def _metrics_port(value: str) -> int | None:
    return None if value.lower() == "off" else options.port(value)


def _adapter(value: str) -> tuple[str, Path]:
    name, equals, path = value.partition("=")
    if not (equals and name.strip() and path.strip()):
        raise ValueError("must be name=path, the name that requests use and the adapter's directory")
    return name.strip(), Path(path.strip()).expanduser()


def _chat_template(value: str) -> Path:
    from server.text.tokenizers.chat import read_template  # the proxy has no need of it

    file = Path(value).expanduser()
    try:
        read_template(file)
    except StartError as error:
        raise ValueError(str(error)) from None
    return file


def _tool_format(value: str) -> str:
    from server.text.tool_forms import FORMS

    return options.choice(*FORMS)(value)


def _address(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if value.startswith("unix:") and len(value) > 5:
        return value
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError("must be host:port")
    return value


def _upstream(value: str) -> str:
    """``host:port`` or ``unix:path`` is one orchestrator; ``dns:host:port`` stands for all addresses of the host."""
    try:
        if value.startswith("dns:"):
            return "dns:" + _address(value.removeprefix("dns:"))
        return _address(value)
    except ValueError:
        raise ValueError("must be host:port, unix:path, or dns:host:port for every address of a name") from None


def read_upstream_file(file: Path) -> tuple[str, ...]:
    """The addresses in a file of ``--upstream-file``: one a line; empty lines and what follows a ``#`` do not count.

    Raises:
        StartError: it cannot be read, a line is no address, or there is none.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"--upstream-file {file}: cannot be read: {error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        value = line.partition("#")[0].strip()
        try:
            found += [_upstream(value)] if value else []
        except ValueError as error:
            raise StartError(f"--upstream-file {file}, line {number}: {value!r} {error}") from None
    if not found:
        raise StartError(f"--upstream-file {file}: has no address: give at least one, host:port on a line of its own")
    return tuple(found)


def _cors_origin() -> Any:
    return option(
        (),
        options.origin,
        "origin whose pages may call the HTTP port from a browser, or * for all; repeatable",
        metavar="ORIGIN",
        many=True,
        shown="none",
    )


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """Options of ``preheat serve`` (and ``build``, ``plan``, ``generate``). `None` where the default has to be
    resolved."""

    model: str = option(
        "smollm2-135m-instruct",
        options.text,
        "a directory with config.json, *.safetensors and tokenizer; a .gguf file; a Hugging Face id; or a built-in "
        "name",
    )
    served_model_name: str = option(
        "", options.text, "name in /v1/models and accepted in requests", shown="last part of --model", metavar="NAME"
    )
    host: str = option("127.0.0.1", options.text, "address to which both ports are bound")
    http_port: int = option(8000, options.port, "HTTP port; 0 picks a free one", metavar="PORT")
    grpc_port: int = option(9000, options.port, "gRPC port; 0 picks a free one", metavar="PORT")
    no_http: bool = option(False, options.boolean, "serve gRPC only")
    warmup: Literal["manual", "aot", "none"] = option(
        "manual",
        options.choice("manual", "aot", "none"),
        "how programs are made ready: manual runs each of them once, aot loads or compiles executables, none compiles "
        "on first use",
        metavar="MODE",
    )
    warmup_cache: Path | None = option(
        default_cache(),
        _cache,
        "folder of compiled programs, or off",
        metavar="DIR",
        shown="preheat in the user's cache folder",
    )
    slots: int = option(8, options.integer(1, 4096), "sequences decoded at once", metavar="N")
    max_len: int | None = option(
        None,
        options.integer(1),
        "prompt and generated tokens of one sequence",
        metavar="N",
        shown=f"the model's, at most {DEFAULT_MAX_LEN}",
    )
    prefill_buckets: tuple[int, ...] | None = option(
        None,
        options.integer(1),
        "padded lengths of prompt chunks",
        metavar="N,N,...",
        many=True,
        shown=f"powers of two from {SMALLEST_BUCKET}, for each of --dp x --ep groups, up to the chunk size",
    )
    batch_sizes: tuple[int, ...] | None = option(
        None,
        options.integer(1),
        "padded decode batch sizes",
        metavar="N,N,...",
        many=True,
        shown="powers of two up to --slots, and --slots",
    )
    prefill_chunk: int | None = option(
        None,
        options.integer(1),
        "longest piece of a prompt that is prefilled in one call",
        metavar="N",
        shown=str(DEFAULT_PREFILL_CHUNK),
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto",
        options.choice("auto", "float32", "bfloat16"),
        "of weights and activations; auto is bfloat16 on TPU and GPU, float32 on CPU",
        metavar="DTYPE",
    )
    quantize: Literal["none", "int8"] = option("none", options.choice("none", "int8"), "of the weights", metavar="KIND")
    kv_dtype: Literal["auto", "int8"] = option(
        "auto", options.choice("auto", "int8"), "of stored keys and values; auto: as --dtype", metavar="KIND"
    )
    attention: Literal["auto", "xla", "pallas", "native"] = option(
        "auto",
        options.choice("auto", "xla", "pallas", "native"),
        "who attends; auto is native (C++) on CPU, pallas on TPU, xla on GPU; what native or pallas cannot do is left to xla, "
        "which is said at the start",
        metavar="KIND",
    )
    chat_template: Path | None = option(
        None, _chat_template, "a Jinja file, instead of the model's own template", metavar="FILE", shown="the model's"
    )
    tool_format: str | None = option(
        None,
        _tool_format,
        "how tools are called, by the name of a form (see Tools in docs/api.md)",
        metavar="FORM",
        shown="what the chat template teaches, else generic",
    )
    lora: tuple[tuple[str, Path], ...] = option(
        (),
        _adapter,
        "a LoRA adapter in PEFT layout, served as a model of that name beside the base model; repeatable",
        metavar="NAME=PATH",
        many=True,
        shown="none",
    )
    memory: int | None = option(
        None,
        options.memory_size,
        "budget for weights, KV pages, prefixes, code and temporaries, e.g. 12GiB",
        metavar="SIZE",
        shown="85 % of the accelerator's memory, half of the RAM on CPU",
    )
    tp: int = option(1, options.integer(1, 4096), "tensor-parallel devices", metavar="N")
    dp: int = option(1, options.integer(1, 4096), "data-parallel groups of devices, with slots and KV pages of their own", metavar="N")
    ep: int = option(1, options.integer(1, 4096), "groups of devices over which the experts of a mixture are split", metavar="N")
    max_queue: int | None = option(
        None,
        options.integer(0),
        "waiting sequences beyond the slots; a request counts prompts x n",
        metavar="N",
        shown=f"{QUEUE_PER_SLOT} x slots",
    )
    request_timeout: float | None = option(
        None,
        options.seconds(0.001, none=True),
        "seconds after which a request ends with an error",
        metavar="SECONDS",
        shown="none",
    )
    drain_timeout: float = option(
        30.0, options.seconds(0), "seconds that SIGTERM waits for running requests", metavar="SECONDS"
    )
    metrics_port: int | None = option(
        None, _metrics_port, "port for Prometheus straight from the orchestrator", metavar="PORT", shown="off"
    )
    api_key: tuple[str, ...] = option(
        (),
        options.api_key,
        "key that clients must send; repeatable",
        metavar="KEY",
        many=True,
        shown="none",
        secret=True,
    )
    cors_origin: tuple[str, ...] = _cors_origin()
    tls_cert: Path | None = option(
        None, options.existing_file, "certificate chain (PEM) of both ports", metavar="FILE", shown="none"
    )
    tls_key: Path | None = option(None, options.existing_file, "private key (PEM)", metavar="FILE", shown="none")
    log_format: Literal["text", "json"] = option(
        "text", options.choice("text", "json"), "of the log lines", metavar="FORMAT"
    )
    strict_compiles: bool = option(
        False, options.boolean, "fail a request during which anything was compiled, for tests"
    )

    def __post_init__(self) -> None:
        if not self.served_model_name:
            object.__setattr__(self, "served_model_name", _last_part(self.model))
        _check_tls(self.tls_cert, self.tls_key)
        ports = {"--grpc-port": self.grpc_port, "--metrics-port": self.metrics_port}
        if not self.no_http:
            ports["--http-port"] = self.http_port
        taken: dict[int, str] = {}
        for name, port in ports.items():
            if port:
                if port in taken:
                    raise StartError(
                        f"{taken[port]} and {name} are both {port}: choose two different ports, or 0 for a free one"
                    )
                taken[port] = name
        names = [name for name, _ in self.lora]
        for name in names:
            if name == self.served_model_name:
                raise StartError(f"--lora {name}=...: the base model has that name (--served-model-name); choose another")
            if names.count(name) > 1:
                raise StartError(f"--lora {name}=...: two adapters have that name; choose another for one of them")
        for name in ("prefill_buckets", "batch_sizes"):
            sizes = getattr(self, name)
            if sizes is not None and list(sizes) != sorted(set(sizes)):
                raise StartError(f"{options.flag_name(name)} {_joined(sizes)}: must be in rising order, each once")


@dataclasses.dataclass(frozen=True)
class ProxyConfig:
    """Options of ``preheat proxy``."""

    upstream: tuple[str, ...] = option(
        (),
        _upstream,
        "host:port of an orchestrator's gRPC, or dns:host:port for every address of a name; repeatable",
        metavar="HOST:PORT",
        many=True,
        shown="127.0.0.1:9000",
    )
    upstream_file: Path | None = option(
        None,
        options.existing_file,
        "more of them, one a line; the file is read again when it changes",
        metavar="FILE",
        shown="none",
    )
    upstream_refresh: float = option(
        5.0,
        options.seconds(0.01),
        "seconds after which --upstream-file and names of dns:... are looked at again",
        metavar="SECONDS",
    )
    connect_timeout: float = option(
        5.0, options.seconds(0.001), "seconds for a connection to an orchestrator", metavar="SECONDS"
    )
    accept_timeout: float = option(
        30.0,
        options.seconds(0.001),
        "seconds in which an orchestrator must accept or refuse a request; then the next one is asked",
        metavar="SECONDS",
    )
    first_token_timeout: float | None = option(
        None,
        options.seconds(0.001, none=True),
        "seconds from accepting a request to its first token, time in the queue included; then the next one is asked",
        metavar="SECONDS",
        shown="none",
    )
    eject_after: int = option(
        3, options.integer(1), "failures in a row that eject an orchestrator for a while", metavar="N"
    )
    retries: int = option(
        2,
        options.integer(0),
        "how often a request goes to another orchestrator when one was lost before it had answered anything",
        metavar="N",
    )
    upstream_ca: Path | None = option(
        None,
        options.existing_file,
        "certificates (PEM) by which the orchestrators' TLS is verified; without it they are spoken to without TLS",
        metavar="FILE",
        shown="none",
    )
    host: str = option("127.0.0.1", options.text, "address to bind")
    http_port: int = option(8000, options.port, "HTTP port; 0 picks a free one", metavar="PORT")
    api_key: tuple[str, ...] = option(
        (),
        options.api_key,
        "key that clients must send; repeatable. Passed on to the orchestrator",
        metavar="KEY",
        many=True,
        shown="none",
        secret=True,
    )
    cors_origin: tuple[str, ...] = _cors_origin()
    tls_cert: Path | None = option(None, options.existing_file, "certificate chain (PEM)", metavar="FILE", shown="none")
    tls_key: Path | None = option(None, options.existing_file, "private key (PEM)", metavar="FILE", shown="none")
    log_format: Literal["text", "json"] = option(
        "text", options.choice("text", "json"), "of the log lines", metavar="FORMAT"
    )

    def __post_init__(self) -> None:
        _check_tls(self.tls_cert, self.tls_key)
        if self.upstream_file is not None:
            read_upstream_file(self.upstream_file)
        elif not self.upstream:
            object.__setattr__(self, "upstream", ("127.0.0.1:9000",))


def load_serve_config(arguments: Mapping[str, str | list[str] | None], environment: Mapping[str, str]) -> ServeConfig:
    """See `options.load`."""
    return options.load(ServeConfig, arguments, environment)


def load_proxy_config(arguments: Mapping[str, str | list[str] | None], environment: Mapping[str, str]) -> ProxyConfig:
    """See `options.load`."""
    return options.load(ProxyConfig, arguments, environment)


def _check_tls(cert: Path | None, key: Path | None) -> None:
    if (cert is None) != (key is None):
        given, missing = ("--tls-cert", "--tls-key") if cert else ("--tls-key", "--tls-cert")
        raise StartError(f"{given} is given without {missing}: TLS needs both")
    if cert is not None:
        try:
            # An encrypted key would be asked for on the terminal without the password.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: "")
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise StartError(
                f"--tls-cert {cert} with --tls-key {key} cannot be used: {error}; give a certificate chain and its "
                "unencrypted private key, both PEM"
            ) from None


def _last_part(model: str) -> str:
    """``/models/llama/`` -> ``llama``; ``org/name`` -> ``name``; ``.`` -> the folder's own name."""
    name = Path(model).name or Path(model).resolve().name
    return name or model


def _joined(sizes: tuple[int, ...]) -> str:
    return ",".join(map(str, sizes))


# What options that were left out mean.


def resolve_max_len(config: ServeConfig, model_max: int) -> int:
    """``--max-len`` in tokens, at most ``model_max``, the longest sequence the model was made for."""
    if config.max_len is None:
        return min(model_max, DEFAULT_MAX_LEN)
    if config.max_len > model_max:
        raise StartError(f"--max-len {config.max_len} is more than the model's {model_max}: give at most {model_max}")
    return config.max_len


def resolve_prefill_buckets(config: ServeConfig, max_len: int) -> tuple[int, ...]:
    """Padded lengths of prompt chunks, rising; the last is the chunk size."""
    chunk, buckets = config.prefill_chunk, config.prefill_buckets
    if chunk is not None and chunk > max_len:
        raise StartError(f"--prefill-chunk {chunk} is more than --max-len {max_len}: give at most {max_len}")
    if buckets is None:
        chunk = min(DEFAULT_PREFILL_CHUNK, max_len) if chunk is None else chunk
        return _powers_of_two(SMALLEST_BUCKET * config.dp * config.ep, chunk, config.dp * config.ep)
    if chunk is not None and buckets[-1] != chunk:
        raise StartError(
            f"--prefill-buckets {_joined(buckets)} must end with --prefill-chunk {chunk}: give one of the two only"
        )
    if buckets[-1] > max_len:
        raise StartError(f"--prefill-buckets {_joined(buckets)}: {buckets[-1]} is more than --max-len {max_len}")
    return buckets


def resolve_batch_sizes(config: ServeConfig) -> tuple[int, ...]:
    """Padded decode batch sizes, rising; the last is the number of slots."""
    if config.batch_sizes is None:
        return _powers_of_two(1, config.slots, config.dp * config.ep)
    if config.batch_sizes[-1] != config.slots:
        raise StartError(f"--batch-sizes {_joined(config.batch_sizes)} must end with --slots {config.slots}")
    return config.batch_sizes


def resolve_max_queue(config: ServeConfig) -> int:
    """Sequences that may wait for a slot."""
    return QUEUE_PER_SLOT * config.slots if config.max_queue is None else config.max_queue


def _powers_of_two(first: int, last: int, groups: int) -> tuple[int, ...]:
    """``first``, twice that, and so on below ``last``, then ``last``; each rounded up to what ``groups`` of devices can share."""
    first, last = -(-first // groups), -(-last // groups)
    sizes = []
    while first < last:
        sizes.append(first * groups)
        first *= 2
    return (*sizes, last * groups)
