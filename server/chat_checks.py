"""Checks of what only chat has: messages, tools and formats of the answer. See ``server/checks.py``."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from server.checks import ANY_OBJECT, described, json_schema, shown, string

MAX_TOOLS = 128

ROLES = ("system", "developer", "user", "assistant", "tool")


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
                            "type": "object",
                            "required": ["type", "text"],
                            "properties": {"type": {"type": "string", "enum": ["text"]}, "text": {"type": "string"}},
                        },
                    },
                    {"type": "null"},
                ]
            },
            "tool_calls": {"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]},
            "tool_call_id": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
})
def chat_messages(value: Any) -> tuple[Mapping[str, Any], ...]:
    """OpenAI's messages, with text parts joined to one string and ``developer`` spelled ``system``, as templates know
    it."""
    if not isinstance(value, list) or not value:
        raise ValueError("must be a non-empty list of messages")
    messages = []
    for index, message in enumerate(value):
        if not isinstance(message, dict):
            raise ValueError(f"must be a list of objects; [{index}] is not an object")
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise ValueError(f"[{index}].role must be one of {', '.join(ROLES)}, not {shown(role)}")
        content = _content(message.get("content"), index)
        if content is None and not (role == "assistant" and message.get("tool_calls")):
            raise ValueError(f"[{index}].content must be a string or a list of text parts")
        kept = {key: value for key, value in message.items() if value is not None}
        if "tool_calls" in kept:
            kept["tool_calls"] = _past_calls(kept["tool_calls"], index)
        messages.append(kept | {"role": "system" if role == "developer" else role, "content": content})
    string(json.dumps(messages, ensure_ascii=False))  # names, tool calls and all
    return tuple(messages)


def _content(value: Any, index: int) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"[{index}].content must be a string or a list of text parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f'[{index}].content: only parts {{"type": "text", "text": string}} are supported')
        texts.append(part["text"])
    return "".join(texts)


def _past_calls(value: Any, index: int) -> list[dict[str, Any]]:
    """Calls that the assistant made. Templates expect arguments as an object, where OpenAI has its JSON text."""
    if not isinstance(value, list):
        raise ValueError(f"[{index}].tool_calls must be a list")
    calls = []
    for call in value:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f'[{index}].tool_calls must have {{"id": string, "type": "function", "function": object}}')
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(arguments, dict):
            raise ValueError(f"[{index}].tool_calls must have a JSON object as function.arguments")
        calls.append(call | {"type": "function", "function": function | {"arguments": arguments}})
    return calls


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
                    "description": {"type": "string"},
                    "parameters": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                    "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                },
            },
        },
    },
})
def tools(value: Any) -> tuple[Mapping[str, Any], ...]:
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
def tool_choice(value: Any) -> str | ToolName:
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        return ToolName(function["name"])
    raise ValueError('must be "none", "auto", "required" or {"type": "function", "function": {"name": string}}')


@described({
    "anyOf": [
        {
            "type": "object",
            "required": ["type"],
            "properties": {"type": {"type": "string", "enum": ["text", "json_object"]}},
        },
        {
            "type": "object",
            "required": ["type", "json_schema"],
            "properties": {
                "type": {"type": "string", "enum": ["json_schema"]},
                "json_schema": {
                    "type": "object",
                    "required": ["schema"],
                    "properties": {
                        "name": {"type": "string"},
                        "schema": {"type": "object"},
                        "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                    },
                },
            },
        },
    ]
})
def response_format(value: Any) -> str | None:
    """OpenAI's ``response_format`` as the text of a JSON schema; `None` for free text."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        raise ValueError("must be an object whose type is text, json_object or json_schema")
    inner = value.get("json_schema")
    if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
        raise ValueError('of type json_schema must have {"json_schema": {"name": string, "schema": object}}')
    if not isinstance(inner.get("strict"), (bool, type(None))):
        raise ValueError("must have true or false as json_schema.strict")
    return json_schema(inner["schema"])
