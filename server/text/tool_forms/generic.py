"""For models whose chat templates know no tools: ``{"name": "f", "arguments": {...}}``, one object after another.

Nobody has taught the form to the model but the system turn that describes it (``server/text/tool_use.py``), so a grammar keeps
it to the form whenever it begins a call, and to the tools' schemas.
"""

from __future__ import annotations

from collections.abc import Sequence

from server.text.json_schemas import Schema
from server.text.tool_forms.bare import BareParser, optional_rules
from server.text.tool_forms.base import Tool, ToolForm, call_schema, call_text, in_lark

MOST_CALLS = 16  # at once: a small model may go on with them for ever


class GenericParser(BareParser):
    opening = ""

    def _next(self, text: str) -> None:
        if text[0] == "{":
            self._take(len(self._buffer) - len(text))
            self._state = self._object
        else:
            self._state = self._content


class Generic(ToolForm):
    name = "generic"
    markers = ()
    parser = GenericParser
    always_guided = True

    @classmethod
    def is_taught_by(cls, source: str) -> bool:
        return False

    def spelled(self, calls: Sequence[tuple[str, str]]) -> str:
        return "\n".join(call_text(*call) for call in calls)

    def rules(self, tools: Sequence[Tool], schemas: Sequence[Schema], *, parallel: bool, optional: bool) -> str:
        others = f"{{0,{MOST_CALLS - 1}}}"
        if optional:
            return optional_rules(tools, schemas, more=f" tool_call{others}" if parallel else "")
        more = f' ("\\n" tool_call){others}' if parallel else ""
        return f"tool_calls: tool_call{more}\ntool_call: {in_lark(call_schema(tools, schemas, 'arguments'))}\n"
