"""What the orchestrator's threads share: one lock, the scheduler behind it, and the end of requests.

Everything that changes the scheduler or decides an outcome holds ``lock``. The conditions belong to that lock:

    work       for the owner thread: an insert or fetch to do, a row to advance
    admission  for the prefill thread: somebody queued, or something freed
    fetched    for the prefill thread: its fetch is done
    settled    for `drain`: a request had its last word

A request ends once (`end`): its outcome is decided, all it holds is free, and its last word goes into ``outputs``,
behind whatever was there before. Only the detokenize thread takes from ``outputs`` and speaks to sinks.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
from collections.abc import Callable

from engine.api import Engine, Prefix, Step, TokenResults
from server.errors import InternalError, ServerError
from server.orchestrator.bounded_queue import BoundedQueue
from server.orchestrator.live_request import LiveRequest, Output
from server.orchestrator.request import GenerateRequest, TokenLogprob
from server.orchestrator.scheduler import Scheduler
from server.orchestrator.sequence import Sequence
from server.orchestrator.transcript import Ending
from server.orchestrator.turns import Turns
from server.telemetry.metrics import Metrics, Outcome

log = logging.getLogger(__name__)

FaultHook = Callable[[str, GenerateRequest | None], None]
"""Called as (stage, request) in stages ``prefill``, ``insert``, ``decode`` and ``detokenize``, and as (stage, None)
once for every turn of that stage's thread (``prefill``, ``generate``, ``detokenize``). What it raises is a fault of the
request, or the thread's death."""

OUTPUT_BATCHES = 64  # steps that may wait for the detokenize thread


@dataclasses.dataclass
class Fetch:
    """Prefill thread to owner: bring cached pages into a prefix."""

    sequence: Sequence
    epoch: int
    prefix: Prefix
    done: bool = False
    error: Exception | None = None


@dataclasses.dataclass(frozen=True)
class Insert:
    """Prefill thread to owner: a prompt is computed. ``last_output`` is set where the first token was also the last."""

    live: LiveRequest
    sequence: Sequence
    epoch: int
    prefix: Prefix
    first: Step
    last_output: Output | None


@dataclasses.dataclass(frozen=True)
class PromptScored:
    """A request's prompt log-probs are complete."""

    live: LiveRequest


@dataclasses.dataclass(frozen=True)
class Failed:
    """The last word about a request that did not end well."""

    live: LiveRequest
    error: ServerError


@dataclasses.dataclass(frozen=True)
class Died:
    """A thread died; everything in flight has been failed before this."""

    error: BaseException


Message = list[Output] | PromptScored | Failed | Died


class InFlight:
    """See the module's docstring. Made by the orchestrator, one for all its threads."""

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        metrics: Metrics,
        eos_token_ids: frozenset[int],
        clock: Callable[[], float],
        fault_hook: FaultHook | None,
        on_ended: Callable[[LiveRequest], None] | None = None,
    ):
        self.engine = engine
        self.scheduler = scheduler
        self.metrics = metrics
        self.eos_token_ids = eos_token_ids
        self.clock = clock
        self.turns = Turns()
        self.outputs: BoundedQueue[Message] = BoundedQueue(OUTPUT_BATCHES)
        self.lock = threading.Lock()
        self.work = threading.Condition(self.lock)
        self.admission = threading.Condition(self.lock)
        self.fetched = threading.Condition(self.lock)
        self.settled = threading.Condition(self.lock)
        self.inbox: collections.deque[Fetch | Insert] = collections.deque()
        self.live: dict[int, LiveRequest] = {}  # until their last word was said
        self.of: dict[Sequence, LiveRequest] = {}  # until they end
        self.stopping = False
        self.service_seconds: float | None = None  # moving average of a sequence's time in its slot
        self._fault_hook = fault_hook
        self._on_ended = on_ended
        self._began: dict[Sequence, float] = {}

    def hook(self, stage: str, request: GenerateRequest | None = None) -> None:
        """Where tests let a request or a thread fail."""
        if self._fault_hook is not None:
            self._fault_hook(stage, request)

    # Under the lock

    def began(self, sequence: Sequence) -> LiveRequest:
        """A sequence was admitted: the first time, its request leaves the queue."""
        live = self.of[sequence]
        now = self.clock()
        self._began.setdefault(sequence, now)
        cached = sequence.shared_pages * self.engine.config.page_size
        if live.counted:
            self.metrics.cached_prompt_tokens.inc(cached)
        if sequence.rank.sample == 0 and not sequence.put_back:
            live.cached_tokens = cached
        if live.began is None:
            live.began = now
            if live.counted:
                self.metrics.queue_seconds.observe(now - live.received)
                self.metrics.prompt_tokens.inc(len(live.request.prompt))
        return live

    def commit(
        self, sequence: Sequence, epoch: int, token: int, results: TokenResults, row: int
    ) -> Output | None:
        """Takes in a token that was read, that of a row. `None`: it belongs to a stay that is over, and is dropped."""
        if not self.scheduler.commit(sequence, epoch, token):
            return None
        live = self.of[sequence]
        ending = self._ending(live.request, token, sequence.generated)
        if sequence.matcher is not None and not (ending and ending.hidden):
            try:
                sequence.matcher.accept(token)
            except ServerError as error:
                self.fail(live, error)
                return None
            if sequence.matcher.finished:
                ending = Ending("stop", hidden=token in self.eos_token_ids)
        logprob = token_logprob(results, row) if sequence.sampling.logprobs else None
        return Output(live, sequence.rank.sample, token, logprob, ending)

    def _ending(self, request: GenerateRequest, token: int, generated: int) -> Ending | None:
        if token in request.stop_token_ids:
            return Ending("stop", stop_reason=token, hidden=True)
        if token in self.eos_token_ids and not request.ignore_eos:
            return Ending("stop", hidden=True)
        if generated >= request.max_tokens:
            return Ending("length")
        return None

    def release(self, sequence: Sequence) -> None:
        """A sequence needs nothing any more."""
        self.scheduler.end(sequence)
        live = self.of.pop(sequence, None)
        if live is not None:
            begun = self._began.pop(sequence, None)
            if begun is not None and live.counted:
                spent = self.clock() - begun
                old = self.service_seconds
                self.service_seconds = spent if old is None else 0.8 * old + 0.2 * spent
        self.admission.notify_all()

    def complete(self, sequence: Sequence) -> None:
        """The first token was the last: the sequence stays only as long as its prompt's pages take to be written."""
        self.scheduler.complete(sequence)

    def prefix_returned(self) -> None:
        self.scheduler.prefix_returned()
        self.admission.notify_all()

    def decide(self, live: LiveRequest, outcome: Outcome) -> bool:
        """Decides the outcome and frees all the request holds. False: it was decided before."""
        if live.outcome is not None:
            return False
        live.outcome = outcome
        for sequence in live.sequences:
            self.release(sequence)
        live.account(self.metrics, self.clock())
        return True

    def fail(self, live: LiveRequest, error: ServerError, outcome: Outcome = "error") -> bool:
        """`end` for those who hold the lock."""
        if not self.decide(live, outcome):
            return False
        live.error = error.message
        self.outputs.put(Failed(live, error), force=True)
        return True

    # Without the lock

    def end(self, live: LiveRequest, error: ServerError, outcome: Outcome = "error") -> bool:
        """Ends a request with an error, wherever it is. False: it had ended already."""
        with self.lock:
            return self.fail(live, error, outcome)

    def fault(self, live: LiveRequest, stage: str, error: Exception) -> None:
        """A fault of ours in one request ends that request."""
        log.error("request %s failed in %s", live.request.id, stage, exc_info=error)
        self.end(live, error if isinstance(error, ServerError) else InternalError(explain(stage, error)))

    def said(self, live: LiveRequest) -> None:
        """The last word about a request was said to its sink."""
        live.log()
        if self._on_ended is not None and live.counted:
            try:
                self._on_ended(live)
            except Exception:  # whoever looks on must not stop the server
                log.exception("request %s could not be traced", live.request.id)
        with self.lock:
            self.live.pop(live.serial, None)
            self.settled.notify_all()

    def stop(self) -> None:
        """Sends the prefill and owner threads home."""
        with self.lock:
            self.stopping = True
            for condition in (self.work, self.admission, self.fetched, self.settled):
                condition.notify_all()
        self.turns.stop()


def token_logprob(results: TokenResults, row: int) -> TokenLogprob:
    """One row of results as it is reported."""
    top = zip(results.top_tokens[row].tolist(), results.top_logprobs[row].tolist(), strict=True)
    return TokenLogprob(int(results.tokens[row]), float(results.logprobs[row]), tuple(top))


def explain(stage: str, error: BaseException) -> str:
    """What a client may know of a fault of ours: the stage, and whether the device ran out of memory."""
    if "RESOURCE_EXHAUSTED" in str(error):
        return f"the device ran out of memory in {stage} (RESOURCE_EXHAUSTED)"
    return f"an internal fault in {stage}; the server's log has the details"
