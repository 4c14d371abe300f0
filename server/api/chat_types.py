"""Checks of what only chat has: messages, tools and formats of the answer. See ``server/api/field_types.py``."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from server.api.field_types import ANY_OBJECT, MAX_GRAMMAR, described, grammar, json_schema, schema_of, shown, string, within_depth

if TYPE_CHECKING:
    from server.text.tool_forms.base import Tool

MAX_TOOLS = 128

# "function" is what OpenAI called "tool" before there were several calls.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # kind: where the text is
THOUGHT_PARTS = {"thinking": "thinking", "reasoning": "text", "reasoning_text": "text"}  # of an assistant, in some servers' answers
MAX_ARGUMENTS_DEPTH = 64
_TEXT_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@described({
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string", "enum": list(ROLES)},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "array",
                        "items": {
                            "anyOf": [
                                {"type": "string"},
                                {
                                    "type": "object",
                                    "required": ["type"],
                                    "properties": {"type": {"type": "string", "enum": [*TEXT_PARTS, *THOUGHT_PARTS]}},
                                },
                            ]
                        },
                    },
                    {"type": "null"},
                ]
            },
            "tool_calls": {"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]},
            "tool_call_id": _TEXT_OR_NULL,
            "refusal": _TEXT_OR_NULL,
            "reasoning_content": _TEXT_OR_NULL,
            "name": _TEXT_OR_NULL,
        },
    },
})
def chat_messages(value: object) -> tuple[Mapping[str, Any], ...]:
    """OpenAI's messages in the form that templates know: ``developer`` is spelled ``system``, text parts are one string.

    Clients send back what servers answered, so a turn of the assistant may have no content (then it is empty, and `None`
    beside calls), hold it in parts or as a refusal, bring empty lists of calls, a ``function_call`` of old, calls of custom
    tools, arguments that are no JSON (an answer that was cut), and whatever fields a vendor adds: these reach the template.
    """
    if not isinstance(value, list) or not value:
        raise ValueError("must be a non-empty list of messages")
    messages = []
    for index, message in enumerate(value):
        try:
            messages.append(_message(message))
        except ValueError as error:
            raise ValueError(f"[{index}]{error}") from None
    string(json.dumps(messages, ensure_ascii=False))  # names, tool calls and all
    return tuple(messages)


def _message(value: object) -> dict[str, Any]:
    """One message. The texts of errors follow its place in the list."""
    if not isinstance(value, dict):
        raise ValueError(" must be an object")
    message = {key: item for key, item in value.items() if item is not None}
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f".role must be one of {', '.join(ROLES)}, not {shown(role)}")
    message["role"] = {"developer": "system", "function": "tool"}.get(role, role)
    content, thoughts = _content(message.get("content"), role)
    if role == "assistant":
        calls = _past_calls(message.pop("tool_calls", []), message.pop("function_call", None))
        if calls:
            message["tool_calls"] = calls
        thought = thoughts or message.get("reasoning")
        if isinstance(thought, str) and thought:
            message.setdefault("reasoning_content", thought)
        content = content or _said_otherwise(message) or (None if calls else "")
    elif role in ("tool", "function"):
        content = content or ""  # of a function that returns nothing
    elif content is None:
        raise ValueError(".content must be a string or a list of text parts")
    message["content"] = content
    return message


def _content(value: object, role: str) -> tuple[str | None, str]:
    """A message's text, and what an assistant thought before it."""
    if value is None or isinstance(value, str):
        return value, ""
    if not isinstance(value, list):
        raise ValueError(".content must be a string or a list of text parts")
    thought_parts = THOUGHT_PARTS if role == "assistant" else {}
    texts, thoughts = [], []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(kind, str) and isinstance(text := part.get(TEXT_PARTS.get(kind)), str):
            texts.append(text)
        elif isinstance(kind, str) and kind in thought_parts:
            thought = part.get(thought_parts[kind])
            thoughts.append(thought if isinstance(thought, str) else _content(thought, role)[0] or "")
        else:
            raise ValueError(f'.content[{index}] must be {{"type": "text", "text": string}}: the model reads text only')
    return "".join(texts), "".join(thoughts)


def _said_otherwise(message: Mapping[str, Any]) -> str | None:
    """What an assistant's message without content says: that it refuses, or in a recording."""
    audio = message.get("audio")
    for text in (message.get("refusal"), audio.get("transcript") if isinstance(audio, dict) else None):
        if isinstance(text, str) and text:
            return text
    return None


def _past_calls(value: object, function_call: object) -> list[dict[str, Any]]:
    """Calls that the assistant made. Templates expect arguments as an object, where OpenAI has its JSON text."""
    if not isinstance(value, list):
        raise ValueError(".tool_calls must be a list")
    if function_call is not None:
        value = [*value, {"function": function_call}]
    calls = []
    for index, call in enumerate(value):
        function = call.get("function") if isinstance(call, dict) else None
        custom = call.get("custom") if isinstance(call, dict) else None
        if isinstance(custom, dict) and function is None:  # a tool that takes a text
            function = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                f'.tool_calls[{index}] must be {{"id": string, "type": "function", "function": {{"name": string, '
                '"arguments": string}}'
            )
        kept = {key: item for key, item in call.items() if item is not None and key != "custom"}
        calls.append(kept | {"type": "function", "function": function | {"arguments": _arguments(function, index)}})
    return calls


def _arguments(function: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """A call's arguments as an object. What is none was made by a model, or cut: it is shown as what it is."""
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        try:
            parsed = json.loads(arguments)
            string(json.dumps(parsed, ensure_ascii=False))
        except (ValueError, RecursionError):
            parsed = arguments
        arguments = {} if parsed is None else parsed
        if not isinstance(arguments, dict) or not within_depth(arguments, MAX_ARGUMENTS_DEPTH):
            arguments = {"INVALID_JSON": function["arguments"]}
    elif arguments is None or isinstance(arguments, str):
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError(f".tool_calls[{index}].function.arguments must be a JSON object's text")
    return arguments


@dataclasses.dataclass(frozen=True)
class ToolName:
    """A ``tool_choice`` that names a function."""

    name: str


@described({
    "type": "array",
    "maxItems": MAX_TOOLS,
    "items": {
        "type": "object",
        "required": ["type", "function"],
        "properties": {
            "type": {"type": "string", "enum": ["function"]},
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string", "minLength": 1, "maxLength": 64, "pattern": "^[A-Za-z0-9_.-]{1,64}$"},
                    "description": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "parameters": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                    "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                },
            },
        },
    },
})
def tools(value: object) -> tuple[Tool, ...]:
    """OpenAI's tools, of which the only type is ``function``."""
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise ValueError(f"must be a list of up to {MAX_TOOLS} tools")
    names = set()
    for index, tool in enumerate(value):
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            raise ValueError(f'[{index}] must be {{"type": "function", "function": object}}')
        function = tool["function"]
        name = function.get("name")
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
            raise ValueError(f"[{index}].function.name must be 1 to 64 letters, digits, dots, dashes and underscores")
        if name in names:
            raise ValueError(f"[{index}].function.name is that of another tool: {name}")
        names.add(name)
        if not isinstance(function.get("description"), (str, type(None))):
            raise ValueError(f"[{index}].function.description must be a string")
        if not isinstance(function.get("parameters", {}), (dict, type(None))):
            raise ValueError(f"[{index}].function.parameters must be a JSON schema (an object)")
        if not isinstance(function.get("strict"), (bool, type(None))):
            raise ValueError(f"[{index}].function.strict must be true or false")
    string(json.dumps(value, ensure_ascii=False))
    return tuple(value)


@described({
    "anyOf": [
        {"type": "string", "enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"type": "string", "enum": ["function"]},
                "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
            },
        },
    ]
})
def tool_choice(value: object) -> str | ToolName:
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        return ToolName(string(function["name"]))
    raise ValueError('must be "none", "auto", "required" or {"type": "function", "function": {"name": string}}')


_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "object"}, {"type": "null"}]}
_TEXT: dict[str, Any] = {"anyOf": [schema_of(grammar), {"type": "null"}]}


def _format(kind: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["type"],
        "properties": {"type": {"type": "string", "enum": [kind]}, **properties},
    }


@described({
    "anyOf": [
        _format("text"),
        _format("json_object", schema=_SCHEMA, value=_SCHEMA),
        _format(
            "json_schema",
            json_schema={
                "type": "object",
                "required": ["schema"],
                "properties": {
                    "name": {"type": "string"},
                    "schema": {"type": "object"},
                    "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                },
            },
            schema=_SCHEMA,
            value=_SCHEMA,
        ),
        _format("json", schema=_SCHEMA, value=_SCHEMA),
        _format("regex", pattern=_TEXT, regex=_TEXT, value=_TEXT),
        _format("grammar", grammar=_TEXT, value=_TEXT),
    ]
})
def response_format(value: object) -> tuple[str, str] | None:
    """OpenAI's ``response_format``, and what other servers add to it, as the field ``guided_*`` that says the same and its
    value; `None` for free text."""
    kinds = ("text", "json_object", "json_schema", "json", "regex", "grammar")
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "structural_tag":
        raise ValueError("of type structural_tag is not supported: use tools, or type grammar")
    if not isinstance(value, dict) or kind not in kinds:
        raise ValueError(f"must be an object whose type is one of {', '.join(kinds)}")
    if kind == "text":
        return None
    if kind in ("regex", "grammar"):
        text = _one_of(value, *(("pattern", "regex") if kind == "regex" else ("grammar",)), "value")
        if text is None:
            raise ValueError(f'of type {kind} must have {{"{"pattern" if kind == "regex" else kind}": string}}')
        return f"guided_{kind}", grammar(text)
    inner = value.get("json_schema") if kind == "json_schema" else None
    if inner is not None and not isinstance(inner, dict):
        raise ValueError("must have an object as json_schema")
    if not isinstance((inner or {}).get("strict"), (bool, type(None))):
        raise ValueError("must have true or false as json_schema.strict")
    schema = inner.get("schema") if inner is not None else _one_of(value, "schema", "value")
    if schema is None and kind == "json_object":
        return "guided_json", ANY_OBJECT
    if not isinstance(schema, dict):
        form = '{"json_schema": {"name": string, "schema": object}}' if kind == "json_schema" else '{"schema": object}'
        raise ValueError(f"of type {kind} must have {form}")
    return "guided_json", json_schema(schema)


def _one_of(value: Mapping[str, object], *keys: str) -> object:
    """What is called by one of these names; `None`: nothing is."""
    given = [key for key in keys if value.get(key) is not None]
    if len(given) > 1:
        raise ValueError(f"has both {given[0]} and {given[1]}: give one of them")
    return value[given[0]] if given else None


@described({"anyOf": [{"type": "string", "maxLength": MAX_GRAMMAR}, schema_of(response_format)]})
def any_grammar(value: object) -> tuple[str, str] | None:
    """llama-server's ``grammar``, of which an empty one is none; or TGI's, which says its type as ``response_format`` does."""
    if isinstance(value, dict):
        return response_format(value)
    return None if value == "" else ("guided_grammar", grammar(value))


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@described({"type": "string", "enum": list(EFFORTS)})
def reasoning_effort(value: object) -> str:
    """A variable of the chat template, as other servers have it; a template that does not ask for it takes no notice."""
    if not isinstance(value, str) or value not in EFFORTS:
        raise ValueError(f"must be one of {', '.join(EFFORTS)}")
    return value


@described({"type": "array", "items": {"type": "object"}})
def documents(value: object) -> tuple[Mapping[str, Any], ...]:
    """What the chat template may show to the model."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError("must be a list of objects")
    string(json.dumps(value, ensure_ascii=False))
    return tuple(value)
