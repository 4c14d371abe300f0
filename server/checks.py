"""Checks of single values: each takes what a client sent and returns it checked, or raises `ValueError`.

The error's text completes a sentence that begins with the field's name: "must be an integer from 0 to 20".
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_SAMPLES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters of one stop string
MAX_STOP_TOKEN_IDS = 32  # engine.api.MAX_SUPPRESSED
MAX_LOGIT_BIAS = 300  # engine.api.MAX_LOGIT_BIAS
MAX_TOP_LOGPROBS = 20  # engine.api.TOP_LOGPROBS
MAX_COMPLETION_LOGPROBS = 5
MAX_PROMPTS = 1024
MAX_REQUEST_ID = 256  # characters
MAX_GRAMMAR = 65_536  # characters of a schema, expression or grammar: server.guided.MAX_LENGTH
MAX_TOOLS = 128

Check = Callable[[Any], Any]


def integer(low: int, high: int) -> Check:
    allowed = f"must be an integer from {low} to {high}"

    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(allowed)
        return value

    return check


def number(low: float, high: float, *, above: bool = False) -> Check:
    """A finite number in [low, high], or with ``above`` in (low, high]."""
    allowed = (
        f"must be a number above {low:g} and at most {high:g}"
        if above
        else f"must be a number from {low:g} to {high:g}"
    )

    def check(value: Any) -> float:
        if type(value) not in (int, float):
            raise ValueError(allowed)
        try:
            result = float(value)
        except OverflowError:
            raise ValueError(allowed) from None
        if not math.isfinite(result) or not low <= result <= high or (above and result == low):
            raise ValueError(allowed)
        return result

    return check


def boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("must be true or false")
    return value


def string(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode: it has a lone surrogate") from None
    return value


def request_id(value: Any) -> str:
    if (
        not isinstance(value, str)
        or not 0 < len(value) <= MAX_REQUEST_ID
        or not (value.isascii() and value.isprintable())
    ):
        raise ValueError(f"must be 1 to {MAX_REQUEST_ID} printable ASCII characters")
    return value


def json_object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    string(json.dumps(value, ensure_ascii=False))
    return value


def stop_strings(value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)) or len(values) > MAX_STOP_STRINGS:
        raise ValueError(f"must be a string or up to {MAX_STOP_STRINGS} strings")
    for item in values:
        if not isinstance(item, str) or not 0 < len(item) <= MAX_STOP_LENGTH:
            raise ValueError(f"must be strings of 1 to {MAX_STOP_LENGTH} characters")
        string(item)
    return tuple(values)


def token_ids(value: Any, limit: int | None = None) -> tuple[int, ...]:
    """Token ids; whether the model knows them is checked later."""
    if not isinstance(value, (list, tuple)) or not all(type(item) is int for item in value):
        raise ValueError("must be a list of token ids (integers)")
    if limit is not None and len(value) > limit:
        raise ValueError(f"must be at most {limit} token ids")
    for item in value:
        if not 0 <= item <= INT32_MAX:
            raise ValueError(f"must be token ids of the model's vocabulary; {shown(item)} is not")
    return tuple(value)


def logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping):
        raise ValueError("must be an object of token ids and numbers from -100 to 100")
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"must have at most {MAX_LOGIT_BIAS} entries, not {len(value)}")
    entries = []
    in_range = number(-100, 100)
    for key, bias in value.items():
        text = str(key)
        if not (
            text.isascii() and text.isdigit() and len(text) <= 10 and text == str(int(text)) and int(text) <= INT32_MAX
        ):
            raise ValueError(f"must have token ids of the model's vocabulary as keys; {shown(key)} is not")
        try:
            entries.append((int(text), in_range(bias)))
        except ValueError:
            raise ValueError(f"must have numbers from -100 to 100 as values; that of {text} is {shown(bias)}") from None
    return tuple(entries)


def prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """A string, strings, token ids or lists of token ids, as one tuple of prompts."""
    if isinstance(value, str):
        return (string(value),)
    allowed = "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
    if not isinstance(value, list):
        raise ValueError(allowed)
    if not value:
        raise ValueError("must not be empty")
    if type(value[0]) is int:
        return (token_ids(value),)
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"must be at most {MAX_PROMPTS} prompts, not {len(value)}")
    if all(isinstance(item, str) for item in value):
        return tuple(string(item) for item in value)
    if all(isinstance(item, list) for item in value):
        return tuple(token_ids(item) for item in value)
    raise ValueError(allowed)


ROLES = ("system", "developer", "user", "assistant", "tool")


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
    string(json.dumps(value, ensure_ascii=False))
    return tuple(value)


def tool_choice(value: Any) -> str | ToolName:
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        return ToolName(function["name"])
    raise ValueError('must be "none", "auto", "required" or {"type": "function", "function": {"name": string}}')


def only(*allowed: Any, because: str) -> Check:
    """A field of which only these values are supported."""

    def check(value: Any) -> None:
        if not any(type(value) is type(item) and value == item for item in allowed):
            raise ValueError(because)

    return check


def grammar(value: Any) -> str:
    """A regular expression or grammar; whether it can be compiled is found out later."""
    if not string(value) or len(value) > MAX_GRAMMAR:
        raise ValueError(f"must have 1 to {MAX_GRAMMAR} characters")
    return value


def json_schema(value: Any) -> str:
    """A JSON schema, given as an object or as its JSON text; returned as text."""
    return grammar(json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value)


def response_format(value: Any) -> str | None:
    """OpenAI's ``response_format`` as the text of a JSON schema; `None` for free text."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return '{"type": "object"}'
    if kind != "json_schema":
        raise ValueError("must be an object whose type is text, json_object or json_schema")
    inner = value.get("json_schema")
    if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
        raise ValueError('of type json_schema must have {"json_schema": {"name": string, "schema": object}}')
    if not isinstance(inner.get("strict"), (bool, type(None))):
        raise ValueError("must have true or false as json_schema.strict")
    return json_schema(inner["schema"])


def stream_options(value: Any) -> bool:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    include = value.get("include_usage")
    if include is not None and type(include) is not bool:
        raise ValueError("include_usage must be true or false")
    return bool(include)


def shown(value: Any) -> str:
    """A value in an error message: short, printable, and never a huge integer's digits."""
    if type(value) is int and value.bit_length() > 128:
        return "an integer of more than 128 bits"
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
