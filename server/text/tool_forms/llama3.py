"""Llama 3 and others: ``{"name": "f", "parameters": {...}}``, perhaps after ``<|python_tag|>``."""

from __future__ import annotations

from collections.abc import Sequence

from server.text.json_schemas import Schema
from server.text.tool_forms.bare import BareParser, optional_rules
from server.text.tool_forms.base import Tool, ToolForm, call_schema, call_text, in_lark
from server.text.tool_forms.parsing import NeedsMore

TAG = "<|python_tag|>"


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


class Llama3(ToolForm):
    name = "llama3"
    markers = (TAG,)
    parser = Llama3Parser

    @classmethod
    def is_taught_by(cls, source: str) -> bool:
        return TAG in source

    def spelled(self, calls: Sequence[tuple[str, str]]) -> str:
        return "; ".join(call_text(*call, key="parameters") for call in calls)

    def rules(self, tools: Sequence[Tool], schemas: Sequence[Schema], *, parallel: bool, optional: bool) -> str:
        if optional:
            control = self.literal(TAG) if TAG in self.controls else ""
            return optional_rules(tools, schemas, marker=TAG, control=control)
        return f"tool_calls: {in_lark(call_schema(tools, schemas, 'parameters'))}\n"
