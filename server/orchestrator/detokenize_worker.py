"""The detokenize thread: tokens into text, stop strings, and every word that a sink hears.

It takes batches from ``in_flight.outputs`` in order. A stop string that it finds ends the sequence at once, although the
owner may have dispatched another step for it. What still arrives for a request whose outcome is decided is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from server.errors import InternalError
from server.orchestrator.in_flight import Died, Failed, InFlight, Message, PromptScored, explain
from server.orchestrator.live_request import LiveRequest, Output
from server.orchestrator.request import Delta

log = logging.getLogger(__name__)


class DetokenizeWorker:
    """Runs in a thread of its own until ``in_flight.outputs`` is closed and empty."""

    def __init__(self, in_flight: InFlight, on_death: Callable[[BaseException], None]):
        self._in_flight = in_flight
        self._on_death = on_death
        self._generated = 0  # tokens not yet in the metrics

    def run(self) -> None:
        while (message := self._in_flight.outputs.get()) is not None:
            if not isinstance(message, Failed | Died):
                self._in_flight.hook("detokenize")
            self.handle(message)

    def handle(self, message: Message) -> None:
        """Says one message to its sink or sinks."""
        match message:
            case Failed():
                self._fail(message)
            case Died():
                self._on_death(message.error)
            case PromptScored():
                try:
                    self._prompt(message.live)
                except Exception as error:
                    self._faulty(message.live, error)
            case outputs:
                now = self._in_flight.clock()
                for output in outputs:
                    try:
                        self._output(output, now)
                    except Exception as error:
                        self._faulty(output.live, error)
                self._count_generated()

    def bury(self) -> None:
        """After this thread's own death: the last words that are left, so that nobody waits for them."""
        self._in_flight.outputs.close()
        while (message := self._in_flight.outputs.get()) is not None:
            if isinstance(message, Failed | Died):
                self.handle(message)

    def _faulty(self, live: LiveRequest, error: Exception) -> None:
        """A fault in one request ends that request."""
        if live.outcome == "ok":  # the sink failed at the very last; the outcome stands
            self._fail(Failed(live, InternalError(explain("detokenize", error))))
            log.error("the sink of request %s failed", live.request.id, exc_info=error)
        else:
            self._in_flight.fault(live, "detokenize", error)

    def _prompt(self, live: LiveRequest) -> None:
        if live.outcome is None:
            live.sink.prompt_logprobs(tuple(live.prompt_logprobs))

    def _output(self, output: Output, now: float) -> None:
        live = output.live
        transcript = live.transcripts[output.sample]
        # Without the lock: who decides an outcome later has the last word in any case.
        if transcript.finish_reason is not None or live.outcome is not None:
            return
        self._in_flight.hook("detokenize", live.request)
        delta: Delta | None
        if output.token is None:
            assert output.ending is not None
            delta = transcript.end(output.ending.finish_reason)
        else:
            delta = transcript.push(output.token, output.logprob, output.ending)
            self._count(live, output.sample, now)
        if delta is None:
            return
        if delta.finish_reason is None:
            live.sink.delta(delta)
            return
        if output.ending is None:
            self._release(live, output.sample)
        if any(transcript.finish_reason is None for transcript in live.transcripts):
            live.sink.delta(delta)
            return
        self._count_generated()
        with self._in_flight.lock:
            if not self._in_flight.decide(live, "ok"):
                return  # cancelled meanwhile; that is the last word
        live.sink.delta(delta)
        live.sink.finish(live.usage)
        self._in_flight.said(live)

    def _count(self, live: LiveRequest, sample: int, now: float) -> None:
        if live.counted:
            if live.first_token is None:
                self._in_flight.metrics.time_to_first_token.observe(now - live.received)
            self._generated += 1
        live.token_time(sample, now)

    def _count_generated(self) -> None:
        """Once for each batch, and before a client hears that its request has ended."""
        if self._generated:
            self._in_flight.metrics.generated_tokens.inc(self._generated)
            self._generated = 0

    def _release(self, live: LiveRequest, sample: int) -> None:
        """A stop string ended the sample."""
        with self._in_flight.lock:
            self._in_flight.release(live.sequences[sample])

    def _fail(self, message: Failed) -> None:
        try:
            message.live.sink.fail(message.error)
        except Exception as error:
            log.error("the sink of request %s failed", message.live.request.id, exc_info=error)
        self._in_flight.said(message.live)


def death_error(thread: str, error: BaseException) -> InternalError:
    """What clients hear when a thread died."""
    return InternalError(explain(f"the {thread} thread", error))
