"""Starting a proxy process beside a server (``server/proxy/main.py`` is what runs in it).

The socket is bound by whoever starts the proxy, so a taken port is an error before anything is loaded, and clients that
come early wait in the socket's queue. A proxy that belongs to a server ends with it, however that ends: it holds the
reading end of a pipe whose other end dies with the server.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from server.config.commands import ProxyConfig, ServeConfig
from server.errors import StartError

BACKLOG = 2048
STOP_SECONDS = 5.0  # for answers on their way, when the proxy is stopped


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        StartError: the port is taken, or the address is not one of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartError(
            f"--host {host}: {error.strerror}: give an address of this machine, such as 127.0.0.1 or 0.0.0.0"
        ) from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise StartError(
            f"--http-port {port}: cannot listen on {host}:{port}: {error.strerror}; stop what uses the port, choose "
            "another, or 0 for a free one"
        ) from None
    return listening


def url(config: ServeConfig | ProxyConfig, port: int) -> str:
    """``http://127.0.0.1:8000``, for people."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{'https' if config.tls_cert else 'http'}://{host}:{port}"


class ProxyProcess:
    """A running proxy. ``port`` is where it listens."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, lifeline: int):
        self._process = process
        self._lifeline = lifeline
        self.port = port

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code once it has ended, else `None`."""
        return self._process.poll()

    def wait(self) -> int:
        """Waits until it has ended; returns its exit code."""
        return self._process.wait()

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()

    def stop(self, timeout: float = STOP_SECONDS + 1) -> None:
        """Ends it: answers on their way get a moment, then it is killed."""
        self._process.terminate()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


def start(config: ServeConfig, grpc_address: str) -> ProxyProcess:
    """Starts the proxy of a server.

    Args:
        config: of the server; its HTTP options are the proxy's.
        grpc_address: where the proxy finds the server's gRPC, without TLS: `GrpcServer.local_address`.

    Raises:
        StartError: the HTTP port cannot be bound.
    """
    with bind(config.host, config.http_port) as listening:
        port = listening.getsockname()[1]
        reading, writing = os.pipe()
        arguments = [
            sys.executable,
            "-m",
            "server",
            "proxy",
            "--upstream",
            grpc_address,
            "--host",
            config.host,
            "--log-format",
            config.log_format,
            "--listen-fd",
            str(listening.fileno()),
            "--lifeline-fd",
            str(reading),
        ]
        if config.tls_cert and config.tls_key:
            arguments += ["--tls-cert", str(config.tls_cert), "--tls-key", str(config.tls_key)]
        for origin in config.cors_origin:
            arguments += ["--cors-origin", origin]
        # Options of the server in the environment are not the proxy's; keys go there, where `ps` does not show them.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PREHEAT_")}
        if config.api_key:
            environment["PREHEAT_API_KEY"] = ",".join(config.api_key)
        root = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
        try:
            # A process group of its own: Ctrl-C is for the server, which ends its proxy when all answers are out. Not a session,
            # for Linux schedules sessions against each other (autogroups): each token would wait for its turn.
            process = subprocess.Popen(
                arguments,
                pass_fds=(listening.fileno(), reading),
                env=environment,
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        except OSError as error:
            os.close(writing)
            raise StartError(f"the HTTP proxy cannot be started: {error}; --no-http serves gRPC only") from None
        finally:
            os.close(reading)
    return ProxyProcess(process, port, writing)
