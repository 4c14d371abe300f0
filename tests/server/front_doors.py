"""A whole server without a model: mock engine, byte tokenizer, orchestrator, gRPC, and the proxy as a process of its
own."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.mock import MockEngine, mock_config, successor
from server.config.commands import ServeConfig
from server.grpc.server import GrpcServer
from server.orchestrator.orchestrator import Orchestrator
from server.orchestrator.validation import ModelLimits
from server.proxy import process
from server.telemetry.metrics import Metrics
from server.text.tokenizers import ByteTokenizer, Tokenizer

NAME = "mock"
MAX_LEN = 64


@dataclasses.dataclass
class Doors:
    engine: MockEngine
    orchestrator: Orchestrator
    metrics: Metrics
    grpc: GrpcServer
    http: str  # base URL, empty without a proxy


@contextlib.contextmanager
def open_doors(
    rule: Any = successor,
    *,
    http: bool = True,
    ready: bool = True,
    slots: int = 4,
    max_queue: int = 16,
    max_len: int = MAX_LEN,
    tokenizer: Tokenizer | None = None,
    limits: dict[str, Any] | None = None,
    api_key: tuple[str, ...] = (),
    config: dict[str, Any] | None = None,
    **grpc_options: Any,
) -> Iterator[Doors]:
    """Everything up, and down again afterwards. ``limits`` and ``config`` replace fields of the model's limits and
    options."""
    engine = MockEngine(rule, config=mock_config(slots=slots, max_len=max_len))
    metrics = Metrics()
    tokenizer = tokenizer or ByteTokenizer()
    orchestrator = Orchestrator(engine, tokenizer, metrics=metrics, max_queue=max_queue)
    server = GrpcServer(NAME, metrics=metrics, slots=slots, api_keys=api_key, **grpc_options)
    server.start()
    proxy = None
    try:
        if http:
            proxy = process.start(ServeConfig(http_port=0, api_key=api_key, **(config or {})), server.local_address)
        orchestrator.start()
        model = ModelLimits(NAME, max_len, engine.model.vocab_size, tokenizer.eos_token_ids)
        server.attach(orchestrator, tokenizer, dataclasses.replace(model, **(limits or {})))
        if ready:
            orchestrator.open()
        scheme = "https" if (config or {}).get("tls_cert") else "http"
        yield Doors(engine, orchestrator, metrics, server, f"{scheme}://127.0.0.1:{proxy.port}" if proxy else "")
    finally:
        if proxy is not None:
            proxy.stop()
        orchestrator.close()
        server.stop(0)


@contextlib.contextmanager
def proxy_process(*options: str) -> Iterator[str]:
    """``preheat proxy`` in a process of its own; gives its URL."""
    command = [sys.executable, "-m", "server", "proxy", "--http-port", "0", *options]
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True) as proxy:
        try:
            assert proxy.stderr is not None
            line = next(line for line in proxy.stderr if "serving HTTP on" in line)
            reader = threading.Thread(target=sys.stderr.writelines, args=(proxy.stderr,))  # or its pipe fills up
            reader.start()
            yield next(word for word in line.split() if word.startswith("http://"))
            proxy.terminate()
            reader.join()
        finally:
            proxy.terminate()
    assert proxy.returncode == 0
