"""From a configuration to a warm engine; shared by every command that needs one.

`open_model` reads what a model says about itself (configuration, adapters), which takes well under a second. `warm_engine` does the
rest: the layout, the programs and the weights at the same time, the buffers, one run of every program. Nothing here knows of
requests. Errors a user can mend are `StartError`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

from engine.agreement import read_model
from engine.checkpoints import Checkpoint, CheckpointError, open_checkpoint
from engine.config import (
    ConfigError,
    EngineConfig,
    ModelConfig,
    attention_choice,
    call_bytes,
    layer_layout,
    vector_lanes,
)
from engine.jax_engine import JaxEngine
from engine.loader import load_weights
from engine.peft import Adapter, adapter_layout, open_adapter
from engine.sharding import device_order
from engine.weights import Weights
from server.config.commands import ServeConfig, resolve_batch_sizes, resolve_max_len, resolve_prefill_buckets
from server.errors import StartError
from server.orchestrator.validation import ModelLimits, sampling_defaults
from server.start.model_files import generation_defaults, resolve_model
from server.text.tokenizers import Tokenizer, load_tokenizer
from warmup import plan
from warmup.errors import WarmupError
from warmup.guard import Guard
from warmup.prepare import Prepared, open_store, prepare_fitting
from warmup.report import WarmupReport
from warmup.weights import WeightsCache

First = TypeVar("First")
Second = TypeVar("Second")
Result = TypeVar("Result")

logger = logging.getLogger("preheat")


@dataclasses.dataclass(frozen=True)
class OpenModel:
    """A model that has been looked at, its weights not yet read."""

    path: Path
    checkpoint: Checkpoint
    config: ModelConfig
    generation_config: Mapping[str, object]
    chat_template: Path | None = None  # instead of the model's own
    adapters: tuple[Adapter, ...] = ()

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """Read when it is first asked for: `warm_engine` does so beside the weights."""
        return load_tokenizer(self.path, self.chat_template)

    def limits(self, name: str, max_len: int) -> ModelLimits:
        """What requests are checked against. Raises `StartError` where what every prompt begins with is not of the vocabulary."""
        beyond = [id for id in self.tokenizer.encode("") if not 0 <= id < self.config.vocab_size]
        if beyond:
            raise StartError(
                f"{self.path}: the tokenizer begins every prompt with the id {beyond[0]}, but the model's vocabulary has "
                f"{self.config.vocab_size}; tokenizer and weights are of different models: download both again"
            )
        return ModelLimits(
            name=name,
            max_len=max_len,
            vocab_size=self.config.vocab_size,
            eos_token_ids=self.eos_token_ids,
            defaults=sampling_defaults(self.generation_config),
            adapters=tuple(adapter.name for adapter in self.adapters),
        )

    @functools.cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All ids that end a generation, whichever file names them, and that the model can choose."""
        ids = dict.fromkeys((*self.config.eos_token_ids, *self.tokenizer.eos_token_ids))
        if unknown := [id for id in ids if not 0 <= id < self.config.vocab_size]:
            logger.warning(
                "%s has the end-of-sequence ids %s, which are not of the model's vocabulary of %d: they never come",
                self.path, ", ".join(map(str, unknown)), self.config.vocab_size,
            )  # fmt: skip
        return tuple(id for id in ids if id not in unknown)


@contextlib.contextmanager
def readable_errors() -> Iterator[None]:
    """Turns the errors of checkpoints, configurations and warmup, whose messages are for users already, into `StartError`; and those
    of files that the system does not let this user read."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise StartError(f"{error.filename}: {error.strerror}; it must be a file that the user of the server may read") from error
    except (CheckpointError, ConfigError, WarmupError) as error:
        raise StartError(str(error)) from error


def open_model(config: ServeConfig) -> OpenModel:
    """Finds the model and reads its configuration."""
    with readable_errors():
        path = Path(resolve_model(config.model))
        checkpoint = open_checkpoint(path)
        model = read_model(checkpoint)
        adapters = open_adapters(config, model)
        return OpenModel(path, checkpoint, model, generation_defaults(path), config.chat_template, adapters)


def open_adapters(config: ServeConfig, model: ModelConfig) -> tuple[Adapter, ...]:
    """The adapters of ``--lora``, checked against the model; their weights are not read yet."""
    adapters = tuple(open_adapter(name, path, model) for name, path in config.lora)
    for adapter in adapters:
        base, served = (re.sub(r"[^a-z0-9]", "", Path(name).name.lower()) for name in (adapter.base, config.model))
        if base not in served and served not in base:
            logger.warning(
                "the adapter %s was trained on %s; it fits %s, but may not suit it", adapter.name, adapter.base, config.model
            )
    return adapters


def select_devices(config: ServeConfig) -> list[jax.Device]:
    """The first devices of this machine, as many as ``--dp`` x ``--ep`` x ``--tp``."""
    devices, wanted = device_order(jax.local_devices()), config.dp * config.ep * config.tp
    if wanted > len(devices):
        given = " x ".join(f"--{name} {getattr(config, name)}" for name in ("dp", "ep", "tp") if getattr(config, name) > 1)
        raise StartError(f"{given} needs {wanted} devices, this machine has {len(devices)} ({devices[0].platform})")
    return devices[:wanted]


def engine_config(
    config: ServeConfig, model: ModelConfig, platform: str, adapters: Sequence[Adapter] = ()
) -> EngineConfig:
    """The layout of a configuration, with as many KV pages as all slots at full length take.

    ``platform`` is ``cpu``, ``gpu`` or ``tpu``.
    """
    max_len = resolve_max_len(config, model.max_position)
    dtype = config.dtype if config.dtype != "auto" else "float32" if platform == "cpu" else "bfloat16"
    layout = EngineConfig(
        slots=config.slots,
        max_len=max_len,
        kv_pages=1,
        prefill_buckets=resolve_prefill_buckets(config, max_len),
        batch_sizes=resolve_batch_sizes(config),
        dtype=dtype,
        quantize=config.quantize,
        kv_dtype=config.kv_dtype,
        tp=config.tp,
        dp=config.dp,
        ep=config.ep,
        layers=layer_layout(platform),
        attention=attention_choice(config.attention, platform),
        lanes=vector_lanes(platform),
        adapters=adapter_layout(adapters),
        call_bytes=call_bytes(platform),
    )
    return dataclasses.replace(layout, kv_pages=1 + layout.group_slots * layout.pages_per_slot)  # and the scratch page


@dataclasses.dataclass(frozen=True)
class WarmEngine:
    """An engine that has run every program, and what warmup knows of it."""

    engine: JaxEngine
    prepared: Prepared
    plan: plan.MemoryPlan


def warm_engine(config: ServeConfig, opened: OpenModel, report: WarmupReport, guard: Guard) -> WarmEngine:
    """Lays out, compiles or loads, loads weights meanwhile, allocates, and runs every program once."""
    with readable_errors():
        devices = select_devices(config)
        layout = engine_config(config, opened.config, devices[0].platform, opened.adapters)
        budget = plan.memory_budget(config.memory, devices)
        store = open_store(config.warmup_cache, opened.config, layout, devices, budget=budget)

        def make(layout: EngineConfig) -> JaxEngine:
            return JaxEngine(opened.config, layout, devices)

        installed: concurrent.futures.Future[JaxEngine] = concurrent.futures.Future()  # loading may need its programs

        def make_programs() -> tuple[JaxEngine, Prepared, plan.MemoryPlan]:
            with report.stage("programs"):
                engine, prepared, memory_plan = prepare_fitting(
                    make, layout, config.warmup, store, budget, report=report, guard=guard
                )
            engine.install(prepared.executables)
            installed.set_result(engine)
            began = time.perf_counter()
            prepared.allocate(engine)
            report.touched("init_state", time.perf_counter() - began)
            return engine, prepared, memory_plan

        abstract = make(layout).abstract_weights  # the same for any number of KV pages
        weights, (engine, prepared, memory_plan) = _together(
            lambda: _load_weights(opened, abstract, report, config, installed.result), make_programs, lambda: opened.tokenizer
        )
        engine.set_weights(weights)
        prepared.touch_all(engine)
        _give_back_memory()
        return WarmEngine(engine, prepared, memory_plan)


def _give_back_memory() -> None:
    """Compiling leaves freed memory behind that glibc keeps: a quarter of the process, with the default model on CPU."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)


def _load_weights(
    opened: OpenModel, abstract: Weights, report: WarmupReport, config: ServeConfig, stacker: Callable[[], JaxEngine]
) -> Weights:
    with report.stage("weights"):
        checkpoint, cache = opened.checkpoint, None
        if checkpoint.dequantizes or config.quantize != "none":
            files = sorted({checkpoint.file(name) for name in checkpoint.names()})
            files += [file for adapter in opened.adapters for file in adapter.files]  # in the order of their indices
            cache = WeightsCache(config.warmup_cache, files, opened.config, abstract)
            cache = cache if cache.used else None
        weights = load_weights(checkpoint, opened.config, abstract, opened.adapters, cache=cache, stacker=stacker)
        jax.block_until_ready(weights)
        return weights


def _together(first: Callable[[], First], second: Callable[[], Second], third: Callable[[], object]) -> tuple[First, Second]:
    """Runs all three at the same time; the first error is raised without waiting for the others."""
    one, two = _begin(first), _begin(second)
    futures: list[concurrent.futures.Future[Any]] = [one, two, _begin(third)]
    done, _ = concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
    for future in done:
        future.result()
    return one.result(), two.result()


def _begin(function: Callable[[], Result]) -> concurrent.futures.Future[Result]:
    future: concurrent.futures.Future[Result] = concurrent.futures.Future()
    threading.Thread(target=_fulfil, args=(future, function), name="start-up", daemon=True).start()
    return future


def _fulfil(future: concurrent.futures.Future[Result], function: Callable[[], Result]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:  # raised again by who waits
        future.set_exception(error)
