"""How models write tool calls: which format a model's chat template teaches, and the grammar of calls in it.

The formats, by the projects that began them::

    hermes        <tool_call>{"name": "f", "arguments": {...}}</tool_call>, any number of them     (Hermes, Qwen)
    mistral       [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]                             (Mistral)
    mistral-args  [TOOL_CALLS]f[ARGS]{...}, any number; perhaps [CALL_ID]id before [ARGS]          (Mistral, since 2025)
    json          {"name": "f", "parameters": {...}}, perhaps after <|python_tag|>                 (Llama 3, others)

A grammar is made of the same rules in two ways. Where a call is asked for, the text is calls, and every tool's schema
holds. Where calls are optional, it is any text, perhaps followed by calls: what begins like a call goes on as one,
with arguments by the schema of a tool that is strict, and any object for another.

``server/proxy/tool_parser.py`` reads the formats; this module needs the tokenizer and lives beside it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from server import json_schemas

HERMES, MISTRAL, MISTRAL_ARGS, JSON = "hermes", "mistral", "mistral-args", "json"
CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
MARKERS = {
    HERMES: ("<tool_call>", "</tool_call>"),
    MISTRAL: (CALLS,),
    MISTRAL_ARGS: (CALLS, ARGS, CALL_ID),
    JSON: ("<|python_tag|>",),
}
ANY_MARKER = tuple(dict.fromkeys(marker for markers in MARKERS.values() for marker in markers))
SPACE = r"[ \n\r\t]{0,64}"
ANYTHING = r"/(.|\n)*/"
ANY_OBJECT: dict[str, Any] = {"type": "object"}
Tool = Mapping[str, Any]  # OpenAI's


class Tokenizer(Protocol):
    """What is needed of `server.tokenizers.Tokenizer`."""

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]: ...

    def is_special(self, id: int) -> bool: ...


@dataclasses.dataclass(frozen=True)
class ToolWriter:
    """How one model writes calls. ``controls`` are the markers that are control tokens, and their ids; ``call_ids``:
    the format ``mistral-args`` has ids of calls."""

    format: str
    controls: Mapping[str, int]
    call_ids: bool = False

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, optional: bool = False) -> str | None:
        """The Lark rule ``tool_calls`` and all it needs: one call or, where ``parallel``, more.

        Args:
            tools: at least one.
            optional: text is allowed instead, and before the calls. `None`: there is nothing to keep to.
        """
        if optional and parallel and not any(tool["function"].get("strict") for tool in tools):
            return None
        schemas = [_parameters(tool, strict_only=optional) for tool in tools]
        if self.format == JSON:
            if optional:
                return self._bare(tools, schemas)
            return f"tool_calls: %json {_json(_call(tools, schemas, 'parameters'))}\n"
        marker = self._literal(MARKERS[self.format][0])
        more, body = "", ""
        if self.format == HERMES:
            more = f' ("\\n" {marker} tool_body)*'
            body = f'tool_body: "\\n"? tool_object "\\n"? {self._literal(MARKERS[HERMES][1])}\n'
            body += f"tool_object: %json {_json(_call(tools, schemas, 'arguments'))}\n"
        elif self.format == MISTRAL:
            body = f"tool_body: %json {_json(_call_list(_call(tools, schemas, 'arguments'), parallel))}\n"
        else:
            more = f" ({marker} tool_body)*"
            between = (f"{self._literal(CALL_ID)} /[a-zA-Z0-9]{{9}}/ " if self.call_ids else "") + self._literal(ARGS)
            names = [json.dumps(tool["function"]["name"]) for tool in tools]
            body = f"tool_body: {' | '.join(f'{name} {between} tool_{i}' for i, name in enumerate(names))}\n"
            body += "".join(f"tool_{i}: %json {json_schemas.guiding(schema)}\n" for i, schema in enumerate(schemas))
        calls = "tool_body" + (more if parallel else "")
        if not optional:
            return f"tool_calls: {marker} {calls}\n{body}"
        # A marker that is text ends the text where it first appears; a control token is no part of a text anyway.
        lazy = "" if MARKERS[self.format][0] in self.controls else "[lazy]"
        opening = f"tool_opening{lazy}: TOOL_TEXT {marker}\nTOOL_TEXT: {ANYTHING}\n"
        return f"tool_calls: TOOL_TEXT | tool_opening {calls}\n{opening}{body}"

    def _bare(self, tools: Sequence[Tool], schemas: Sequence[Any]) -> str:
        """Text, or one call without a marker, or behind one that models may leave out: the head of a call, as
        `server.proxy.tool_parser` knows it, is what tells."""
        marker = MARKERS[JSON][0]
        spelled = re.escape(marker)
        control = marker in self.controls
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
        opened = f"{self._literal(marker)} tool_call | " if control else ""
        return (
            f"tool_calls: TOOL_TEXT | {opened}tool_call\n"
            f"tool_call: ({calls}) /{SPACE}\\}}/\n"
            f"TOOL_TEXT: {text}\n{''.join(rules)}"
        )

    def _literal(self, marker: str) -> str:
        """A marker in a grammar: its token, or its text."""
        return f"<[{self.controls[marker]}]>" if marker in self.controls else json.dumps(marker)


def tool_writer(tokenizer: Tokenizer, templates: Mapping[str, str]) -> ToolWriter | None:
    """How a model writes calls, by its chat templates; `None`: they know nothing of tools."""
    source = templates.get("tool_use") or templates.get("default", "")
    if "tools" not in source:
        return None
    known = next((name for name in (HERMES, MISTRAL) if MARKERS[name][0] in source), JSON)
    if known == MISTRAL and ARGS in source:
        known = MISTRAL_ARGS
    return ToolWriter(known, control_markers(tokenizer), call_ids=CALL_ID in source)


def control_markers(tokenizer: Tokenizer) -> dict[str, int]:
    """The markers that are control tokens, which a text leaves out, with their ids."""
    found = {}
    for marker in ANY_MARKER:
        ids = tokenizer.encode(marker, add_bos=False, parse_special=True)
        if len(ids) == 1 and tokenizer.is_special(ids[0]):
            found[marker] = ids[0]
    return found


def _parameters(tool: Tool, *, strict_only: bool) -> Mapping[str, Any]:
    """The schema of a tool's arguments."""
    function = tool["function"]
    if strict_only and not function.get("strict"):
        return ANY_OBJECT
    return function.get("parameters") or ANY_OBJECT


def _call(tools: Sequence[Tool], schemas: Sequence[Any], arguments: str) -> dict[str, Any]:
    """The JSON schema of one call. The tools' own schemas become definitions, and references inside them follow."""
    definitions, choices = {}, []
    for index, (tool, schema) in enumerate(zip(tools, schemas, strict=True)):
        place = f"tool{index}"
        definitions[place] = json_schemas.closed(schema, f"#/$defs/{place}")
        choices.append({
            "type": "object",
            "properties": {"name": {"const": tool["function"]["name"]}, arguments: {"$ref": f"#/$defs/{place}"}},
            "required": ["name", arguments],
            "additionalProperties": False,
        })  # fmt: skip
    return {"anyOf": choices, "$defs": definitions}


def _call_list(call: dict[str, Any], parallel: bool) -> dict[str, Any]:
    """The JSON schema of a list of calls."""
    definitions = call.pop("$defs")
    calls = {"type": "array", "items": call, "minItems": 1, "$defs": definitions}
    return calls if parallel else calls | {"maxItems": 1}


def _json(schema: Any) -> str:
    return json.dumps(schema | {"x-guidance": json_schemas.OPTIONS}, ensure_ascii=False)
