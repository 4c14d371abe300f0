"""The fields of a request, typed and in range: the half of validation that needs no model.

A request comes as a mapping (a JSON object, or the set fields of a ``DecodeRequest``); `parse` checks each field by the table of
its endpoint and returns `RequestFields`, the same for all endpoints. The proxy does this for JSON, so that most mistakes are
answered without bothering an orchestrator, and the orchestrator does it for every ``DecodeRequest``, since anyone may
send one. What depends on the model follows in ``server/validation.py``.

The rules: `None` is the same as absent; a bool is no number; a number with a fraction (or written as one) is no integer; NaN and
infinity are no numbers; nothing is clamped; every error names the field and what is allowed. Fields that no table knows are
ignored, and logged once per name.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from server.errors import InvalidRequest

logger = logging.getLogger(__name__)

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


@dataclasses.dataclass(frozen=True)
class RequestFields:
    """What a request asks for. `None` where it is silent and a default may depend on the endpoint or model."""

    max_tokens: int | None = None
    n: int = 1
    temperature: float | None = None
    top_k: int | None = None  # 0 and -1 are off
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None  # alternatives per generated token; None: no log-probs
    prompt_logprobs: int | None = None
    echo: bool = False
    want_text: bool = False
    prompt_only: bool = False
    model_defaults: bool = False
    priority: int = 0
    model: str | None = None
    request_id: str | None = None
    # of HTTP only
    stream: bool = False
    include_usage: bool = False
    prompt: tuple[str | tuple[int, ...], ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    add_generation_prompt: bool = True
    chat_template_kwargs: Mapping[str, Any] | None = None


Check = Callable[[Any], Any]  # returns the checked value; its ValueError completes "<field> ..."


@dataclasses.dataclass(frozen=True)
class Field:
    """A field as a client spells it: what it becomes in `RequestFields` (empty: nothing) and how it is checked."""

    target: str
    check: Check


Table = Mapping[str, Field]


# Checks of one value.


def integer(low: int, high: int) -> Check:
    allowed = f"must be an integer from {low} to {high}"

    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(allowed)
        return value

    return check


def number(low: float, high: float, *, above: bool = False) -> Check:
    """A finite number in [low, high], or with ``above`` in (low, high]."""
    allowed = f"must be a number above {low:g} and at most {high:g}" if above else f"must be a number from {low:g} to {high:g}"

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
    if not isinstance(value, str) or not 0 < len(value) <= MAX_REQUEST_ID or not (value.isascii() and value.isprintable()):
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
            raise ValueError(f"must be token ids of the model's vocabulary; {_shown(item)} is not")
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
        if not (text.isascii() and text.isdigit() and len(text) <= 10 and text == str(int(text)) and int(text) <= INT32_MAX):
            raise ValueError(f"must have token ids of the model's vocabulary as keys; {_shown(key)} is not")
        try:
            entries.append((int(text), in_range(bias)))
        except ValueError:
            raise ValueError(f"must have numbers from -100 to 100 as values; that of {text} is {_shown(bias)}") from None
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
    """OpenAI's messages, with text parts joined to one string and ``developer`` spelled ``system``, as templates know it."""
    if not isinstance(value, list) or not value:
        raise ValueError("must be a non-empty list of messages")
    messages = []
    for index, message in enumerate(value):
        if not isinstance(message, dict):
            raise ValueError(f"must be a list of objects; [{index}] is not an object")
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise ValueError(f"[{index}].role must be one of {', '.join(ROLES)}, not {_shown(role)}")
        content = _content(message.get("content"), index)
        if content is None and not (role == "assistant" and message.get("tool_calls")):
            raise ValueError(f"[{index}].content must be a string or a list of text parts")
        kept = {key: value for key, value in message.items() if value is not None}
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
            raise ValueError(f"[{index}].content: only parts {{\"type\": \"text\", \"text\": string}} are supported")
        texts.append(part["text"])
    return "".join(texts)


def only(*allowed: Any, because: str) -> Check:
    """A field of which only these values are supported."""

    def check(value: Any) -> None:
        if not any(type(value) is type(item) and value == item for item in allowed):
            raise ValueError(because)

    return check


def _response_format(value: Any) -> None:
    # Structured output goes here: {"type": "json_object"} and "json_schema" become a guided_* field.
    if not isinstance(value, dict) or value.get("type") != "text":
        raise ValueError('must be {"type": "text"}: structured output is not supported by this server')


def _stream_options(value: Any) -> bool:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    include = value.get("include_usage")
    if include is not None and type(include) is not bool:
        raise ValueError("include_usage must be true or false")
    return bool(include)


_UNGUIDED = "is not supported by this server"  # the guided_* fields

SAMPLING: Table = {
    "temperature": Field("temperature", number(0, 1e6)),
    "top_k": Field("top_k", integer(-1, INT32_MAX)),
    "top_p": Field("top_p", number(0, 1, above=True)),
    "min_p": Field("min_p", number(0, 1)),
    "presence_penalty": Field("presence_penalty", number(-2, 2)),
    "frequency_penalty": Field("frequency_penalty", number(-2, 2)),
    "repetition_penalty": Field("repetition_penalty", number(1e-3, 1e3)),
    "seed": Field("seed", integer(0, INT64_MAX)),
    "stop": Field("stop", stop_strings),
    "stop_token_ids": Field("stop_token_ids", lambda value: token_ids(value, MAX_STOP_TOKEN_IDS)),
    "min_tokens": Field("min_tokens", integer(0, INT32_MAX)),
    "ignore_eos": Field("ignore_eos", boolean),
    "logit_bias": Field("logit_bias", logit_bias),
    "priority": Field("priority", integer(-1000, 1000)),
    "model": Field("model", string),
    "guided_json": Field("", only(because=_UNGUIDED)),
    "guided_regex": Field("", only(because=_UNGUIDED)),
    "guided_grammar": Field("", only(because=_UNGUIDED)),
}

_HTTP: Table = SAMPLING | {
    "max_tokens": Field("max_tokens", integer(0, INT32_MAX)),
    "stream": Field("stream", boolean),
    "user": Field("", string),
}

_OPENAI: Table = _HTTP | {
    "n": Field("n", integer(1, MAX_SAMPLES)),
    "stream_options": Field("include_usage", _stream_options),
}

GENERATE: Table = _HTTP | {
    "prompt": Field("prompt", lambda value: (string(value),)),
    "n": Field("n", only(1, because="must be 1 on /generate; /v1/completions takes more")),
    "logprobs": Field("", only(because="is not available on /generate; use /v1/completions")),
}

COMPLETIONS: Table = _OPENAI | {
    "prompt": Field("prompt", prompts),
    "logprobs": Field("logprobs", integer(0, MAX_COMPLETION_LOGPROBS)),
    "echo": Field("echo", boolean),
    "best_of": Field("best_of", integer(1, MAX_SAMPLES)),
    "suffix": Field("", only("", because="is not supported: the model continues text, it does not insert")),
}

CHAT: Table = _OPENAI | {
    "messages": Field("messages", chat_messages),
    "max_tokens": Field("max_tokens", integer(1, INT32_MAX)),
    "max_completion_tokens": Field("max_completion_tokens", integer(1, INT32_MAX)),
    "logprobs": Field("logprobs", boolean),
    "top_logprobs": Field("top_logprobs", integer(0, MAX_TOP_LOGPROBS)),
    "response_format": Field("", _response_format),
    # Tools go to the template's `tools`, and calls are parsed out of the answer, once both are there.
    "tools": Field("", only([], because="is not supported by this server")),
    "tool_choice": Field("", only("none", "auto", because="is not supported by this server")),
    "functions": Field("", only([], because="is not supported by this server")),
    "continue_final_message": Field("", only(False, because="is not supported by this server")),
    "add_generation_prompt": Field("add_generation_prompt", boolean),
    "chat_template_kwargs": Field("chat_template_kwargs", json_object),
}

GRPC: Table = SAMPLING | {
    "max_tokens": Field("max_tokens", integer(0, INT32_MAX)),
    "num_samples": Field("n", integer(1, MAX_SAMPLES)),
    "lora_adapter_id": Field("", only("", because="must be empty: no adapters are served")),
    "logprobs": Field("logprobs", integer(0, MAX_TOP_LOGPROBS)),
    "prompt_logprobs": Field("prompt_logprobs", integer(0, MAX_TOP_LOGPROBS)),
    "want_text": Field("want_text", boolean),
    "echo": Field("echo", boolean),
    "prompt_only": Field("prompt_only", boolean),
    "request_id": Field("request_id", request_id),
    "model_defaults": Field("model_defaults", boolean),
}

_unknown: set[str] = set()  # names already logged
_MAX_UNKNOWN = 256


def parse(body: Mapping[str, Any], table: Table) -> RequestFields:
    """Checks every field of a request.

    Raises:
        InvalidRequest: a field is not allowed, or fields contradict each other; ``param`` is its name.
    """
    values: dict[str, Any] = {}
    for name, value in body.items():
        field = table.get(name)
        if field is None:
            _log_unknown(name)
        elif value is not None:
            checked = _checked(name, value, field.check)
            if field.target:
                values[field.target] = checked
    if table is COMPLETIONS:
        _combine_completions(values)
    elif table is CHAT:
        _combine_chat(values)
    elif table is GENERATE:
        _require(values, "prompt")
    elif values.get("prompt_only") and values.get("max_tokens"):
        raise InvalidRequest(f"max_tokens must be 0 with prompt_only, not {values['max_tokens']}", param="max_tokens")
    if values.get("include_usage") and not values.get("stream"):
        raise InvalidRequest("stream_options is only allowed with stream", param="stream_options")
    return RequestFields(**values)


def required(body: Mapping[str, Any], name: str, check: Check) -> Any:
    """The only field of a small request, checked; raises `InvalidRequest`."""
    for other in body.keys() - {name}:
        _log_unknown(other)
    if body.get(name) is None:
        raise InvalidRequest(f"{name} is required", param=name)
    return _checked(name, body[name], check)


def _checked(name: str, value: Any, check: Check) -> Any:
    try:
        return check(value)
    except ValueError as error:
        shown = "" if isinstance(value, (dict, list, tuple)) else f", not {_shown(value)}"
        raise InvalidRequest(f"{name} {error}{shown}", param=name) from None


def _combine_completions(values: dict[str, Any]) -> None:
    _require(values, "prompt")
    best_of = values.pop("best_of", None)
    if best_of is not None and best_of != values.get("n", 1):
        raise InvalidRequest(f"best_of must equal n, {values.get('n', 1)}, not {best_of}", param="best_of")
    if values.get("echo") and "logprobs" in values:
        values["prompt_logprobs"] = values["logprobs"]


def _combine_chat(values: dict[str, Any]) -> None:
    _require(values, "messages")
    limit = values.pop("max_completion_tokens", None)
    if limit is not None and values.setdefault("max_tokens", limit) != limit:
        raise InvalidRequest("max_tokens and max_completion_tokens differ: give one of them", param="max_completion_tokens")
    top = values.pop("top_logprobs", None)
    if values.pop("logprobs", False):
        values["logprobs"] = top or 0
    elif top:
        raise InvalidRequest("top_logprobs is only allowed with logprobs true", param="top_logprobs")


def _require(values: Mapping[str, Any], name: str) -> None:
    if name not in values:
        raise InvalidRequest(f"{name} is required", param=name)


def _shown(value: Any) -> str:
    """A value in an error message: short, printable, and never a huge integer's digits."""
    if type(value) is int and value.bit_length() > 128:
        return "an integer of more than 128 bits"
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _log_unknown(name: str) -> None:
    if name not in _unknown and len(_unknown) < _MAX_UNKNOWN:
        _unknown.add(name)
        logger.warning("ignoring unknown request field %s (said once per name)", _shown(name))
