"""Llama 3 and others: ``{"name": "f", "parameters": {...}}``, perhaps after ``<|python_tag|>``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from server import json_schemas
from server.tool_forms.base import ANYTHING, Tool, ToolForm, call_schema, in_lark
from server.tool_forms.parsing import BareParser, NeedsMore

TAG = "<|python_tag|>"
SPACE = r"[ \n\r\t]{0,64}"


class Llama3Parser(BareParser):
    opening = TAG

    def _next(self, text: str) -> None:
        if text[0] in ";{":
            self._take(len(self._buffer) - len(text) + int(text[0] == ";"))
            self._state = self._object
        elif text.startswith(TAG):
            self._take(len(self._buffer) - len(text) + len(TAG))
            self._state = self._object
        elif TAG.startswith(text) and not self._ended:
            raise NeedsMore
        else:
            self._state = self._content

    def _may_be_in_any_order(self) -> bool:
        return bool(self._raw.strip())  # behind a marker


class Llama3(ToolForm):
    name = "llama3"
    markers = (TAG,)
    parser = Llama3Parser

    @classmethod
    def is_taught_by(cls, source: str) -> bool:
        return TAG in source

    def rules(self, tools: Sequence[Tool], schemas: Sequence[Any], *, parallel: bool, optional: bool) -> str:
        if optional:
            return self._optional(tools, schemas)
        return f"tool_calls: {in_lark(call_schema(tools, schemas, 'parameters'))}\n"

    def _optional(self, tools: Sequence[Tool], schemas: Sequence[Any]) -> str:
        """Text, or one call without a marker, or behind one that models may leave out: the head of a call, as
        `server.tool_forms.parsing.read_head` knows it, is what tells."""
        spelled = re.escape(TAG)
        control = TAG in self.controls
        before = "" if control else f"({spelled})?{SPACE}"
        kind = rf'("type"{SPACE}:{SPACE}"function"{SPACE},{SPACE})?'
        rules = []
        for i, (tool, schema) in enumerate(zip(tools, schemas, strict=True)):
            name = re.escape(json.dumps(tool["function"]["name"]))
            named = rf'{kind}"name"{SPACE}:{SPACE}{name}{SPACE},{SPACE}"(arguments|parameters)"{SPACE}:'
            head = rf"{SPACE}{before}\{{{SPACE}{named}"
            rules.append(f'tool_head_{i}[lazy]: /{head}/\ntool_{i}: " "? %json {json_schemas.guiding(schema)}\n')
        text = ANYTHING if control else f"{ANYTHING} & ~/{SPACE}{spelled}(.|\\n)*/"
        calls = " | ".join(f"tool_head_{i} tool_{i}" for i in range(len(tools)))
        opened = f"{self.literal(TAG)} tool_call | " if control else ""
        return (
            f"tool_calls: TOOL_TEXT | {opened}tool_call\n"
            f"tool_call: ({calls}) /{SPACE}\\}}/\n"
            f"TOOL_TEXT: {text}\n{''.join(rules)}"
        )
