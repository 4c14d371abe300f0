"""Checks of single values: each takes what a client sent and returns it checked, or raises `ValueError`.

The error's text completes a sentence that begins with the field's name: "must be an integer from 0 to 20".
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_SAMPLES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters of one stop string
MAX_STOP_TOKEN_IDS = 32  # engine.api.MAX_SUPPRESSED
MAX_LOGIT_BIAS = 300  # engine.api.MAX_LOGIT_BIAS
MAX_TOP_LOGPROBS = 20  # engine.api.TOP_LOGPROBS
MAX_COMPLETION_LOGPROBS = 5
MAX_PROMPTS = 1024
MAX_REQUEST_ID = 256  # characters
MAX_CHOICES = 1024
MAX_GRAMMAR = 65_536  # characters of a schema, expression or grammar: server.text.guided.MAX_LENGTH

AS_MANY_AS_FIT = -1  # tokens
ANY_OBJECT = '{"type": "object"}'  # the schema of any JSON object

T = TypeVar("T")
CheckOf = Callable[[object], T]
Check = CheckOf[object]
AnyCheck = TypeVar("AnyCheck", bound=Callable[..., object])
Json = dict[str, Any]

_SCHEMAS: dict[Callable[..., object], Json] = {}


def described(schema: Json) -> Callable[[AnyCheck], AnyCheck]:
    """Notes what a check allows as a JSON schema, for the API's description (``server/proxy/openapi.py``)."""

    def note(check: AnyCheck) -> AnyCheck:
        _SCHEMAS[check] = schema
        return check

    return note


def schema_of(check: Callable[..., object]) -> Json:
    """What a check allows, as a JSON schema; it may allow less."""
    return _SCHEMAS.get(check, {})


def integer(low: int, high: int) -> CheckOf[int]:
    allowed = f"must be an integer from {low} to {high}"

    @described({"type": "integer", "minimum": low, "maximum": high})
    def check(value: object) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(allowed)
        return value

    return check


def number(low: float, high: float, *, above: bool = False) -> CheckOf[float]:
    """A finite number in [low, high], or with ``above`` in (low, high]."""
    allowed = (
        f"must be a number above {low:g} and at most {high:g}"
        if above
        else f"must be a number from {low:g} to {high:g}"
    )

    @described({"type": "number", "exclusiveMinimum" if above else "minimum": low, "maximum": high})
    def check(value: object) -> float:
        if not isinstance(value, (int, float)) or type(value) not in (int, float):
            raise ValueError(allowed)
        try:
            result = float(value)
        except OverflowError:
            raise ValueError(allowed) from None
        if not math.isfinite(result) or not low <= result <= high or (above and result == low):
            raise ValueError(allowed)
        return result

    return check


@described({"type": "boolean"})
def boolean(value: object) -> bool:
    if type(value) is not bool:
        raise ValueError("must be true or false")
    return value


@described({"type": "string"})
def string(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode: it has a lone surrogate") from None
    return value


def unused(check: Check) -> CheckOf[None]:
    """A field that is checked and then says nothing."""

    @described(schema_of(check))
    def checked(value: object) -> None:
        check(value)

    return checked


@described({"type": "string", "minLength": 1, "maxLength": MAX_REQUEST_ID})
def request_id(value: object) -> str:
    if (
        not isinstance(value, str)
        or not 0 < len(value) <= MAX_REQUEST_ID
        or not (value.isascii() and value.isprintable())
    ):
        raise ValueError(f"must be 1 to {MAX_REQUEST_ID} printable ASCII characters")
    return value


@described({"type": "object"})
def json_object(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    string(json.dumps(value, ensure_ascii=False))
    return value


@described({
    "anyOf": [
        {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH},
        {
            "type": "array",
            "maxItems": MAX_STOP_STRINGS,
            "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH},
        },
    ]
})
def stop_strings(value: object) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)) or len(values) > MAX_STOP_STRINGS:
        raise ValueError(f"must be a string or up to {MAX_STOP_STRINGS} strings")
    for item in values:
        if not isinstance(item, str) or not 0 < len(item) <= MAX_STOP_LENGTH:
            raise ValueError(f"must be strings of 1 to {MAX_STOP_LENGTH} characters")
        string(item)
    return tuple(values)


@described({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT32_MAX}})
def token_ids(value: object, limit: int | None = None) -> tuple[int, ...]:
    """Token ids; whether the model knows them is checked later."""
    if not isinstance(value, (list, tuple)) or not all(type(item) is int for item in value):
        raise ValueError("must be a list of token ids (integers)")
    if limit is not None and len(value) > limit:
        raise ValueError(f"must be at most {limit} token ids")
    for item in value:
        if not 0 <= item <= INT32_MAX:
            raise ValueError(f"must be token ids of the model's vocabulary; {shown(item)} is not")
    return tuple(value)


@described({
    "type": "object",
    "maxProperties": MAX_LOGIT_BIAS,
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
})
def logit_bias(value: object) -> tuple[tuple[int, float], ...]:
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


@described({
    "type": "array",
    "maxItems": MAX_STOP_TOKEN_IDS,
    "items": {"type": "integer", "minimum": 0, "maximum": INT32_MAX},
})
def stop_token_ids(value: object) -> tuple[int, ...]:
    return token_ids(value, MAX_STOP_TOKEN_IDS)


@described({"type": "string"})
def prompt(value: object) -> tuple[str]:
    """The only prompt of a request, as text."""
    return (string(value),)


_IDS: Json = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT32_MAX}, "minItems": 1}


@described({
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
})
def prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
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


def only(*allowed: object, because: str) -> CheckOf[None]:
    """A field of which only these values are supported."""

    @described({"enum": list(allowed)} if allowed else {"type": "null"})
    def check(value: object) -> None:
        if not any(type(value) is type(item) and value == item for item in allowed):
            raise ValueError(because)

    return check


def neutral(*allowed: object, because: str) -> CheckOf[None]:
    """A field that is not supported: only these values, which ask for nothing, may be given."""
    accepted = " or ".join(json.dumps(value) for value in (*allowed, None))

    def check(value: object) -> None:
        if not any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed):
            raise ValueError(f"is not supported: {because}; only {accepted} is accepted")

    return check


@described({"type": "string", "minLength": 1, "maxLength": MAX_GRAMMAR})
def grammar(value: object) -> str:
    """A regular expression or grammar; whether it can be compiled is found out later."""
    text = string(value)
    if not 0 < len(text) <= MAX_GRAMMAR:
        raise ValueError(f"must have 1 to {MAX_GRAMMAR} characters")
    return text


@described({"anyOf": [{"type": "object"}, {"type": "string", "minLength": 1, "maxLength": MAX_GRAMMAR}]})
def json_schema(value: object) -> str:
    """A JSON schema, given as an object or as its JSON text; returned as text."""
    return grammar(json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value)


@described({
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_CHOICES,
    "items": {"type": "string", "minLength": 1, "maxLength": MAX_GRAMMAR},
})
def choices(value: object) -> tuple[str, ...]:
    """The texts that an answer may be."""
    if not isinstance(value, (list, tuple)) or not 0 < len(value) <= MAX_CHOICES:
        raise ValueError(f"must be a list of 1 to {MAX_CHOICES} strings")
    for item in value:
        if not isinstance(item, str) or not item:
            raise ValueError("must be strings of at least one character")
        string(item)
    if sum(map(len, value)) > MAX_GRAMMAR:
        raise ValueError(f"must have at most {MAX_GRAMMAR} characters in all")
    return tuple(value)


Guide = tuple[str, object]  # the field ``guided_*`` that says the same as a field of another server, and its value


def guide(target: str, check: Check) -> CheckOf[Guide]:
    """A field of another server with the meaning of ``target``, one of ``guided_*``."""

    @described(schema_of(check))
    def guiding(value: object) -> Guide:
        return target, check(value)

    return guiding


# Of ``structured_outputs``: how JSON is to be written, and the values that say nothing.
_JSON_STYLE = {"whitespace_pattern": (), "disable_any_whitespace": (False,), "disable_additional_properties": (False,)}


@described({
    "type": "object",
    "properties": {
        "json": {"anyOf": [*schema_of(json_schema)["anyOf"], {"type": "null"}]},
        "regex": {"anyOf": [schema_of(grammar), {"type": "null"}]},
        "choice": {"anyOf": [schema_of(choices), {"type": "null"}]},
        "grammar": {"anyOf": [schema_of(grammar), {"type": "null"}]},
        "json_object": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "structural_tag": {"type": "null"},
    },
})
def structured_outputs(value: object) -> Guide:
    """vLLM's ``structured_outputs``."""
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    if value.get("structural_tag") is not None:
        raise ValueError(".structural_tag is not supported: use tools, or grammar")
    any_object = value.get("json_object")
    if any_object is not None and type(any_object) is not bool:
        raise ValueError(".json_object must be true or false")
    given = [name for name in ("json", "regex", "choice", "grammar") if value.get(name) is not None]
    if len(given) + bool(any_object) != 1:
        raise ValueError("must have exactly one of json, regex, choice, grammar, json_object")
    for name, allowed in _JSON_STYLE.items():
        if (any_object or given == ["json"]) and value.get(name) is not None and value[name] not in allowed:
            raise ValueError(f".{name} is not supported: use a schema, a regex or a grammar that says so")
    if any_object:
        return "guided_json", ANY_OBJECT
    (name,) = given
    check: Check = choices if name == "choice" else json_schema if name == "json" else grammar
    try:
        return f"guided_{name}", check(value[name])
    except ValueError as error:
        raise ValueError(f".{name} {error}") from None


@described({
    "type": "object",
    "properties": {"include_usage": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}},
})
def stream_options(value: object) -> bool:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    include = value.get("include_usage")
    if include is not None and type(include) is not bool:
        raise ValueError(".include_usage must be true or false")
    if value.get("continuous_usage_stats") not in (None, False):
        raise ValueError(".continuous_usage_stats is not supported: usage comes last, with include_usage")
    return bool(include)


def token_limit(low: int) -> CheckOf[int]:
    """llama-server's ``n_predict``: a number of tokens, or -1 for as many as fit (`AS_MANY_AS_FIT`)."""
    inner = integer(low, INT32_MAX)

    @described({"type": "integer", "minimum": AS_MANY_AS_FIT, "maximum": INT32_MAX})
    def check(value: object) -> int:
        return value if value == AS_MANY_AS_FIT and type(value) is int else inner(value)

    return check


def within_depth(value: object, limit: int) -> bool:
    """Lists and objects are nested at most ``limit`` deep. Level by level, so that the check cannot run out of stack."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(limit):
        level = [
            child
            for container in level
            for child in (container.values() if isinstance(container, dict) else container)
            if isinstance(child, (dict, list))
        ]
    return not level


def shown(value: object) -> str:
    """A value in an error message: short, printable, and never a huge integer's digits."""
    if type(value) is int and value.bit_length() > 128:
        return "an integer of more than 128 bits"
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
