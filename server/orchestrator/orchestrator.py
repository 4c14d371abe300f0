"""The life of a request, from a front door to its last token.

::

    any thread      submit: checks, counts against the queue, one Sequence per sample into the scheduler's queue
    prefill         admits a sequence (slot, pages, prefix), computes its prompt chunk by chunk, reads the first token
                        |  inbox: fetch, insert                                            (server/orchestrator/prefill_worker.py)
    generate        owner of the decode state: fetches, inserts, dispatches step N+1, reads step N
                        |  outputs: tokens, bounded                                        (server/orchestrator/generate_worker.py)
    detokenize      text, stop strings; speaks to the sinks                                (server/orchestrator/detokenize_worker.py)
    deadlines       sleeps until the next deadline                                         (server/orchestrator/deadlines.py)

All of them share one lock, behind which the scheduler (``server/orchestrator/scheduler.py``) says what is next; no lock is held
while the engine works. Threads wait on conditions: an idle server costs nothing. Prefill and decode take turns by the
policy of ``server/orchestrator/turns.py``.

The bounds: at most ``max_queue`` sequences wait beyond the slots; two decode steps are in flight; 64 steps wait for the
detokenize thread, then the owner waits for it.

A request ends once, from whatever thread: by its last token, `Ticket.cancel`, its deadline, a fault, a drain that runs
out of time, or a thread's death. Whoever ends it frees slot, pages and queue entry there and then; a prefix in use
comes back when the engine's call returns. Then the sink hears one last word, `finish` or `fail`, from the detokenize
thread.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Literal, Protocol

from engine.api import MAX_SUPPRESSED, Engine, SamplingParams
from server.errors import Cancelled, InvalidRequest, QueueFull, ServerError, Unavailable
from server.orchestrator.deadlines import Deadlines, timed_out
from server.orchestrator.detokenize_worker import DetokenizeWorker, death_error
from server.orchestrator.generate_worker import GenerateWorker
from server.orchestrator.in_flight import Died, FaultHook, InFlight
from server.orchestrator.live_request import LiveRequest, log_outcome
from server.orchestrator.prefill_worker import PrefillWorker
from server.orchestrator.request import GenerateRequest, Sink
from server.orchestrator.scheduler import Scheduler
from server.orchestrator.sequence import Rank, Sequence
from server.orchestrator.transcript import Detokenizer, Transcript
from server.telemetry.metrics import Metrics, Outcome

log = logging.getLogger(__name__)

State = Literal["loading", "warming", "ready", "draining", "failed"]

LAST_WORDS_SECONDS = 5.0  # for sinks to hear their errors once a drain has run out of time


class Tokenizer(Protocol):
    """What is needed of `server.text.tokenizers.Tokenizer`."""

    eos_token_ids: tuple[int, ...]

    def is_special(self, id: int) -> bool: ...

    def detokenizer(self, *, continues: bool = False, shown: frozenset[int] = frozenset()) -> Detokenizer: ...


@dataclasses.dataclass(frozen=True)
class Ticket:
    """A request that was accepted."""

    id: str  # the client's
    _live: LiveRequest
    _in_flight: InFlight

    def cancel(self) -> None:
        """The client has gone: ends the request wherever it is, at once. No effect on one that has ended. Never
        blocks."""
        self._in_flight.end(self._live, Cancelled("the client cancelled the request"), "cancelled")


class Orchestrator:
    """Serves requests on an engine.

    Args:
        engine: installed, allocated and, but for the proof, warm; nobody else calls it from `start` to `close`.
        tokenizer: makes text of tokens; its EOS ids and the model's end sequences.
        metrics: what happens is counted there.
        max_queue: sequences that may wait beyond the slots.
        prefix_cache: share pages of equal beginnings of prompts.
        fault_hook: for tests; see `server.orchestrator.in_flight.FaultHook`.
        on_death: called once when a thread has died and all requests have been failed.
        on_ended: called for each request of a client that has had its last word; `server.orchestrator.tracing` makes spans there.
        clock: seconds; `GenerateRequest.deadline` is in its time.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        metrics: Metrics,
        max_queue: int,
        prefix_cache: bool = True,
        fault_hook: FaultHook | None = None,
        on_death: Callable[[BaseException], None] | None = None,
        on_ended: Callable[[LiveRequest], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.on_death: Callable[[BaseException], None] = on_death or (lambda error: None)
        self._engine = engine
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._capacity = engine.config.slots + max_queue
        self._clock = clock
        self._eos = frozenset(tokenizer.eos_token_ids) | frozenset(engine.model.eos_token_ids)
        self._state: State = "loading"
        self._serials = itertools.count()
        self._in_flight = InFlight(
            engine,
            Scheduler(engine.config, prefix_cache=prefix_cache, model=engine.model),
            metrics,
            self._eos,
            clock,
            fault_hook,
            on_ended,
        )
        self._deadlines = Deadlines(self._in_flight, clock)
        self._detokenize = DetokenizeWorker(self._in_flight, lambda error: self.on_death(error))
        runs = {
            "prefill": PrefillWorker(self._in_flight).run,
            "generate": GenerateWorker(self._in_flight).run,
            "detokenize": self._detokenize.run,
            "deadlines": self._deadlines.run,
        }
        self._threads = [
            threading.Thread(target=self._guard, args=(name, run), name=f"preheat-{name}", daemon=True)
            for name, run in runs.items()
        ]
        scheduler = self._in_flight.scheduler
        metrics.bind(
            running=lambda: self._count(began=True),
            waiting=lambda: self._count(began=False),
            slots_used=lambda: scheduler.slots_used,
            pages_used=lambda: scheduler.pages_used,
            pages_total=scheduler.pages_total,
            ready=lambda: int(self._state == "ready"),
        )

    # States

    @property
    def state(self) -> State:
        """``loading`` until `start`, ``warming`` until `open`, ``ready``, ``draining`` from `drain` or `close` on;
        ``failed`` once a thread has died."""
        return self._state

    @property
    def load(self) -> tuple[int, int]:
        """Sequences that have not ended, and how many there may be."""
        with self._in_flight.lock:
            return self._in_flight.scheduler.unfinished, self._capacity

    def start(self) -> None:
        """Starts the threads. From now on, requests of the warmup proof are served."""
        self._change("warming")
        for thread in self._threads:
            thread.start()

    def open(self) -> None:
        """Accepts requests from outside. What the proof left in the prefix cache is forgotten."""
        with self._in_flight.lock:
            self._in_flight.scheduler.clear_cache()
        self._change("ready")

    def drain(self, timeout: float) -> bool:
        """Refuses new requests and lets those that were accepted finish, for at most ``timeout`` seconds.

        What the timeout cuts off gets an error. True: all finished by themselves.
        """
        self._change("draining")
        in_flight = self._in_flight
        with in_flight.lock:
            in_flight.settled.wait_for(lambda: not in_flight.live or self._state == "failed", timeout)
            left = list(in_flight.live.values())
            cut = [in_flight.fail(live, Unavailable("the server is shutting down", retry_after=1.0)) for live in left]
            in_flight.settled.wait_for(lambda: not in_flight.live, LAST_WORDS_SECONDS)
            return self._state != "failed" and not any(cut) and not in_flight.live

    def close(self) -> None:
        """Ends what is still running, with an error, and all threads. May be called twice, and before `start`."""
        self._change("draining")
        in_flight = self._in_flight
        with in_flight.lock:
            for live in list(in_flight.live.values()):
                in_flight.fail(live, Unavailable("the server is shutting down", retry_after=1.0))
        in_flight.stop()
        self._deadlines.stop()
        in_flight.outputs.close()
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(LAST_WORDS_SECONDS)

    # Requests

    def submit(self, request: GenerateRequest, sink: Sink, *, proof: bool = False) -> Ticket:
        """Accepts a request, or raises what it is to be refused with: `InvalidRequest`, `QueueFull`, `Unavailable`,
        `TimedOut`.

        Thread-safe, does not block. ``sink`` hears everything else from the detokenize thread. ``proof`` marks requests
        of the warmup proof: served before `open`, and not counted.
        """
        received = self._clock()
        try:
            self._check(request)
            live = self._live_request(request, sink, received, proof)
            in_flight = self._in_flight
            with in_flight.lock:
                self._admit_to_queue(live, proof)
                in_flight.live[live.serial] = live
                for sequence in live.sequences:
                    in_flight.of[sequence] = live
                    in_flight.scheduler.add(sequence)
                in_flight.admission.notify_all()
        except ServerError as error:
            if not proof:
                outcome: Outcome = "invalid" if error.status == 400 else "error" if error.status == 504 else "rejected"
                self._metrics.outcome(outcome)
                log_outcome(request.id, outcome, error=error.message)
            raise
        except Exception:
            if not proof:
                self._metrics.outcome("error")
            raise
        self._deadlines.add(live)
        return Ticket(request.id, live, in_flight)

    # Inside

    def _check(self, request: GenerateRequest) -> None:
        """What only the engine's layout can say about a request. The front doors have checked types and ranges; ids
        that are no tokens are refused here again, because the device would clamp them without a word."""
        vocab = self._engine.model.vocab_size
        if not request.prompt:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        for token in request.prompt:
            if not 0 <= token < vocab:
                raise InvalidRequest(f"the prompt has token id {token}: ids are 0 to {vocab - 1}", param="prompt")
        samples = len(request.sampling)
        if not 1 <= samples <= self._capacity:
            raise InvalidRequest(
                f"n is {samples}: this server holds 1 to {self._capacity} sequences (slots + queue) at once", param="n"
            )
        if request.max_tokens < 0:
            raise InvalidRequest(f"max_tokens is {request.max_tokens}: it must be at least 0", param="max_tokens")
        if misfit := self._in_flight.scheduler.misfit(len(request.prompt), request.max_tokens):
            raise InvalidRequest(misfit, param="max_tokens")

    def _live_request(self, request: GenerateRequest, sink: Sink, received: float, proof: bool) -> LiveRequest:
        serial = next(self._serials)
        needs_text = request.detokenize or bool(request.stop)
        continues = any(not self._tokenizer.is_special(token) for token in request.prompt)
        transcripts = [
            Transcript(
                sample,
                self._tokenizer.detokenizer(continues=continues, shown=request.shown_special) if needs_text else None,
                request.stop,
                sampling.min_tokens,
                show_text=request.detokenize,
            )
            for sample, sampling in enumerate(request.sampling)
        ]
        # With max_tokens 0 the samples do not differ: the prompt is scored once.
        sampling_of = request.sampling if request.max_tokens else request.sampling[:1]
        sequences = [
            Sequence(
                rank=Rank(request.priority, serial, sample),
                tokens=list(request.prompt),
                sampling=self._with_suppressed(request, sampling),
                max_tokens=request.max_tokens,
                matcher=request.guide.matcher(ignore_eos=request.ignore_eos) if request.guide else None,
                use_cache=not (request.prompt_logprobs and sample == 0),
            )
            for sample, sampling in enumerate(sampling_of)
        ]
        return LiveRequest(serial, request, sink, sequences, transcripts, received, counted=not proof)

    def _with_suppressed(self, request: GenerateRequest, sampling: SamplingParams) -> SamplingParams:
        """``min_tokens`` holds back whatever would end the sequence."""
        if not sampling.min_tokens:
            return sampling
        vocab = self._engine.model.vocab_size
        ending = set(sampling.suppressed) | request.stop_token_ids | (frozenset() if request.ignore_eos else self._eos)
        suppressed = tuple(sorted(token for token in ending if 0 <= token < vocab))
        if len(suppressed) > MAX_SUPPRESSED:
            raise InvalidRequest(
                f"min_tokens has to hold back {len(suppressed)} ids (EOS and stop_token_ids): at most {MAX_SUPPRESSED}",
                param="stop_token_ids",
            )
        return dataclasses.replace(sampling, suppressed=suppressed)

    def _admit_to_queue(self, live: LiveRequest, proof: bool) -> None:
        """Refuses what cannot be taken on now. The caller holds the lock."""
        if self._state not in (("warming", "ready") if proof else ("ready",)):
            reason = {
                "loading": "the server is starting",
                "warming": "the server is warming up",
                "draining": "the server is shutting down",
                "failed": "the server has failed and will restart",
            }.get(self._state, self._state)
            raise Unavailable(f"{reason}; try again later", retry_after=1.0)
        if live.request.deadline <= live.received:
            raise timed_out(live.received, live.request.deadline)
        excess = self._in_flight.scheduler.unfinished + len(live.sequences) - self._capacity
        if excess > 0:
            raise QueueFull(
                f"the queue is full: {self._in_flight.scheduler.unfinished} sequences run or wait, "
                f"at most {self._capacity} may",
                retry_after=self._retry_after(excess),
            )

    def _retry_after(self, excess: int) -> float:
        """Seconds until ``excess`` sequences will have ended, at the measured rate: slots / mean time in a slot."""
        mean = self._in_flight.service_seconds
        if mean is None:
            return 1.0
        return float(max(1, math.ceil(excess * mean / self._engine.config.slots)))

    def _count(self, *, began: bool) -> int:
        """Requests that run, or that wait."""
        with self._in_flight.lock:
            return sum(
                live.outcome is None and (live.began is not None) == began and live.counted
                for live in self._in_flight.live.values()
            )

    def _change(self, state: State) -> None:
        with self._in_flight.lock:
            if self._state != "failed":
                self._state = state

    def _guard(self, name: str, run: Callable[[], None]) -> None:
        """A thread's body. Whatever comes out of it is the end of the server."""
        try:
            run()
        except BaseException as error:
            log.critical("the %s thread died", name, exc_info=error)
            self._die(name, error)

    def _die(self, name: str, error: BaseException) -> None:
        """Fails everything in flight, then tells `on_death`."""
        in_flight = self._in_flight
        with in_flight.lock:
            first = self._state != "failed"
            self._state = "failed"
            for live in list(in_flight.live.values()):
                in_flight.fail(live, death_error(name, error))
            told = in_flight.outputs.put(Died(error), force=True) if first else True
        in_flight.stop()
        self._deadlines.stop()
        if name == "detokenize":
            self._detokenize.bury()
        if not told:
            self.on_death(error)
