"""The process of a peer: it reads jobs from its input and writes what they took to its output, a line of JSON each.

Only Python's own library is needed here: a peer runs in the interpreter that has its packages. `Worker` is the other
end.

Jobs: ``{"job": "decode", "prompts": [[ids], ...], "new": n}`` computes all prompts and then ``n`` tokens for each, side
by side and greedy, and says the seconds of the ``n - 1`` steps and the tokens; ``{"job": "prefill", "prompt": [ids]}``
says the seconds to the first token.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

THREADS = os.cpu_count() or 1


class Peer(Protocol):
    def decode(self, prompts: Sequence[Sequence[int]], new: int) -> tuple[float, list[list[int]]]:
        """Seconds of ``new - 1`` steps, and ``new`` tokens of each prompt."""

    def prefill(self, prompt: Sequence[int]) -> float:
        """Seconds from a prompt to its first token."""


def run(make: Callable[[str], tuple[Peer, str]]) -> None:
    """The worker's main: ``make`` gets the model's path and says the peer's version."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print must not mix with the answers

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    try:
        peer, version = make(sys.argv[1])
    except ImportError as error:
        answer({"absent": f"{error}"})
        return
    answer({"version": version})
    for line in sys.stdin:
        job = json.loads(line)
        if job["job"] == "decode":
            seconds, tokens = peer.decode(job["prompts"], job["new"])
            answer({"seconds": seconds, "tokens": tokens})
        else:
            answer({"seconds": peer.prefill(job["prompt"])})


class Absent(Exception):
    """A peer that is not there; the message says why."""


class Worker:
    """A peer in a process of its own; a `Peer`, and a context.

    Raises:
        Absent: its packages are missing.
    """

    def __init__(self, python: str, module: str, model: Path):
        self._module = module
        root = Path(__file__).resolve().parents[1]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        try:
            self._process = subprocess.Popen(
                [python, "-m", module, str(model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True, env=environment,
            )  # fmt: skip
        except OSError as error:
            raise Absent(f"{python}: {error.strerror}") from None
        try:
            first = self._answer()
        except SystemExit as error:
            raise Absent(str(error)) from None
        if "absent" in first:
            self.close()
            raise Absent(first["absent"])
        self.version: str = first["version"]

    def decode(self, prompts: Sequence[Sequence[int]], new: int) -> tuple[float, list[list[int]]]:
        answer = self._ask({"job": "decode", "prompts": [list(prompt) for prompt in prompts], "new": new})
        return answer["seconds"], answer["tokens"]

    def prefill(self, prompt: Sequence[int]) -> float:
        return float(self._ask({"job": "prefill", "prompt": list(prompt)})["seconds"])

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._module} ended with code {self._process.wait()}; run it by hand to see why")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
