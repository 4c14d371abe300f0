"""Stop strings in a text that arrives in pieces.

Nothing of a match is ever let through, and nothing else is lost: text that could still become a match is held back
until the next piece decides it, or the end of the text releases it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class StopResult:
    """``text`` may be sent now. ``matched`` is the stop string that was found; then nothing after it matters."""

    text: str
    matched: str | None = None


class StopMatcher:
    """Looks for ``stops`` (non-empty strings) in the joined pieces. The match that is complete first wins, as if the
    text came character by character; of two that end together, the longer one. So the outcome does not depend on how
    the text was cut.

    ``sent`` counts the characters let through so far.
    """

    def __init__(self, stops: Sequence[str]):
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._stops = tuple(stops)
        self._held = ""
        self.sent = 0

    def push(self, piece: str) -> StopResult:
        """Takes the next piece of text and says what of all that was held back may be sent."""
        text = self._held + piece
        found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            _, begin, stop = min(found)
            self._held = ""
            return self._release(text[:begin], stop)
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return self._release(text[: len(text) - keep])

    def flush(self) -> str:
        """The text ends here: what was held back is no match."""
        held, self._held = self._held, ""
        return self._release(held).text

    def _release(self, text: str, matched: str | None = None) -> StopResult:
        self.sent += len(text)
        return StopResult(text, matched)

    def _undecided(self, text: str) -> int:
        """Length of the longest end of ``text`` with which a stop string begins."""
        return max(
            (size for stop in self._stops for size in range(min(len(stop) - 1, len(text)), 0, -1)
             if text.endswith(stop[:size])), default=0
        )  # fmt: skip
