"""A request between `submit` and its last word: its sequences, transcripts, times and outcome."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, NamedTuple

from server.orchestrator.request import GenerateRequest, Sink, TokenLogprob, Usage
from server.orchestrator.sequence import Sequence
from server.orchestrator.transcript import Ending, Transcript

if TYPE_CHECKING:
    from server.telemetry.metrics import Metrics, Outcome

log = logging.getLogger("preheat.request")


@dataclasses.dataclass(eq=False)
class LiveRequest:
    """``outcome`` is decided once, under the orchestrator's lock; afterwards nothing is held, and only the last word to
    the sink may still be on its way. Times are seconds of the orchestrator's clock."""

    serial: int  # internal identity; `request.id` is the client's and need not be unique
    request: GenerateRequest
    sink: Sink
    sequences: list[Sequence]
    transcripts: list[Transcript]  # one per sample
    received: float
    counted: bool = True  # False for the requests of the warmup proof, which no client sent
    began: float | None = None  # the first sequence left the queue
    first_token: float | None = None
    cached_tokens: int = 0  # of the first sample
    outcome: Outcome | None = None
    ended: float | None = None  # when the outcome was decided
    error: str | None = None  # why, where it is not "ok"
    prompt_logprobs: list[TokenLogprob | None] = dataclasses.field(default_factory=list)
    sample_times: dict[int, tuple[float, float]] = dataclasses.field(default_factory=dict)  # first and latest token

    @property
    def usage(self) -> Usage:
        return Usage(
            len(self.request.prompt), sum(transcript.count for transcript in self.transcripts), self.cached_tokens
        )

    def token_time(self, sample: int, now: float) -> None:
        """Notes that a token of a sample goes out."""
        if self.first_token is None:
            self.first_token = now
        begun, _ = self.sample_times.get(sample, (now, now))
        self.sample_times[sample] = (begun, now)

    def account(self, metrics: Metrics, now: float) -> None:
        """Counts the request; called when its outcome has been decided."""
        assert self.outcome is not None
        self.ended = now
        if not self.counted:
            return
        metrics.outcome(self.outcome)
        metrics.request_seconds.observe(now - self.received)
        if self.outcome == "ok":
            for sample, (begun, latest) in self.sample_times.items():
                if self.transcripts[sample].count > 1:
                    gap = (latest - begun) / (self.transcripts[sample].count - 1)
                    metrics.time_per_output_token.observe(gap)

    def log(self) -> None:
        """The request's line in the log; called without locks, for a log may be slow."""
        assert self.outcome is not None
        usage = self.usage
        log_outcome(
            self.request.id,
            self.outcome,
            level=logging.INFO if self.counted else logging.DEBUG,
            model=self.request.adapter,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            queue_seconds=_since(self.received, self.began),
            first_token_seconds=_since(self.received, self.first_token),
            seconds=_since(self.received, self.ended),
            finish_reasons=[transcript.finish_reason for transcript in self.transcripts],
            put_back=sum(sequence.put_back for sequence in self.sequences),
            error=self.error,
        )


class Output(NamedTuple):
    """A token of a sample on its way to the sink; ``ending`` with the last one. ``token`` is `None` with ``max_tokens``
    0."""

    live: LiveRequest
    sample: int
    token: int | None
    logprob: TokenLogprob | None
    ending: Ending | None


def log_outcome(request_id: str, outcome: str, *, level: int = logging.INFO, **fields: object) -> None:
    """One line per request; the fields are also attributes of the record (``record.request``), for structured logs."""
    known = {name: value for name, value in fields.items() if value is not None}
    text = " ".join(f"{name}={value}" for name, value in known.items())
    log.log(level, "request %s %s %s", request_id, outcome, text,
            extra={"request": {"id": request_id, "outcome": outcome, **known}})  # fmt: skip


def _since(begin: float, moment: float | None) -> float | None:
    return None if moment is None else round(moment - begin, 6)
