"""What forms have in common whose calls need no marker: the head of a call, ``{"name": "f", "arguments":``, is what tells."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from server.text import json_schemas
from server.text.json_schemas import Schema
from server.text.tool_forms.base import ANYTHING, Tool, arguments_in_lark
from server.text.tool_forms.parsing import WHITESPACE, NeedsMore, ToolParser

SPACE = r"[ \n\r\t]{0,64}"  # in heads: what is read as one, see `server.text.tool_forms.parsing.read_head`
END = rf"/({json_schemas.WHITESPACE})?\}}/"


class BareParser(ToolParser):
    """The answer begins with a call, or is content all through. A marker before it may be left out."""

    def __init__(self, names: Iterable[str], *, parallel: bool = True):
        super().__init__(names, parallel=parallel)
        self._state = self._begin

    def _begin(self) -> None:
        """A call, or content."""
        text = self._buffer.lstrip(WHITESPACE)
        if self.opening and text.startswith(self.opening):
            self._take(len(self._buffer) - len(text) + len(self.opening))
            self._state = self._object
        elif text.startswith("{"):
            self._state = self._object
        elif not self._ended and (not text or self.opening.startswith(text)):
            raise NeedsMore
        else:
            self._state = self._content

    def _content(self) -> None:
        """Content to the end."""
        self._emit(self._buffer)
        self._buffer = ""
        raise NeedsMore

    def _may_be_in_any_order(self) -> bool:
        return bool(self._raw.strip())  # behind a marker


def optional_rules(
    tools: Sequence[Tool], schemas: Sequence[Schema], *, marker: str = "", control: str = "", more: str = ""
) -> str:
    """The rule ``tool_calls``: text, or a call.

    Args:
        marker: what may be before a call.
        control: the marker in a grammar, if it is a control token.
        more: behind the first call.
    """
    spelled = re.escape(marker)
    before = f"({spelled})?{SPACE}" if marker and not control else ""
    kind = rf'("type"{SPACE}:{SPACE}"function"{SPACE},{SPACE})?'
    rules = []
    for i, (tool, schema) in enumerate(zip(tools, schemas, strict=True)):
        name = re.escape(json.dumps(tool["function"]["name"]))
        named = rf'{kind}"name"{SPACE}:{SPACE}{name}{SPACE},{SPACE}"(arguments|parameters)"{SPACE}:'
        head = rf"{SPACE}{before}\{{{SPACE}{named}"
        rules.append(f'tool_head_{i}[lazy]: /{head}/\ntool_{i}: " "? {arguments_in_lark(tool, schema)}\n')
    text = f"{ANYTHING} & ~/{SPACE}{spelled}(.|\\n)*/" if before else ANYTHING
    calls = " | ".join(f"tool_head_{i} tool_{i}" for i in range(len(tools)))
    opened = f"{control} tool_call{more} | " if control else ""
    return (
        f"tool_calls: TOOL_TEXT | {opened}tool_call{more}\n"
        f"tool_call: ({calls}) {END}\n"
        f"TOOL_TEXT: {text}\n{''.join(rules)}"
    )
