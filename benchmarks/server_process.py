"""A server for a benchmark: ``preheat serve`` in a process of its own, on free ports."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

PORTS = re.compile(r"serving (?:HTTP on (http://\S+), )?gRPC on (\S+);")
START_SECONDS = 600.0
TICKS = 100  # per second, of the times in /proc (USER_HZ)


class BenchServer:
    """A context: ready on entry, gone on exit. ``http`` and ``grpc`` are its addresses; its log goes to ``log``."""

    def __init__(self, model: str, *options: str):
        self._log = tempfile.NamedTemporaryFile("w+", prefix="preheat-bench-", suffix=".log", delete=False)  # noqa: SIM115 (as long as the process)
        self.log = Path(self._log.name)
        command = [sys.executable, "-m", "server", "serve", "--model", model, "--http-port", "0", "--grpc-port", "0"]
        self.process = subprocess.Popen([*command, *options], stderr=self._log, stdout=subprocess.DEVNULL)
        self.http = self.grpc = ""

    def __enter__(self) -> BenchServer:
        pause = threading.Event()
        for _ in range(int(START_SECONDS / 0.1)):
            text = self.log.read_text()
            if "ready after" in text:
                ports = PORTS.search(text)
                assert ports is not None
                self.http, self.grpc = ports.groups()
                return self
            if self.process.poll() is not None:
                break
            pause.wait(0.1)
        text = self.log.read_text()
        self.__exit__()
        raise SystemExit(f"the server did not become ready:\n{text}")

    def pids(self) -> dict[str, int]:
        """The server and its proxy (Linux)."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return {"server": self.process.pid, "proxy": int(children[0])}

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()
        if not any(exc):
            os.unlink(self.log)


def cpu_seconds(process: int | str) -> float:
    """User and system time so far of a process, or of a thread by its path below /proc (Linux)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS
