"""Tool calls in the text of an answer, as it arrives: what is content, what is a call, its arguments piece by piece.

What does not parse as a call of a known function is content, markers and all. Nothing is lost, and the outcome does not
depend on how the text was cut: the joined pieces are what `ToolParser` makes of the whole text.

A call is recognised by its head, ``{"name": "f", "arguments": {`` or ``f[ARGS]{``; from there on its arguments are
passed on as they come, so they are the model's own JSON text. A call that is an object behind a marker may also have its
keys in another order; it is then passed on when it is complete.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Callable, Iterable
from typing import ClassVar

ARGUMENT_KEYS = ("arguments", "parameters")
WHITESPACE = " \t\r\n"


@dataclasses.dataclass
class CallPiece:
    """News of one call: its beginning (with id and name), or more of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclasses.dataclass
class Parsed:
    """What of the text is known by now."""

    content: str = ""
    pieces: list[CallPiece] = dataclasses.field(default_factory=list)


class NeedsMore(Exception):
    """The text ends before it can be said."""


class ToolParser:
    """Reads one sample's text. A form of calls is a subclass, which says what the markers are and what may follow what.

    Args:
        names: of the functions that may be called.
        parallel: False: only the first call counts, and what follows it is dropped.
    """

    opening: ClassVar[str]  # what calls begin with; may be empty

    def __init__(self, names: Iterable[str], *, parallel: bool = True):
        self._names = tuple(names)
        self._parallel = parallel
        self._buffer = ""
        self._state: Callable[[], None] = self._content
        self._raw = ""  # what goes back into the content if the call turns out to be none
        self._scan = ObjectScanner()
        self._depth = 1  # of the object around the arguments: they are a value of the call's, or stand alone
        self._ended = False
        self._out = Parsed()
        self._after_call = False  # no content since: space behind a call is none
        self.calls = 0

    def push(self, text: str) -> Parsed:
        """Takes the next piece of text."""
        self._buffer += text
        return self._run()

    def finish(self) -> Parsed:
        """The text ends here."""
        self._ended = True
        return self._run()

    @property
    def is_cut(self) -> bool:
        """Whether the last call's arguments are not complete (yet): a stop string or the model itself may end the text there."""
        return self._state == self._arguments

    def _run(self) -> Parsed:
        self._out = Parsed()
        try:
            while True:
                self._state()
        except NeedsMore:
            pass
        out, self._out = self._out, Parsed()
        return out

    # The states. Each looks at the buffer, takes what it can and moves on, or raises `NeedsMore`.

    def _content(self) -> None:
        """Content, until a marker."""
        place = self._buffer.find(self.opening)
        if place >= 0:
            before = self._buffer[:place]
            kept = before.rstrip(WHITESPACE)
            self._emit(kept)
            self._raw = before[len(kept) :] + self.opening
            self._buffer = self._buffer[place + len(self.opening) :]
            self._state = self._opened
            return
        if self._ended:
            self._emit("" if self._after_call and not self._buffer.strip() else self._buffer)
            self._buffer = ""
            raise NeedsMore
        keep = next((k for k in range(len(self.opening) - 1, 0, -1) if self._buffer.endswith(self.opening[:k])), 0)
        sure = self._buffer[: len(self._buffer) - keep].rstrip(WHITESPACE)  # space before a marker is no content
        self._emit(sure)
        self._buffer = self._buffer[len(sure) :]
        raise NeedsMore

    def _opened(self) -> None:
        """Behind the marker."""
        self._state = self._object

    def _object(self) -> None:
        """A call should begin here."""
        self._skip(WHITESPACE)
        self._scan, self._depth = ObjectScanner(), 1
        try:
            head = read_head(self._buffer, self._names)
        except NeedsMore:
            if self._ended:
                self._give_back()
                return
            raise
        if head is not None:
            name, end = head
            self._scan.feed(self._buffer[:end])
            self._take(end)
            self._start(name)
            self._state = self._arguments
        elif self._buffer.startswith("{") and self._may_be_in_any_order():
            self._state = self._whole
        else:
            self._give_back()

    def _arguments(self) -> None:
        """Within the arguments, which are passed on."""
        end = self._scan.feed(self._buffer, until=self._depth)
        arguments = self._buffer if end is None else self._buffer[:end]
        if arguments:
            self._out.pieces.append(CallPiece(self.calls - 1, arguments=arguments))
        self._buffer = self._buffer[len(arguments) :]
        if end is None:
            raise NeedsMore
        self._state = self._rest if self._depth else self._after

    def _rest(self) -> None:
        """Between the arguments and the end of the call's object."""
        end = self._scan.feed(self._buffer, until=0)
        self._buffer = "" if end is None else self._buffer[end:]
        if end is None:
            raise NeedsMore
        self._state = self._after

    def _whole(self) -> None:
        """A call whose keys are in another order: passed on when it is complete."""
        end = ObjectScanner().feed(self._buffer, until=0)
        if end is None:
            if self._ended:
                self._give_back()
                return
            raise NeedsMore
        call = whole_call(self._buffer[:end], self._names)
        if call is None:
            self._give_back()
            return
        self._take(end)
        self._start(call[0])
        self._out.pieces.append(CallPiece(self.calls - 1, arguments=call[1]))
        self._state = self._after

    def _after(self) -> None:
        """Behind a call: its closing marker, another call, or content."""
        self._raw = ""
        if not self._parallel:
            self._state = self._drop
            return
        text = self._buffer.lstrip(WHITESPACE)
        if not text:
            if self._ended:
                self._buffer = ""
            raise NeedsMore
        self._next(text)

    def _next(self, text: str) -> None:
        """What follows a call: ``text`` is the buffer without the space before it, and not empty."""
        self._state = self._content

    def _drop(self) -> None:
        self._buffer = ""
        raise NeedsMore

    # Inside

    def _emit(self, content: str) -> None:
        self._out.content += content
        self._after_call = self._after_call and not content

    def _start(self, name: str, identifier: str | None = None) -> None:
        self._out.pieces.append(CallPiece(self.calls, identifier or self._new_id(), name))
        self.calls += 1
        self._after_call = True

    def _take(self, count: int) -> None:
        """Moves characters out of the buffer; they are remembered until a call is certain."""
        self._raw += self._buffer[:count]
        self._buffer = self._buffer[count:]

    def _skip(self, characters: str) -> None:
        self._take(len(self._buffer) - len(self._buffer.lstrip(characters)))
        if not self._buffer and not self._ended:
            raise NeedsMore

    def _give_back(self) -> None:
        """It was no call."""
        self._emit(self._raw)
        self._raw = ""
        self._state = self._content

    def _new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"

    def _may_be_in_any_order(self) -> bool:
        """Whether an object that does not begin like a call, where one should, may still turn out to be one."""
        return True


class ObjectScanner:
    """Finds where a JSON object, or a value in it, ends; counts brackets outside strings."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str, until: int = -1) -> int | None:
        """How many characters of ``text`` there are up to the bracket that closes down to depth ``until``."""
        for place, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == until:
                    return place + 1
        return None


def read_head(text: str, names: Iterable[str]) -> tuple[str, int] | None:
    """The name in the head of a call, and where its arguments' brace is; `None`: it is no such head.

    Raises:
        NeedsMore: it may become one.
    """
    named = {json.dumps(name): name for name in names}
    keys = tuple(f'"{key}"' for key in ARGUMENT_KEYS)
    plain = [("{",), ('"name"',), (":",), tuple(named), (",",), keys, (":",), ("{",)]
    typed = [plain[0], ('"type"',), (":",), ('"function"',), (",",), *plain[1:]]
    undecided = False
    for pattern in (plain, typed):
        try:
            found = follow(text, pattern)
        except NeedsMore:
            undecided = True
            continue
        if found is not None:
            end, matched = found
            return named[matched[pattern.index(tuple(named))]], end - 1
    if undecided:
        raise NeedsMore
    return None


def follow(text: str, pattern: list[tuple[str, ...]]) -> tuple[int, list[str]] | None:
    """Reads one of each alternatives in turn, with space between; the end and what was read."""
    place, matched = 0, []
    for alternatives in pattern:
        while place < len(text) and text[place] in WHITESPACE:
            place += 1
        rest = text[place : place + max(map(len, alternatives))]
        hit = next((literal for literal in alternatives if rest.startswith(literal)), None)
        if hit is None:
            if any(literal.startswith(rest) for literal in alternatives):
                raise NeedsMore
            return None
        matched.append(hit)
        place += len(hit)
    return place, matched


def whole_call(text: str, names: Iterable[str]) -> tuple[str, str] | None:
    """Name and arguments (JSON text) of a complete object, if it is a call."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or value.get("name") not in set(names):
        return None
    arguments: object = next((value[key] for key in ARGUMENT_KEYS if key in value), {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    return value["name"], json.dumps(arguments, ensure_ascii=False)
