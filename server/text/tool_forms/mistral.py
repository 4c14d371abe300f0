"""Mistral: ``[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]``."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Iterable, Sequence
from typing import Any

from server.text.json_schemas import Schema
from server.text.tool_forms.base import Tool, ToolForm, call_schema, call_text, in_lark
from server.text.tool_forms.parsing import WHITESPACE, NeedsMore, ObjectScanner, ToolParser, follow

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ALPHANUMERIC = string.ascii_letters + string.digits


class MistralParser(ToolParser):
    """Reads both forms of Mistral's, a list of objects and calls that begin with their names."""

    opening = CALLS

    def _opened(self) -> None:
        """The list's bracket, or a name."""
        self._skip(WHITESPACE)
        if self._buffer.startswith("["):
            self._take(1)
        self._state = self._object if self._raw.endswith("[") or self._buffer.startswith("{") else self._named

    def _named(self) -> None:
        """A call that begins with its name should begin here."""
        try:
            head = read_named_head(self._buffer, self._names)
        except NeedsMore:
            if self._ended:
                self._give_back()
                return
            raise
        if head is None:
            self._give_back()
            return
        name, identifier, end = head
        self._scan, self._depth = ObjectScanner(), 0
        self._take(end)
        self._start(name, identifier)
        self._state = self._arguments

    def _next(self, text: str) -> None:
        if text[0] in ",{":
            self._take(len(self._buffer) - len(text) + int(text[0] == ","))
            self._state = self._object
            return
        if text[0] == "]":
            self._buffer = text[1:]
        self._state = self._content

    def _new_id(self) -> str:
        # Mistral's templates insist on ids of nine letters and digits.
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


class Mistral(ToolForm):
    name = "mistral"
    markers = (CALLS,)
    parser = MistralParser

    @classmethod
    def is_taught_by(cls, source: str) -> bool:
        return CALLS in source and ARGS not in source

    def spelled(self, calls: Sequence[tuple[str, str]]) -> str:
        return f"{CALLS}[{', '.join(call_text(*call) for call in calls)}]"

    def rules(self, tools: Sequence[Tool], schemas: Sequence[Schema], *, parallel: bool, optional: bool) -> str:
        call = call_schema(tools, schemas, "arguments")
        calls: dict[str, Any] = {"type": "array", "items": call, "minItems": 1, "$defs": call.pop("$defs")}
        if not parallel:
            calls["maxItems"] = 1
        return self.marked("tool_body", f"tool_body: {in_lark(calls)}\n", optional=optional)


def read_named_head(text: str, names: Iterable[str]) -> tuple[str, str | None, int] | None:
    """Name, id and where the arguments' brace is of ``name[ARGS]{`` or ``name[CALL_ID]id[ARGS]{``; `None`: it is no
    such head.

    Raises:
        NeedsMore: it may become one.
    """
    place = text.find("[")
    if place < 0:
        if any(name.startswith(text) for name in names):
            raise NeedsMore
        return None
    name, identifier = text[:place], None
    if name not in names:
        return None
    if CALL_ID.startswith(text[place : place + len(CALL_ID)]):
        place += len(CALL_ID)
        found = re.match(r"[A-Za-z0-9_-]{0,64}", text[place:])
        identifier = found[0] if found else ""
        place += len(identifier)
        if place >= len(text):
            raise NeedsMore
    after = follow(text[place:], [(ARGS,), ("{",)])
    return None if after is None else (name, identifier or None, place + after[0] - 1)
