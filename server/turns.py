"""Whose turn it is on the device: prefill or decode.

The policy: while rows decode, at most one prefill chunk is dispatched between two decode steps. So a long prompt delays the next
token of a running stream by one chunk at most, and prompts still move on at every step. While nothing decodes, chunks follow each
other freely.
"""

from __future__ import annotations

import threading


class Turns:
    """The prefill thread calls `take`; the owner of the decode state reports `stepped` and `idle`."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._decoding = False
        self._chunk_allowed = True
        self._stopped = False

    def take(self) -> bool:
        """Waits until one chunk may be dispatched, and uses that permission up. False: the server stops."""
        with self._condition:
            while self._decoding and not self._chunk_allowed and not self._stopped:
                self._condition.wait()
            self._chunk_allowed = False
            return not self._stopped

    def stepped(self) -> None:
        """A decode step was dispatched, or a sequence is about to be inserted whose steps must not wait behind several chunks."""
        with self._condition:
            self._decoding = True
            self._chunk_allowed = True
            self._condition.notify_all()

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
