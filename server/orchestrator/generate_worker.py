"""The owner of the decode state: inserts, fetches, and decode steps, one step ahead of the host.

Each turn: do what the prefill thread left in the inbox, plan and dispatch the next step, and only then read the step
before it. So the device always has work while the host takes in tokens. The price: a step may contain rows whose
sequences have ended by the time it is read; their tokens are dropped (`Scheduler.commit`).

Pages may be given away while a dispatched step still writes to them, because whatever the next holder writes is
dispatched later, by this same thread.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from engine.api import Row, Step
from server.orchestrator.in_flight import Fetch, InFlight, Insert
from server.orchestrator.prefill_worker import sampling_now
from server.orchestrator.scheduler import PlannedRow


@dataclasses.dataclass(frozen=True)
class Dispatched:
    """A step on its way, and what its rows are."""

    step: Step
    rows: list[PlannedRow]
    at: float
    counted: bool  # False for a step of the warmup proof's requests only


class GenerateWorker:
    """Runs in a thread of its own until ``in_flight.stop``."""

    def __init__(self, in_flight: InFlight):
        self._in_flight = in_flight
        self._engine = in_flight.engine
        self._last_read = 0.0

    def run(self) -> None:
        pending: Dispatched | None = None
        while (tasks := self._tasks(pending)) is not None:
            self._in_flight.hook("generate")
            for task in tasks:
                if isinstance(task, Fetch):
                    self._fetch(task)
                else:
                    self._insert(task)
            dispatched = self._dispatch(*self._plan())
            if pending is not None:
                self._commit(pending)
            pending = dispatched

    def _tasks(self, pending: Dispatched | None) -> list[Fetch | Insert] | None:
        """Waits until there is something to do. `None`: the server stops."""
        in_flight = self._in_flight
        with in_flight.lock:
            while not in_flight.stopping:
                rows = in_flight.scheduler.has_rows
                if not in_flight.inbox and not rows:
                    in_flight.turns.idle()
                if in_flight.inbox or rows or pending is not None:
                    tasks = list(in_flight.inbox)
                    in_flight.inbox.clear()
                    return tasks
                in_flight.work.wait()
        return None

    def _fetch(self, task: Fetch) -> None:
        in_flight = self._in_flight
        sequence = task.sequence
        with in_flight.lock:
            wanted = in_flight.scheduler.current(sequence, task.epoch)
            pages = np.array(sequence.pages[: sequence.shared_pages], np.int32)
            tokens = np.array(sequence.tokens[: len(pages) * self._engine.config.page_size], np.int32)
            slot = sequence.slot
        try:
            if wanted:
                assert slot is not None
                self._engine.fetch(task.prefix, pages, tokens, slot=slot)
        except Exception as error:  # the prefill thread raises it, in the name of the request
            task.error = error
        with in_flight.lock:
            task.done = True
            in_flight.fetched.notify_all()

    def _insert(self, task: Insert) -> None:
        in_flight = self._in_flight
        sequence = task.sequence
        with in_flight.lock:
            wanted = in_flight.scheduler.current(sequence, task.epoch)
            slot, shared_pages, length = sequence.slot, sequence.shared_pages, sequence.prefill_length
            pages = np.array(sequence.pages, np.int32)
        try:
            if wanted:
                assert slot is not None
                sampling, generated = sampling_now(sequence)
                extra = {} if generated is None else {"generated": generated}
                in_flight.hook("insert", task.live.request)
                self._engine.insert(
                    task.prefix, task.first, slot, pages, length, sampling, shared_pages=shared_pages, **extra
                )
                with in_flight.lock:
                    if in_flight.scheduler.current(sequence, task.epoch):
                        in_flight.scheduler.inserted(sequence)
        except Exception as error:
            in_flight.fault(task.live, "insert", error)
        self._engine.release_prefix(task.prefix)
        with in_flight.lock:
            in_flight.prefix_returned()
            if task.last_output is not None:
                in_flight.release(sequence)
        if task.last_output is not None:
            in_flight.outputs.put([task.last_output])

    def _plan(self) -> tuple[list[PlannedRow], bool]:
        """The rows of the next step, without those a test's hook makes fail, and whether a client's is among them."""
        in_flight = self._in_flight
        with in_flight.lock:
            rows = in_flight.scheduler.plan()
            lives = [in_flight.of[row.sequence] for row in rows]
            if in_flight.scheduler.waiting:
                in_flight.admission.notify_all()  # somebody may have been put back
        sound = []
        for row, live in zip(rows, lives, strict=True):
            try:
                in_flight.hook("decode", live.request)
                if row.sequence.matcher is not None:
                    self._engine.set_mask(row.slot, row.sequence.matcher.mask())
                sound.append(row)
            except Exception as error:
                in_flight.fault(live, "decode", error)
        return sound, any(live.counted for live in lives)

    def _dispatch(self, rows: list[PlannedRow], counted: bool) -> Dispatched | None:
        if not rows:
            return None
        at = self._in_flight.clock()
        self._in_flight.turns.stepping()
        step = self._engine.generate([Row(row.slot, row.page) for row in rows])
        self._in_flight.turns.stepped()
        if counted:
            self._in_flight.metrics.batch_size.observe(len(rows))
        return Dispatched(step, rows, at, counted)

    def _commit(self, dispatched: Dispatched) -> None:
        """Waits for a step and takes its tokens in; what belongs to a stay that is over is dropped."""
        in_flight = self._in_flight
        results = self._engine.read(dispatched.step)
        now = in_flight.clock()
        if dispatched.counted:
            in_flight.metrics.decode_step_seconds.observe(now - max(dispatched.at, self._last_read))
        self._last_read = now
        outputs = []
        tokens = results.tokens.tolist()
        with in_flight.lock:
            for index, (row, token) in enumerate(zip(dispatched.rows, tokens, strict=True)):
                output = in_flight.commit(row.sequence, row.epoch, token, results, index)
                if output is None:
                    continue
                outputs.append(output)
                if output.ending is not None:
                    in_flight.release(row.sequence)
        if outputs:
            in_flight.outputs.put(outputs)
