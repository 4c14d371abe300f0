"""When an upstream is left out because it fails, and when it is tried again. Pure: the time is told by whoever asks.

A *failure* is a call that was sent and came to nothing: the connection was lost, no answer came in time, or the answer was a
fault. So many of them in a row eject the upstream. After a back-off it is on *trial*: one call at a time. One that is answered
admits it, one that fails ejects it for twice as long. That it answers when asked for its state proves nothing about its
answers, so it does not end a row of failures.
"""

from __future__ import annotations

import dataclasses

BACKOFF = 1.0  # seconds of a first ejection
MAX_BACKOFF = 30.0
FORGET = 60.0  # seconds of good behaviour after which an ejection counts as a first one again


@dataclasses.dataclass
class Ejection:
    """One upstream's standing. ``after`` is the number of failures in a row that eject."""

    after: int = 3
    failures: int = 0  # in a row
    count: int = 0  # ejections so far
    until: float | None = None  # the end of the back-off; `None`: admitted
    _backoff: float = 0.0  # of the last ejection
    _admitted: float = 0.0  # when

    def out(self, now: float) -> bool:
        """It gets nothing."""
        return self.until is not None and now < self.until

    def on_trial(self, now: float) -> bool:
        """It gets one call at a time."""
        return self.until is not None and now >= self.until

    def failed(self, now: float) -> bool:
        """A call came to nothing. Returns whether that ejects it. Calls that were sent before it was ejected count once."""
        if self.out(now):
            return False
        self.failures += 1
        if self.failures < self.after and self.until is None:
            return False
        self.eject(now)
        return True

    def eject(self, now: float) -> None:
        """Leaves it out for a back-off, twice as long as the last one unless that is long ago."""
        long_ago = self.until is None and now - self._admitted > FORGET
        self._backoff = BACKOFF if not self._backoff or long_ago else min(2 * self._backoff, MAX_BACKOFF)
        self.until = now + self._backoff
        self.failures = 0
        self.count += 1

    def answered(self, now: float) -> None:
        """A call was answered. One that was sent before it was ejected does not admit it."""
        if self.out(now):
            return
        if self.until is not None:
            self._admitted = now
        self.until = None
        self.failures = 0
