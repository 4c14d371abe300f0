"""``python -m server serve`` as a user runs it: a process, random ports, a real checkpoint."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx

from tests import xla

ROOT = pathlib.Path(__file__).parents[2]
PORTS = re.compile(r"serving (?:HTTP on http://127\.0\.0\.1:(\d+), )?gRPC on 127\.0\.0\.1:(\d+)")
QUICK = {"XLA_FLAGS": xla.flags(xla.QUICK)}
PRODUCTION = {"XLA_FLAGS": ""}  # as a user has it
START_SECONDS = 300.0  # a cold start on a machine that is busy with something else


class ServerProcess:
    """A server that is starting. ``wait_ready`` waits; ``log`` is what it has written so far.

    Its programs are compiled as those of the other tests, unless ``environment`` is `PRODUCTION`.
    """

    def __init__(self, model: pathlib.Path, cache: pathlib.Path, *options: str, environment: dict[str, str] | None = None,
                 program: tuple[str, ...] = ("-m", "server")):  # fmt: skip
        command = [
            sys.executable, *program, "serve", "--model", str(model), "--warmup-cache", str(cache), "--http-port", "0",
            "--grpc-port", "0", *options,
        ]  # fmt: skip
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PREHEAT_")}
        everything = {**clean, **QUICK, **(environment or {})}  # one device, as a user has
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=everything, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.http = self.grpc = ""

    def _read(self) -> None:
        for line in self.process.stderr:
            with self._news:
                self.lines.append(line)
                self._news.notify_all()
        with self._news:
            self.lines.append("")
            self._news.notify_all()

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def wait_for(self, pattern: str, seconds: float = START_SECONDS) -> re.Match[str]:
        """Waits until the log matches; fails with the log where the process ends or the time is over."""
        with self._news:
            found = self._news.wait_for(
                lambda: re.search(pattern, self.log) or (self.lines and self.lines[-1] == "" and "ended"), seconds
            )
        assert isinstance(found, re.Match), f"no {pattern!r} in the log of the server:\n{self.log}"
        return found

    def wait_listening(self) -> None:
        """Waits until the ports are open."""
        http, grpc = self.wait_for(PORTS.pattern).groups()
        self.http = f"http://127.0.0.1:{http}" if http else ""
        self.grpc = f"127.0.0.1:{grpc}"

    def wait_ready(self) -> ServerProcess:
        self.wait_listening()
        self.wait_for(r"ready after")
        return self

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and waits for the end; returns the exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self, seconds: float = 60.0) -> int:
        code = self.process.wait(seconds)
        self._reader.join(seconds)
        return code

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(10)
        self.process.stderr.close()

    @property
    def proxy_pid(self) -> int:
        """Of the HTTP proxy, the only child (Linux)."""
        children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(children.read_text().split()[0])

    # What tests ask a running server for.

    def warmup(self) -> dict:
        return httpx.get(f"{self.http}/warmup").raise_for_status().json()

    def metric(self, series: str) -> float:
        for line in httpx.get(f"{self.http}/metrics").raise_for_status().text.splitlines():
            name, _, value = line.rpartition(" ")
            if name == series:
                return float(value)
        raise KeyError(series)

    def assert_nothing_compiled(self) -> None:
        report = self.warmup()
        assert (report["compiles_since_ready"], report["traces_since_ready"]) == (0, 0), self.log
        assert self.metric('preheat_xla_compiles_total{phase="serving"}') == 0
        assert self.metric('preheat_xla_traces_total{phase="serving"}') == 0


@contextlib.contextmanager
def serving(model: pathlib.Path, cache: pathlib.Path, *options: str, **keywords) -> Iterator[ServerProcess]:
    """A ready server, killed afterwards if it still runs."""
    server = ServerProcess(model, cache, *options, **keywords)
    try:
        yield server.wait_ready()
    finally:
        server.kill()


def wait_until(condition, seconds: float = 30.0) -> None:
    """For what only polling can see: the state of another process over HTTP."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        threading.Event().wait(0.02)
