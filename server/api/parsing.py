"""The first half of validation: the fields of a request, typed and in range. It needs no model.

A request comes as a mapping (a JSON object, or the set fields of a ``DecodeRequest``); `parse` checks each field by the
table of its door (``server/api/fields.py``) and returns `RequestFields`, the same for all doors. The proxy does this for JSON, so that
most mistakes are answered without bothering an orchestrator, and the orchestrator does it for every ``DecodeRequest``,
since anyone may send one. What depends on the model follows in ``server/orchestrator/validation.py``.

The rules: `None` is the same as absent; a bool is no number; a number with a fraction (or written as one) is no
integer; NaN and infinity are no numbers; nothing is clamped; every error names the field and what is allowed. Fields of
other servers that would change the answer are refused (``server/api/peer_fields.py``); fields that no table knows are ignored, and
logged once per name.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from server.api import field_types, peer_fields
from server.api.chat_types import ToolName
from server.api.field_types import Check, shown
from server.api.fields import CHAT, COMPLETIONS, GRPC, GUIDE_SPELLINGS, GUIDED, RequestFields, Table
from server.errors import InvalidRequest, ModelNotFound

logger = logging.getLogger(__name__)

_unknown: set[str] = set()  # names already logged
_MAX_UNKNOWN = 256


def parse(body: Mapping[str, object], table: Table) -> RequestFields:
    """Checks every field of a request.

    Raises:
        InvalidRequest: a field is not allowed, or fields contradict each other; ``param`` is its name.
    """
    values, spelled = _checked_fields(body, table, {} if table is GRPC else peer_fields.FIELDS)
    _combine_guides(values)
    _combine_counts(values)
    require(values, table)
    if table is COMPLETIONS:
        _combine_completions(values)
    elif table is CHAT:
        _combine_chat(values)
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


def checked(body: Mapping[str, object], table: Table) -> dict[str, Any]:
    """The fields that are given, each checked by itself, under the names they have in `RequestFields`. Others are ignored.

    Raises:
        InvalidRequest: a field is not allowed; ``param`` is its name.
    """
    return _checked_fields(body, table, {})[0]


def require(values: Mapping[str, object], table: Table) -> None:
    """Refuses values of `checked` that lack a field which the table requires."""
    for name, field in table.items():
        if field.required and field.target not in values:
            raise InvalidRequest(f"{name} is required", param=name)


def _checked_fields(
    body: Mapping[str, object], table: Table, others: Mapping[str, Check]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values, and what the client called each. ``others`` are checks of fields that become nothing."""
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for name, value in body.items():
        field = table.get(name)
        check = others.get(name) if field is None else field.check
        if check is None:
            _log_unknown(name)
        elif value is not None:
            found = _checked(name, value, check)
            if field is not None and found is not None:
                first = spelled.setdefault(field.target, name)
                if values.setdefault(field.target, found) != found:
                    raise InvalidRequest(f"{first} and {name} differ: give one of them", param=name)
    return values, spelled


def _checked(name: str, value: object, check: Check) -> object:
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
    asked = [values.get("shown_prompt_logprobs"), values.get("logprobs") if values.get("echo") else None]
    if asked != [None, None]:
        values["prompt_logprobs"] = max(count for count in asked if count is not None)


def _combine_chat(values: dict[str, Any]) -> None:
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
        raise InvalidRequest(f"tool_choice names a function that is not in tools: {shown(choice.name)}", param="tool_choice")
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


def _log_unknown(name: str) -> None:
    if name not in _unknown and len(_unknown) < _MAX_UNKNOWN:
        _unknown.add(name)
        logger.warning("ignoring unknown request field %s (said once per name)", field_types.shown(name))
