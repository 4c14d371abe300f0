"""Hermes and Qwen: ``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``, any number of them."""

from __future__ import annotations

from collections.abc import Sequence

from server.text.json_schemas import Schema
from server.text.tool_forms.base import Tool, ToolForm, call_schema, call_text, in_lark
from server.text.tool_forms.parsing import NeedsMore, ToolParser

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    opening = OPENING

    def _next(self, text: str) -> None:
        if text.startswith(CLOSING):
            self._buffer = text[len(CLOSING) :]
        elif CLOSING.startswith(text) and not self._ended:
            raise NeedsMore
        self._state = self._content


class Hermes(ToolForm):
    name = "hermes"
    markers = (OPENING, CLOSING)
    parser = HermesParser

    @classmethod
    def is_taught_by(cls, source: str) -> bool:
        return OPENING in source

    def spelled(self, calls: Sequence[tuple[str, str]]) -> str:
        return "\n".join(f"{OPENING}\n{call_text(*call)}\n{CLOSING}" for call in calls)

    def rules(self, tools: Sequence[Tool], schemas: Sequence[Schema], *, parallel: bool, optional: bool) -> str:
        opening, closing = map(self.literal, self.markers)
        calls = "tool_body" + (f' ("\\n" {opening} tool_body)*' if parallel else "")
        body = f'tool_body: "\\n"? tool_object "\\n"? {closing}\n'
        body += f"tool_object: {in_lark(call_schema(tools, schemas, 'arguments'))}\n"
        return self.marked(calls, body, optional=optional)
