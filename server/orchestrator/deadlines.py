"""Ends requests when their time is over: one thread that sleeps until the next deadline, and for ever when there is
none."""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Callable

from server.errors import TimedOut
from server.orchestrator.in_flight import InFlight
from server.orchestrator.live_request import LiveRequest

KEPT = 64  # ended requests that may wait to be forgotten, beside as many as are alive


class Deadlines:
    """Deadlines are seconds of ``clock`` (the orchestrator's)."""

    def __init__(self, in_flight: InFlight, clock: Callable[[], float]):
        self._in_flight = in_flight
        self._clock = clock
        self._heap: list[tuple[float, int, LiveRequest]] = []
        self._limit = KEPT
        self._changed = threading.Condition()
        self._stopping = False

    def add(self, live: LiveRequest) -> None:
        """Watches a request, if it has a deadline."""
        if math.isinf(live.request.deadline):
            return
        with self._changed:
            heapq.heappush(self._heap, (live.request.deadline, live.serial, live))
            if len(self._heap) > self._limit:  # requests that ended long before their deadline are not kept for it
                self._heap = [entry for entry in self._heap if entry[2].outcome is None]
                heapq.heapify(self._heap)
                self._limit = 2 * len(self._heap) + KEPT
            self._changed.notify()

    def run(self) -> None:
        while (due := self._due()) is not None:
            for live in due:
                self._in_flight.end(live, timed_out(live.received, live.request.deadline))

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def _due(self) -> list[LiveRequest] | None:
        """Waits for requests whose time is over. `None`: the server stops."""
        with self._changed:
            while not self._stopping:
                while self._heap and self._heap[0][2].outcome is not None:
                    heapq.heappop(self._heap)
                now = self._clock()
                due = []
                while self._heap and self._heap[0][0] <= now:
                    due.append(heapq.heappop(self._heap)[2])
                if due:
                    return due
                self._changed.wait(min(self._heap[0][0] - now, threading.TIMEOUT_MAX) if self._heap else None)
        return None


def timed_out(received: float, deadline: float) -> TimedOut:
    """The error of a request whose deadline is over."""
    return TimedOut(f"the request was not finished within its {max(0.0, deadline - received):.3g} s")
