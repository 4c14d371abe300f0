"""The fields of a request, typed and in range: the half of validation that needs no model.

A request comes as a mapping (a JSON object, or the set fields of a ``DecodeRequest``); `parse` checks each field by the
table of its endpoint and returns `RequestFields`, the same for all endpoints. The proxy does this for JSON, so that
most mistakes are answered without bothering an orchestrator, and the orchestrator does it for every ``DecodeRequest``,
since anyone may send one. What depends on the model follows in ``server/orchestrator/validation.py``.

The rules: `None` is the same as absent; a bool is no number; a number with a fraction (or written as one) is no
integer; NaN and infinity are no numbers; nothing is clamped; every error names the field and what is allowed. Fields of
other servers that would change the answer are refused (``server/api/peer_fields.py``); fields that no table knows are ignored, and
logged once per name.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping
from typing import Any

from server.api import chat_types, field_types, peer_fields
from server.api.chat_types import ToolName
from server.api.field_types import Check
from server.errors import InvalidRequest, ModelNotFound

logger = logging.getLogger(__name__)


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
    seed: int | None = None  # -1 is random
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
    lora_adapter_id: str | None = None
    request_id: str | None = None
    guided_json: str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: tuple[str, ...] | None = None
    show_tool_markers: bool = False
    parse_special: bool = True  # control tokens that a text prompt spells become ids
    skip_special_tokens: bool = True  # the text leaves control tokens out
    add_special_tokens: bool | None = None  # BOS comes first; None: before a text prompt, and where a template has it
    # of HTTP only
    shown_prompt_logprobs: int | None = None  # what the answer has as such; prompt_logprobs may be of echo
    include_stop: bool = False  # the text ends with the stop string that ended it
    as_many_as_fit: bool = False  # asked for, where max_tokens is absent
    spelled: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)  # what the client called these fields
    guide_field: str | None = None  # what the client called its guide, where that is another name
    stream: bool = False
    include_usage: bool = False
    prompt: tuple[str | tuple[int, ...], ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str | ToolName = "auto"  # "none", "auto", "required"
    parallel_tool_calls: bool = True


@dataclasses.dataclass(frozen=True)
class Field:
    """A field as a client spells it: what it becomes in `RequestFields` (empty: nothing) and how it is checked."""

    target: str
    check: Check


Table = dict[str, Field]  # never changed


GUIDED = ("guided_json", "guided_regex", "guided_grammar", "guided_choice")
GUIDE_SPELLINGS = ("structured_outputs", "response_format", "grammar", "json_schema", "regex", "ebnf")  # which become one of those

SAMPLING: Table = {
    "temperature": Field("temperature", field_types.number(0, 1e6)),
    "top_k": Field("top_k", field_types.integer(-1, field_types.INT32_MAX)),
    "top_p": Field("top_p", field_types.number(0, 1, above=True)),
    "min_p": Field("min_p", field_types.number(0, 1)),
    "presence_penalty": Field("presence_penalty", field_types.number(-2, 2)),
    "frequency_penalty": Field("frequency_penalty", field_types.number(-2, 2)),
    "repetition_penalty": Field("repetition_penalty", field_types.number(1e-3, 1e3)),
    "seed": Field("seed", field_types.integer(field_types.INT64_MIN, field_types.INT64_MAX)),
    "stop": Field("stop", field_types.stop_strings),
    "stop_token_ids": Field("stop_token_ids", field_types.stop_token_ids),
    "min_tokens": Field("min_tokens", field_types.integer(0, field_types.INT32_MAX)),
    "ignore_eos": Field("ignore_eos", field_types.boolean),
    "skip_special_tokens": Field("skip_special_tokens", field_types.boolean),
    "add_special_tokens": Field("add_special_tokens", field_types.boolean),
    "logit_bias": Field("logit_bias", field_types.logit_bias),
    "priority": Field("priority", field_types.integer(-1000, 1000)),
    "model": Field("model", field_types.string),
    "guided_json": Field("guided_json", field_types.json_schema),
    "guided_regex": Field("guided_regex", field_types.grammar),
    "guided_grammar": Field("guided_grammar", field_types.grammar),
    "guided_choice": Field("guided_choice", field_types.choices),
}

_HTTP: Table = SAMPLING | {
    "structured_outputs": Field("structured_outputs", field_types.structured_outputs),
    "response_format": Field("response_format", chat_types.response_format),
    "grammar": Field("grammar", chat_types.any_grammar),
    "json_schema": Field("json_schema", field_types.guide("guided_json", field_types.json_schema)),
    "regex": Field("regex", field_types.guide("guided_regex", field_types.grammar)),
    "ebnf": Field("ebnf", field_types.guide("guided_grammar", field_types.grammar)),
    "max_tokens": Field("max_tokens", field_types.integer(0, field_types.INT32_MAX)),
    "max_completion_tokens": Field("max_tokens", field_types.integer(0, field_types.INT32_MAX)),
    "n_predict": Field("max_tokens", field_types.token_limit(0)),
    "best_of": Field("best_of", field_types.integer(1, field_types.MAX_SAMPLES)),
    "include_stop_str_in_output": Field("include_stop", field_types.boolean),
    "no_stop_trim": Field("include_stop", field_types.boolean),
    "stream": Field("stream", field_types.boolean),
    "user": Field("", field_types.string),
}

_OPENAI: Table = _HTTP | {
    "n": Field("n", field_types.integer(1, field_types.MAX_SAMPLES)),
    "stream_options": Field("include_usage", field_types.stream_options),
}

GENERATE: Table = _HTTP | {
    "prompt": Field("prompt", field_types.prompt),
    "parse_special": Field("parse_special", field_types.boolean),
    "n": Field("n", field_types.only(1, because="must be 1 on /generate; /v1/completions takes more")),
    "logprobs": Field("", field_types.only(because="is not available on /generate; use /v1/completions")),
    "prompt_logprobs": Field("", field_types.only(because="is not available on /generate; use /v1/completions")),
}

COMPLETIONS: Table = _OPENAI | {
    "prompt": Field("prompt", field_types.prompts),
    "parse_special": Field("parse_special", field_types.boolean),
    "logprobs": Field("logprobs", field_types.integer(0, field_types.MAX_COMPLETION_LOGPROBS)),
    "prompt_logprobs": Field("shown_prompt_logprobs", field_types.integer(0, field_types.MAX_TOP_LOGPROBS)),
    "echo": Field("echo", field_types.boolean),
    "suffix": Field("", field_types.only("", because="is not supported: the model continues text, it does not insert")),
}

CHAT: Table = _OPENAI | {
    "messages": Field("messages", chat_types.chat_messages),
    "parse_special": Field("", field_types.only(False, because="must be false: what messages spell stays text")),
    "max_tokens": Field("max_tokens", field_types.integer(1, field_types.INT32_MAX)),
    "max_completion_tokens": Field("max_tokens", field_types.integer(1, field_types.INT32_MAX)),
    "n_predict": Field("max_tokens", field_types.token_limit(1)),
    "logprobs": Field("logprobs", field_types.boolean),
    "top_logprobs": Field("top_logprobs", field_types.integer(0, field_types.MAX_TOP_LOGPROBS)),
    "prompt_logprobs": Field("shown_prompt_logprobs", field_types.integer(0, field_types.MAX_TOP_LOGPROBS)),
    "tools": Field("tools", chat_types.tools),
    "tool_choice": Field("tool_choice", chat_types.tool_choice),
    "parallel_tool_calls": Field("parallel_tool_calls", field_types.boolean),
    "functions": Field("", field_types.only([], because="is not supported; use tools")),
    "function_call": Field("", field_types.only("none", because="is not supported; use tool_choice")),
    "continue_final_message": Field("continue_final_message", field_types.boolean),
    "add_generation_prompt": Field("add_generation_prompt", field_types.boolean),
    "chat_template_kwargs": Field("chat_template_kwargs", field_types.json_object),
    "reasoning_effort": Field("reasoning_effort", chat_types.reasoning_effort),
    "documents": Field("documents", chat_types.documents),
}

GRPC: Table = SAMPLING | {
    "max_tokens": Field("max_tokens", field_types.integer(0, field_types.INT32_MAX)),
    "num_samples": Field("n", field_types.integer(1, field_types.MAX_SAMPLES)),
    "lora_adapter_id": Field("lora_adapter_id", field_types.string),
    "logprobs": Field("logprobs", field_types.integer(0, field_types.MAX_TOP_LOGPROBS)),
    "prompt_logprobs": Field("prompt_logprobs", field_types.integer(0, field_types.MAX_TOP_LOGPROBS)),
    "want_text": Field("want_text", field_types.boolean),
    "echo": Field("echo", field_types.boolean),
    "prompt_only": Field("prompt_only", field_types.boolean),
    "request_id": Field("request_id", field_types.request_id),
    "model_defaults": Field("model_defaults", field_types.boolean),
    "show_tool_markers": Field("show_tool_markers", field_types.boolean),
    "parse_special": Field("parse_special", field_types.boolean),
}

SPELLINGS = ("text", "prompt", "content", "messages")  # of what is tokenized: ours, vLLM's, llama.cpp's, vLLM's chat

TOKENIZE: Table = {
    "text": Field("text", field_types.string),
    "prompt": Field("prompt", field_types.string),
    "content": Field("content", field_types.string),
    "messages": Field("messages", chat_types.chat_messages),
    "add_special_tokens": Field("add_special_tokens", field_types.boolean),
    "add_special": Field("add_special", field_types.boolean),
    "parse_special": Field("parse_special", field_types.boolean),
    "return_token_strs": Field("return_token_strs", field_types.boolean),
    "with_pieces": Field("with_pieces", field_types.boolean),
    "model": Field("model", field_types.string),
    "tools": Field("tools", chat_types.tools),
    "continue_final_message": Field("continue_final_message", field_types.boolean),
    "add_generation_prompt": Field("add_generation_prompt", field_types.boolean),
    "chat_template": Field("", field_types.only(because="is not supported: the server renders chats by the model's")),
    "chat_template_kwargs": Field("chat_template_kwargs", field_types.json_object),
}

DETOKENIZE: Table = {
    "tokens": Field("tokens", field_types.token_ids),
    "skip_special_tokens": Field("skip_special_tokens", field_types.boolean),
    "model": Field("model", field_types.string),
}

_unknown: set[str] = set()  # names already logged
_MAX_UNKNOWN = 256


def parse(body: Mapping[str, Any], table: Table) -> RequestFields:
    """Checks every field of a request.

    Raises:
        InvalidRequest: a field is not allowed, or fields contradict each other; ``param`` is its name.
    """
    values, spelled = _checked_fields(body, table, {} if table is GRPC else peer_fields.FIELDS)
    _combine_guides(values)
    _combine_counts(values)
    if table is COMPLETIONS:
        _combine_completions(values)
    elif table is CHAT:
        _combine_chat(values)
    elif table is GENERATE:
        _require(values, "prompt")
    elif values.get("prompt_only") and values.get("max_tokens"):
        raise InvalidRequest(f"max_tokens must be 0 with prompt_only, not {values['max_tokens']}", param="max_tokens")
    if values.get("shown_prompt_logprobs") is not None and values.get("stream"):
        raise InvalidRequest("prompt_logprobs is not available with stream", param="prompt_logprobs")
    if values.get("include_usage") and not values.get("stream"):
        raise InvalidRequest("stream_options is only allowed with stream", param="stream_options")
    return RequestFields(**values, spelled={target: name for target, name in spelled.items() if target != name})


def check_model_name(asked: str | None, served: str, adapters: Collection[str] = ()) -> None:
    """Refuses a ``model`` that is neither the served one nor an adapter of it; a request may leave it out.

    Raises:
        ModelNotFound: names what is served.
    """
    if asked is not None and asked != served and asked not in adapters:
        names = ", ".join(repr(name) for name in (served, *adapters))
        verb = "are" if adapters else "is"
        raise ModelNotFound(f"the model {ascii(asked)[:80]} does not exist here: {names} {verb} served", param="model")


def checked(body: Mapping[str, Any], table: Table) -> dict[str, Any]:
    """The fields that are given, each checked by itself, under the names they have in `RequestFields`. Others are ignored.

    Raises:
        InvalidRequest: a field is not allowed; ``param`` is its name.
    """
    return _checked_fields(body, table, {})[0]


def _checked_fields(
    body: Mapping[str, Any], table: Table, others: Mapping[str, Check]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values, and what the client called each. ``others`` are checks of fields that become nothing."""
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for name, value in body.items():
        field = table.get(name) or (Field("", others[name]) if name in others else None)
        if field is None:
            _log_unknown(name)
        elif value is not None:
            found = _checked(name, value, field.check)
            if field.target and found is not None:
                first = spelled.setdefault(field.target, name)
                if values.setdefault(field.target, found) != found:
                    raise InvalidRequest(f"{first} and {name} differ: give one of them", param=name)
    return values, spelled


def _checked(name: str, value: Any, check: Check) -> Any:
    try:
        return check(value)
    except ValueError as error:
        shown = "" if isinstance(value, (dict, list, tuple)) else f", not {field_types.shown(value)}"
        said = str(error)  # "must be ...", or a place in the value first: "[1].role must be ..."
        raise InvalidRequest(f"{name}{'' if said[:1] in '[.' else ' '}{said}{shown}", param=name) from None


def _combine_counts(values: dict[str, Any]) -> None:
    n, best_of = values.get("n", 1), values.pop("best_of", None)
    if best_of is not None and best_of != n:
        raise InvalidRequest(f"best_of must equal n, {n}, not {best_of}: all samples are answered", param="best_of")
    if values.get("max_tokens") == field_types.AS_MANY_AS_FIT:
        del values["max_tokens"]
        values["as_many_as_fit"] = True
    if values.get("include_stop") and values.get("stop_token_ids"):
        raise InvalidRequest(
            "include_stop_str_in_output is about stop strings, and excludes stop_token_ids", param="include_stop_str_in_output"
        )


def _combine_completions(values: dict[str, Any]) -> None:
    _require(values, "prompt")
    asked = [values.get("shown_prompt_logprobs"), values.get("logprobs") if values.get("echo") else None]
    if asked != [None, None]:
        values["prompt_logprobs"] = max(count for count in asked if count is not None)


def _combine_chat(values: dict[str, Any]) -> None:
    _require(values, "messages")
    if "shown_prompt_logprobs" in values:
        values["prompt_logprobs"] = values["shown_prompt_logprobs"]
    _combine_variables(values)
    top = values.pop("top_logprobs", None)
    if values.pop("logprobs", False):
        values["logprobs"] = top or 0
    elif top:
        raise InvalidRequest("top_logprobs is only allowed with logprobs true", param="top_logprobs")
    check_chat(values)


def _combine_variables(values: dict[str, Any]) -> None:
    """Fields that are variables of the template, which ``chat_template_kwargs`` may say otherwise. ``enable_thinking`` is the one
    by which most templates know that no effort means no thoughts."""
    given: dict[str, Any] = {name: values.pop(name) for name in ("reasoning_effort", "documents") if name in values}
    if "reasoning_effort" in given:
        given["enable_thinking"] = given["reasoning_effort"] != "none"
    if given:
        values["chat_template_kwargs"] = {**given, **values.get("chat_template_kwargs", {})}


def check_chat(values: dict[str, Any]) -> None:
    """Refuses what fits neither the tools nor the last message; ``continue_final_message`` begins no new one."""
    _combine_tools(values)
    if values.get("continue_final_message"):
        if values.setdefault("add_generation_prompt", False):
            raise InvalidRequest(
                "add_generation_prompt cannot be true with continue_final_message: the answer either begins a message "
                "or goes on with the last one",
                param="add_generation_prompt",
            )
        last = values["messages"][-1]
        if last["role"] != "assistant" or not isinstance(last["content"], str):
            raise InvalidRequest(
                "messages must end with a text of the assistant for continue_final_message", param="messages"
            )


def _combine_tools(values: dict[str, Any]) -> None:
    choice, tools = values.get("tool_choice", "auto"), values.get("tools", ())
    if not tools and choice not in ("none", "auto"):
        raise InvalidRequest("tool_choice asks for a call, but tools has none", param="tool_choice")
    if isinstance(choice, ToolName) and choice.name not in {tool["function"]["name"] for tool in tools}:
        raise InvalidRequest(f"tool_choice names a function that is not in tools: {choice.name}", param="tool_choice")
    if tools and choice != "none":
        guide = next((name for name in GUIDED if name in values), None)
        sent = values.get("guide_field", guide)
        if sent == "response_format" and choice != "auto":
            raise InvalidRequest(
                "response_format is about answers, but tool_choice asks for a call: leave one of them out",
                param="response_format",
            )
        if guide and (sent, guide) != ("response_format", "guided_json"):
            raise InvalidRequest(f'{sent} and tools exclude each other: use tool_choice "none"', param=sent)


def _combine_guides(values: dict[str, Any]) -> None:
    given = [name for name in (*GUIDED, *GUIDE_SPELLINGS) if name in values]
    if len(given) > 1:
        raise InvalidRequest(f"{given[0]} and {given[1]} exclude each other: give one of them", param=given[1])
    for spelling in GUIDE_SPELLINGS:
        if spelling in values:
            name, value = values.pop(spelling)
            values[name], values["guide_field"] = value, spelling


def _require(values: Mapping[str, Any], name: str) -> None:
    if name not in values:
        raise InvalidRequest(f"{name} is required", param=name)


def _log_unknown(name: str) -> None:
    if name not in _unknown and len(_unknown) < _MAX_UNKNOWN:
        _unknown.add(name)
        logger.warning("ignoring unknown request field %s (said once per name)", field_types.shown(name))
