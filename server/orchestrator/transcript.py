"""From tokens to what a client sees of one sample: text, ids, log-probs, and where it stops for a stop string.

Text waits for whole characters (the detokenizer) and for stop strings to be ruled out (the matcher). With stop strings,
ids wait too: an id is let through when the first character of its text is, so that the ids of a match are not sent
either. Without stop strings, ids go at once.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Protocol

from server.orchestrator.request import Delta, FinishReason, TokenLogprob
from server.text.stop_strings import StopMatcher


class Detokenizer(Protocol):
    """What is needed of `server.text.tokenizers.Detokenizer`."""

    def push(self, id: int) -> str: ...

    def flush(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Ending:
    """Why a sample ends with a token. ``hidden``: the token itself (EOS, a stop token) is counted and not shown."""

    finish_reason: FinishReason
    stop_reason: int | None = None
    hidden: bool = False


@dataclasses.dataclass(frozen=True)
class _Held:
    """An id that waits: where its text begins."""

    token: int
    logprob: TokenLogprob | None
    begin: int


class Transcript:
    """One sample. ``detokenizer`` is `None` where no text is wanted and there are no stop strings to look for; with
    ``show_text`` False the text serves the stop strings only. Stop strings count from the ``min_tokens``-th token
    on."""

    def __init__(
        self,
        sample: int,
        detokenizer: Detokenizer | None,
        stops: tuple[str, ...],
        min_tokens: int,
        *,
        show_text: bool = True,
    ):
        self._sample = sample
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops) if stops else None
        self._min_tokens = min_tokens
        self._show_text = show_text
        self._held: collections.deque[_Held] = collections.deque()
        self._length = 0  # characters so far
        self._sent = 0  # characters let through
        self.count = 0  # tokens generated, hidden ones included
        self.finish_reason: FinishReason | None = None

    def push(self, token: int, logprob: TokenLogprob | None, ending: Ending | None = None) -> Delta | None:
        """Takes a token; ``ending`` is given with the last one. Returns what may be sent now, if there is something."""
        self.count += 1
        if self._matcher is None and ending is None:  # nothing waits but incomplete characters
            text = self._detokenizer.push(token) if self._detokenizer else ""
            shown = text if self._show_text else ""
            return Delta(self._sample, shown, (token,), () if logprob is None else (logprob,))
        text = ""
        matched: str | None = None
        if ending is None or not ending.hidden:
            self._held.append(_Held(token, logprob, self._length))
            piece = self._detokenizer.push(token) if self._detokenizer else ""
            text, matched = self._through(piece)
        if matched is None and ending is not None:
            tail = self._detokenizer.flush() if self._detokenizer else ""
            more, matched = self._through(tail)
            text += more
            if matched is None and self._matcher:
                rest = self._matcher.flush()
                self._sent += len(rest)
                text += rest
        if matched is not None:
            return self._delta(text, everything=False, finish_reason="stop", stop_reason=matched)
        if ending is not None:
            return self._delta(
                text, everything=True, finish_reason=ending.finish_reason, stop_reason=ending.stop_reason
            )
        delta = self._delta(text, everything=False)
        return delta if delta.text or delta.tokens else None

    def end(self, finish_reason: FinishReason) -> Delta:
        """The sample ends without a token (``max_tokens`` 0)."""
        return self._delta("", everything=True, finish_reason=finish_reason)

    def _through(self, piece: str) -> tuple[str, str | None]:
        """What of a piece of text may be sent, and the stop string that matched."""
        self._length += len(piece)
        if self._matcher is None or self.count < self._min_tokens:
            self._sent += len(piece)
            return piece, None
        result = self._matcher.push(piece)
        self._sent += len(result.text)
        return result.text, result.matched

    def _delta(
        self,
        text: str,
        *,
        everything: bool,
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
    ) -> Delta:
        self.finish_reason = finish_reason
        out = []
        while self._held and (everything or self._held[0].begin < self._sent):
            out.append(self._held.popleft())
        return Delta(
            sample=self._sample,
            text=text if self._show_text else "",
            tokens=tuple(held.token for held in out),
            logprobs=tuple(held.logprob for held in out if held.logprob is not None),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )
