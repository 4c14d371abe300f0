"""The owner of the decode state: inserts, fetches, and decode steps, one step ahead of the host.

Each turn: do what the prefill thread left in the inbox, plan and dispatch the next step, and only then read the step
before it. So the device always has work while the host takes in tokens. The price: a step may contain rows whose
sequences have ended by the time it is read; their tokens are dropped (`Scheduler.commit`).

Pages may be given away while a dispatched step still writes to them, because whatever the next holder writes is
dispatched later, by this same thread.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from engine.api import Row
from server.prefill_worker import sampling_now
from server.scheduler import PlannedRow
from server.shared import Fetch, Insert, Shared


@dataclasses.dataclass(frozen=True)
class Dispatched:
    """A step on its way, and what its rows are."""

    step: Any
    rows: list[PlannedRow]
    at: float
    counted: bool  # False for a step of the warmup proof's requests only


class GenerateWorker:
    """Runs in a thread of its own until ``shared.stop``."""

    def __init__(self, shared: Shared):
        self._shared = shared
        self._engine = shared.engine
        self._last_read = 0.0

    def run(self) -> None:
        pending: Dispatched | None = None
        while (tasks := self._tasks(pending)) is not None:
            self._shared.hook("generate")
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
        shared = self._shared
        with shared.lock:
            while not shared.stopping:
                rows = shared.scheduler.has_rows
                if not shared.inbox and not rows:
                    shared.turns.idle()
                if shared.inbox or rows or pending is not None:
                    tasks = list(shared.inbox)
                    shared.inbox.clear()
                    return tasks
                shared.work.wait()
        return None

    def _fetch(self, task: Fetch) -> None:
        shared = self._shared
        sequence = task.sequence
        with shared.lock:
            wanted = shared.scheduler.current(sequence, task.epoch)
            pages = np.array(sequence.pages[: sequence.shared_pages], np.int32)
            tokens = np.array(sequence.tokens[: len(pages) * self._engine.config.page_size], np.int32)
        try:
            if wanted:
                self._engine.fetch(task.prefix, pages, tokens)
        except Exception as error:  # the prefill thread raises it, in the name of the request
            task.error = error
        with shared.lock:
            task.done = True
            shared.fetched.notify_all()

    def _insert(self, task: Insert) -> None:
        shared = self._shared
        sequence = task.sequence
        with shared.lock:
            wanted = shared.scheduler.current(sequence, task.epoch)
            slot, shared_pages, length = sequence.slot, sequence.shared_pages, sequence.prefill_length
            pages = np.array(sequence.pages, np.int32)
        try:
            if wanted:
                assert slot is not None
                sampling, generated = sampling_now(sequence)
                extra = {} if generated is None else {"generated": generated}
                shared.hook("insert", task.live.request)
                self._engine.insert(
                    task.prefix, task.first, slot, pages, length, sampling, shared_pages=shared_pages, **extra
                )
                with shared.lock:
                    if shared.scheduler.current(sequence, task.epoch):
                        shared.scheduler.inserted(sequence)
        except Exception as error:
            shared.fault(task.live, "insert", error)
        self._engine.release_prefix(task.prefix)
        with shared.lock:
            shared.prefix_returned()
            if task.last_output is not None:
                shared.release(sequence)
        if task.last_output is not None:
            shared.outputs.put([task.last_output])

    def _plan(self) -> tuple[list[PlannedRow], bool]:
        """The rows of the next step, without those a test's hook makes fail, and whether a client's is among them."""
        shared = self._shared
        with shared.lock:
            rows = shared.scheduler.plan()
            lives = [shared.of[row.sequence] for row in rows]
            if shared.scheduler.waiting:
                shared.admission.notify_all()  # somebody may have been put back
        sound = []
        for row, live in zip(rows, lives, strict=True):
            try:
                shared.hook("decode", live.request)
                if row.sequence.matcher is not None:
                    self._engine.set_mask(row.slot, row.sequence.matcher.mask())
                sound.append(row)
            except Exception as error:
                shared.fault(live, "decode", error)
        return sound, any(live.counted for live in lives)

    def _dispatch(self, rows: list[PlannedRow], counted: bool) -> Dispatched | None:
        if not rows:
            return None
        at = self._shared.clock()
        self._shared.turns.stepping()
        step = self._engine.generate([Row(row.slot, row.page) for row in rows])
        self._shared.turns.stepped()
        if counted:
            self._shared.metrics.batch_size.observe(len(rows))
        return Dispatched(step, rows, at, counted)

    def _commit(self, dispatched: Dispatched) -> None:
        """Waits for a step and takes its tokens in; what belongs to a stay that is over is dropped."""
        shared = self._shared
        results = self._engine.read(dispatched.step)
        now = shared.clock()
        if dispatched.counted:
            shared.metrics.decode_step_seconds.observe(now - max(dispatched.at, self._last_read))
        self._last_read = now
        outputs = []
        tokens = results.tokens.tolist()
        with shared.lock:
            for index, (row, token) in enumerate(zip(dispatched.rows, tokens, strict=True)):
                output = shared.commit(row.sequence, row.epoch, token, results, index)
                if output is None:
                    continue
                outputs.append(output)
                if output.ending is not None:
                    shared.release(row.sequence)
        if outputs:
            shared.outputs.put(outputs)
