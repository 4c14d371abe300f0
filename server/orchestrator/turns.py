"""Whose turn it is on the device: prefill or decode.

The policy: while rows decode, at most one prefill chunk is dispatched between two decode steps. So a long prompt delays
the next token of a running stream by one chunk at most, and prompts still move on at every step. While nothing decodes,
chunks follow each other freely.
"""

from __future__ import annotations

import threading


class Turns:
    """The prefill thread calls `take` before it dispatches a chunk and `dispatched` after it; the owner of the decode
    state calls `stepping` and `stepped` around the dispatch of a step, and `idle`."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._decoding = False
        self._allowed = True  # a chunk may be dispatched before the next step
        self._dispatching = False  # a turn was taken, its chunk is on the way to the device
        self._overlaps = False  # that chunk may come before or after the step that is being dispatched
        self._stopped = False

    def take(self) -> bool:
        """Waits until one chunk may be dispatched, and uses that permission up. False: the server stops."""
        with self._condition:
            while self._decoding and not self._allowed and not self._stopped:
                self._condition.wait()
            if self._stopped:
                return False
            self._allowed = False
            self._dispatching = True
            return True

    def dispatched(self) -> None:
        """The chunk of the turn that was taken is dispatched, or will not be."""
        with self._condition:
            self._dispatching = False

    def stepping(self) -> None:
        """A decode step is about to be dispatched: a chunk that has not begun waits until it is."""
        with self._condition:
            self._decoding = True
            self._allowed = False
            self._overlaps = self._dispatching

    def stepped(self) -> None:
        """A decode step was dispatched. A chunk dispatched meanwhile may have come after it: then it was the one that
        may."""
        with self._condition:
            self._allowed = not self._overlaps
            self._condition.notify_all()

    def expect(self) -> None:
        """A sequence is about to be inserted, whose first step must not wait behind several chunks."""
        with self._condition:
            self._decoding = True

    def idle(self) -> None:
        """No row decodes."""
        with self._condition:
            self._decoding = False
            self._condition.notify_all()

    def stop(self) -> None:
        """Sends the waiting thread home."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()
