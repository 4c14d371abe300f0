"""Mistral, since 2025: ``[TOOL_CALLS]f[ARGS]{...}``, any number; perhaps ``[CALL_ID]id`` before ``[ARGS]``."""

from __future__ import annotations

import json
from collections.abc import Sequence

from server.text.json_schemas import Schema
from server.text.tool_forms.base import Tool, ToolForm, arguments_in_lark
from server.text.tool_forms.mistral import ARGS, CALL_ID, CALLS, MistralParser


class MistralArgs(ToolForm):
    name = "mistral-args"
    markers = (CALLS, ARGS, CALL_ID)
    parser = MistralParser

    @classmethod
    def is_taught_by(cls, source: str) -> bool:
        return CALLS in source and ARGS in source

    def spelled(self, calls: Sequence[tuple[str, str]]) -> str:
        return "".join(f"{CALLS}{name}{ARGS}{arguments}" for name, arguments in calls)

    def rules(self, tools: Sequence[Tool], schemas: Sequence[Schema], *, parallel: bool, optional: bool) -> str:
        identified = f"{self.literal(CALL_ID)} /[a-zA-Z0-9]{{9}}/ " if CALL_ID in self.source else ""
        names = [json.dumps(tool["function"]["name"]) for tool in tools]
        choices = (f"{name} {identified}{self.literal(ARGS)} tool_{i}" for i, name in enumerate(names))
        body = f"tool_body: {' | '.join(choices)}\n"
        arguments = map(arguments_in_lark, tools, schemas)
        body += "".join(f"tool_{i}: {schema}\n" for i, schema in enumerate(arguments))
        calls = "tool_body" + (f" ({self.literal(CALLS)} tool_body)*" if parallel else "")
        return self.marked(calls, body, optional=optional)
