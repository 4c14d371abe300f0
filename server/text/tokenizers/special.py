"""Added tokens: spellings that are one id, found in text before anything else looks at it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class SpecialToken:
    """``control`` tokens are left out of decoded text. A ``word`` is found in any text, other tokens only where they are to
    be parsed, and never in a message. The other flags are those of transformers' ``AddedToken``.
    """

    id: int
    content: str
    control: bool = True
    word: bool | None = None  # None: unless control
    lstrip: bool = False  # takes the whitespace before it
    rstrip: bool = False
    single_word: bool = False  # only between spaces
    normalized: bool | None = None  # found in normalized text, by tokenizers that normalize; None: unless control


class SpecialTokens:
    """The added tokens of a tokenizer."""

    def __init__(self, tokens: Iterable[SpecialToken]):
        self.tokens = {token.content: token for token in tokens if token.content}
        self.by_id = {token.id: token for token in self.tokens.values()}
        self.control_ids = frozenset(token.id for token in self.tokens.values() if token.control)
        self._all = _alternatives(self.tokens)
        words = {content for content, token in self.tokens.items() if _or(token.word, not token.control)}
        self._words = _alternatives(words)
        self.unspoken = tuple(content for content in self.tokens if content not in words)  # stay text in messages

    def split(self, text: str, *, parse_special: bool) -> list[str | int]:
        """The text cut at added tokens: their ids, and the stretches of plain text between them."""
        pattern = self._all if parse_special else self._words
        parts: list[str | int] = []
        begin = 0
        for match in pattern.finditer(text) if pattern is not None else ():
            token = self.tokens[match[0]]
            if token.single_word and not _alone(text, match.start(), match.end()):
                continue
            stretch = text[begin : match.start()]
            begin = match.end()
            if token.lstrip:
                stretch = stretch.rstrip()
            if token.rstrip:
                while begin < len(text) and text[begin].isspace():
                    begin += 1
            parts += [stretch, token.id] if stretch else [token.id]
        return [*parts, text[begin:]] if begin < len(text) else parts


def _or(value: bool | None, default: bool) -> bool:
    return default if value is None else value


def _alone(text: str, begin: int, end: int) -> bool:
    """Whether only spaces, or nothing, are beside a stretch of text."""
    return (begin == 0 or text[begin - 1] == " ") and (end == len(text) or text[end] == " ")


def _alternatives(contents: Iterable[str]) -> re.Pattern[str] | None:
    """Matches any of the spellings, the longest first; `None` where there are none."""
    ordered = sorted(contents, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None
