"""What the orchestrator's tests have in common: an orchestrator on the mock engine, a sink that records, expected
answers.

The answers are worked out here from the rules' definitions, not by the mock engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from engine.api import Engine, SamplingParams
from engine.mock import MockEngine, Rule, digest, mock_config
from server.errors import ServerError
from server.orchestrator.orchestrator import Orchestrator, Ticket
from server.orchestrator.request import Delta, GenerateRequest, TokenLogprob, Usage
from server.orchestrator.sequence import Sequence
from server.telemetry.metrics import OUTCOMES, Metrics
from server.text.tokenizers import ByteTokenizer

GREEDY = SamplingParams()
WAIT = 20.0  # seconds until a test gives up; nothing waits that long when all is well


def letters(prompt: bytes, count: int) -> str:
    """What follows a prompt under the rule `engine.mock.digest`: base 31, modulo 1009, letter of the remainder by
    26."""
    tokens = list(prompt)
    for _ in range(count):
        value = 0
        for token in tokens:
            value = (value * 31 + token) % 1009
        tokens.append(97 + value % 26)
    return bytes(tokens[len(prompt) :]).decode()


class Recorder:
    """A sink that keeps everything, and notices what must not happen after the last word."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.prompt: tuple[TokenLogprob | None, ...] | None = None
        self.usage: Usage | None = None
        self.error: ServerError | None = None
        self.first = threading.Event()
        self.done = threading.Event()
        self.after_the_end: list[str] = []
        self.thread: str | None = None

    def prompt_logprobs(self, logprobs: tuple[TokenLogprob | None, ...]) -> None:
        self._note("prompt_logprobs")
        self.prompt = logprobs

    def delta(self, delta: Delta) -> None:
        self._note("delta")
        self.deltas.append(delta)
        self.first.set()

    def finish(self, usage: Usage) -> None:
        self._note("finish")
        self.usage = usage
        self.done.set()

    def fail(self, error: ServerError) -> None:
        self._note("fail")
        self.error = error
        self.done.set()

    def _note(self, call: str) -> None:
        if self.done.is_set():
            self.after_the_end.append(call)
        self.thread = threading.current_thread().name

    # For tests

    def wait(self) -> Recorder:
        assert self.done.wait(WAIT), "no last word"
        return self

    def text(self, sample: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas if delta.sample == sample)

    def tokens(self, sample: int = 0) -> list[int]:
        return [token for delta in self.deltas if delta.sample == sample for token in delta.tokens]

    def last(self, sample: int = 0) -> Delta:
        return [delta for delta in self.deltas if delta.sample == sample][-1]

    def ok(self) -> Recorder:
        self.wait()
        assert self.error is None, self.error
        assert self.usage is not None
        return self


class Clock:
    """A clock that a test moves. Whoever waits for it looks again after the real time it had meant to wait."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Server:
    """An orchestrator, its engine and metrics."""

    def __init__(self, orchestrator: Orchestrator, engine: Any, metrics: Metrics):
        self.orchestrator = orchestrator
        self.engine = engine
        self.metrics = metrics
        self.recorders: list[Recorder] = []
        self.sequences: list[Sequence] = []  # of all requests accepted
        self._count = 0

    def submit(
        self,
        prompt: bytes | tuple[int, ...],
        max_tokens: int = 8,
        *,
        n: int = 1,
        sampling: SamplingParams = GREEDY,
        proof: bool = False,
        sink: Recorder | None = None,
        id: str | None = None,
        **fields,
    ) -> tuple[Ticket, Recorder]:
        self._count += 1
        recorder = sink or Recorder()
        self.recorders.append(recorder)
        request = GenerateRequest(
            id=id or f"test-{self._count}",
            prompt=tuple(prompt),
            sampling=tuple(dataclasses.replace(sampling, sample=sample) for sample in range(n)),
            max_tokens=max_tokens,
            **fields,
        )
        ticket = self.orchestrator.submit(request, recorder, proof=proof)
        self.sequences += ticket._live.sequences
        return ticket, recorder

    def run(self, prompt: bytes | tuple[int, ...], max_tokens: int = 8, **options) -> Recorder:
        return self.submit(prompt, max_tokens, **options)[1].ok()

    def in_company(self, recorders: list[Recorder]) -> None:
        """The owner reads on only as the others arrive, so that all of them decode at once, whatever the machine's
        mood. What it has to do for their prompts it can't do then: they must share no page with another."""
        awaited = list(recorders)

        def wait(call) -> bool:
            if awaited and threading.current_thread().name == "preheat-generate":
                assert awaited.pop(0).first.wait(WAIT)
            return False

        self.engine.gate("read", wait)

    def outcomes(self) -> dict[str, int]:
        """Requests by outcome, without the zeros."""
        counts = {outcome: int(self.metrics.value("preheat_requests_total", outcome=outcome)) for outcome in OUTCOMES}
        return {outcome: count for outcome, count in counts.items() if count}

    def gauges(self) -> tuple[float, ...]:
        """Running, waiting, slots and pages in use."""
        names = ("requests_running", "requests_waiting", "slots_used", "kv_pages_used")
        return tuple(self.metrics.value(f"preheat_{name}") for name in names)


@contextlib.contextmanager
def serving(
    rule: Rule = digest,
    *,
    max_queue: int = 16,
    opened: bool = True,
    engine: Engine | None = None,
    prefix_cache: bool = True,
    fault_hook: Callable | None = None,
    on_death: Callable[[BaseException], None] | None = None,
    on_ended: Callable | None = None,
    clock: Callable[[], float] = time.monotonic,
    **config,
) -> Iterator[Server]:
    """A server that is started, opened, closed, and looked over at the end."""
    engine = engine or MockEngine(rule, config=mock_config(**config))
    metrics = Metrics()
    orchestrator = Orchestrator(
        engine, ByteTokenizer(), metrics=metrics, max_queue=max_queue, prefix_cache=prefix_cache, fault_hook=fault_hook,
        on_death=on_death, on_ended=on_ended, clock=clock,
    )  # fmt: skip
    server = Server(orchestrator, engine, metrics)
    orchestrator.start()
    if opened:
        orchestrator.open()
    try:
        yield server
    except BaseException:
        if isinstance(engine, MockEngine):
            engine.open_gates()
        raise
    finally:
        orchestrator.close()
    if isinstance(engine, MockEngine):
        assert engine.violations == []
    assert all(not recorder.after_the_end for recorder in server.recorders)
    alive = [thread.name for thread in threading.enumerate() if thread.name.startswith("preheat-")]
    assert alive == []
