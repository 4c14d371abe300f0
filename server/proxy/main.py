"""The proxy's own process: an event loop with uvicorn."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import threading
from collections.abc import Iterator

import uvicorn

from server.config.commands import ProxyConfig
from server.proxy.process import STOP_SECONDS
from server.proxy.routes import make_app
from server.proxy.upstreams import Balancing

KEEP_ALIVE = 75  # seconds that an idle connection is kept; longer than most clients keep theirs


def run(config: ProxyConfig, listening: socket.socket, lifeline: int | None = None) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code.

    Args:
        lifeline: file descriptor whose end of file ends the proxy.
    """
    app = make_app(
        config.upstream,
        api_keys=config.api_key,
        cors_origins=config.cors_origin,
        ca=config.upstream_ca,
        balancing=Balancing(**{field.name: getattr(config, field.name) for field in dataclasses.fields(Balancing)}),
    )
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=int(STOP_SECONDS),
            ws="none",
            ssl_certfile=config.tls_cert and str(config.tls_cert),
            ssl_keyfile=config.tls_key and str(config.tls_key),
        )
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.on_signal)
    if lifeline is not None:
        threading.Thread(target=_end_with_parent, args=(lifeline,), name="preheat-lifeline", daemon=True).start()
    server.run(sockets=[listening])
    return 0


class _Server(uvicorn.Server):
    """Uvicorn with the exit codes of the server: 0 after a first signal, 128 + signal at once on a second."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def on_signal(self, number: int, frame: object) -> None:
        if self.should_exit:
            os._exit(128 + number)
        self.should_exit = True


def _end_with_parent(lifeline: int) -> None:
    while os.read(lifeline, 1):
        pass
    os._exit(1)  # nobody is left to answer from
