"""How models write tool calls: which format a model's chat template teaches, and the grammar of calls in it.

The formats, by the projects that began them::

    hermes    <tool_call>{"name": "f", "arguments": {...}}</tool_call>, any number of them     (Hermes, Qwen)
    mistral   [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]                             (Mistral)
    json      {"name": "f", "parameters": {...}}, perhaps after <|python_tag|>                 (Llama 3, others)

``server/proxy/tool_parser.py`` reads them; this module needs the tokenizer and lives beside it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

HERMES, MISTRAL, JSON = "hermes", "mistral", "json"
MARKERS = {HERMES: ("<tool_call>", "</tool_call>"), MISTRAL: ("[TOOL_CALLS]",), JSON: ("<|python_tag|>",)}
ANY_MARKER = tuple(marker for markers in MARKERS.values() for marker in markers)


class Tokenizer(Protocol):
    """What is needed of `server.tokenizers.Tokenizer`."""

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]: ...

    def is_special(self, id: int) -> bool: ...


@dataclasses.dataclass(frozen=True)
class ToolWriter:
    """How one model writes calls. ``controls`` are the markers that are control tokens, and their ids."""

    format: str
    controls: Mapping[str, int]

    def grammar(self, tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> str:
        """The Lark rule ``tool_calls`` and all it needs: one call or, where ``parallel``, more.

        Args:
            tools: OpenAI's tool objects; at least one.
        """
        call = json.dumps(_call_schema(tools, "parameters" if self.format == JSON else "arguments"), ensure_ascii=False)
        if self.format == HERMES:
            opening, closing = (self._literal(marker) for marker in MARKERS[HERMES])
            more = ' ("\\n" tool_call)*' if parallel else ""
            return (
                f"tool_calls: tool_call{more}\n"
                f'tool_call: {opening} "\\n" tool_object "\\n" {closing}\n'
                f"tool_object: %json {call}\n"
            )
        if self.format == MISTRAL:
            schema = _call_schema(tools, "arguments")
            definitions = schema.pop("$defs")
            calls = {"type": "array", "items": schema, "minItems": 1, "$defs": definitions}
            if not parallel:
                calls["maxItems"] = 1
            listed = json.dumps(calls, ensure_ascii=False)
            return f"tool_calls: {self._literal(MARKERS[MISTRAL][0])} tool_list\ntool_list: %json {listed}\n"
        return f"tool_calls: %json {call}\n"

    def _literal(self, marker: str) -> str:
        """A marker in a grammar: its token, or its text."""
        return f"<[{self.controls[marker]}]>" if marker in self.controls else json.dumps(marker)


def tool_writer(tokenizer: Tokenizer, templates: Mapping[str, str]) -> ToolWriter | None:
    """How a model writes calls, by its chat templates; `None`: they know nothing of tools."""
    source = templates.get("tool_use") or templates.get("default", "")
    if "tools" not in source:
        return None
    known = next((name for name in (HERMES, MISTRAL) if MARKERS[name][0] in source), JSON)
    return ToolWriter(known, control_markers(tokenizer))


def control_markers(tokenizer: Tokenizer) -> dict[str, int]:
    """The markers that are control tokens, which a text leaves out, with their ids."""
    found = {}
    for marker in ANY_MARKER:
        ids = tokenizer.encode(marker, add_bos=False, parse_special=True)
        if len(ids) == 1 and tokenizer.is_special(ids[0]):
            found[marker] = ids[0]
    return found


def _call_schema(tools: Sequence[Mapping[str, Any]], arguments: str) -> dict[str, Any]:
    """The JSON schema of one call. The tools' own schemas become definitions, and references inside them follow."""
    definitions, choices = {}, []
    for index, tool in enumerate(tools):
        function = tool["function"]
        place = f"tool{index}"
        definitions[place] = _moved(function.get("parameters") or {"type": "object"}, f"#/$defs/{place}")
        choices.append({
            "type": "object",
            "properties": {"name": {"const": function["name"]}, arguments: {"$ref": f"#/$defs/{place}"}},
            "required": ["name", arguments],
            "additionalProperties": False,
        })  # fmt: skip
    return {"anyOf": choices, "$defs": definitions}


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references to its own root point to where it is now."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(item, root) for key, item in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved
