"""A conversation as a prompt: the model's chat template, its tools, and a last message that is gone on with."""

from __future__ import annotations

import json
import re
import secrets
from typing import Any, TypeVar

from protos import preheat_pb2
from server.api import chat_types
from server.errors import InvalidRequest
from server.text.tokenizers import Tokenizer
from server.text.tokenizers.chat import unmark
from server.text.tool_forms.base import Tool
from server.text.tool_use import ToolUse

Kind = TypeVar("Kind")

_NINE = re.compile(r"id\s*\|\s*length\s*!=\s*9")  # what Mistral's templates refuse calls for


def render_chat(
    tokenizer: Tokenizer, tool_use: ToolUse | None, request: preheat_pb2.RenderChatRequest
) -> preheat_pb2.RenderChatResponse:
    """What ``RenderChat`` answers. ``tool_use`` is `None` for a model without a chat template.

    Raises:
        InvalidRequest: the template refuses the messages, or a field is not valid.
    """
    messages = _json(request.messages, "messages", list)
    variables = _json(request.template_kwargs or "{}", "chat_template_kwargs", dict)
    template = tokenizer.chat_template
    if template is None or tool_use is None:
        raise InvalidRequest(
            "messages cannot be rendered: the model has no chat template; use /v1/completions", param="messages"
        )
    if not all(isinstance(message, dict) for message in messages):
        raise InvalidRequest("messages must be a list of objects", param="messages")
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in variables:
            raise InvalidRequest(
                f"chat_template_kwargs must not have {name}: it is a field of its own", param="chat_template_kwargs"
            )
    if any(_NINE.search(source) for source in template.sources.values()):
        messages = _with_short_ids(messages)
    answer = preheat_pb2.RenderChatResponse()
    tools = _tools(request) if request.HasField("tools") else ()
    parallel = not request.HasField("parallel_tool_calls") or request.parallel_tool_calls
    if tools:
        callable_tools = [tool for tool in tools if request.tool_name in ("", tool["function"]["name"])]
        answer.tool_format = tool_use.form.name
        try:
            grammar = tool_use.form.grammar(callable_tools, parallel=parallel, optional=request.tools_optional)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"tools cannot be compiled: {error}", param="tools") from None
        if grammar is not None:
            answer.tool_grammar = grammar
    turns, shown = tool_use.conversation(
        messages, tools, parallel=parallel, optional=request.tools_optional, called=request.tool_name
    )
    sentinel = ""
    if request.continue_final_message:
        sentinel = secrets.token_hex(16)  # marks where the last message ends, whatever the template puts behind it
        if not turns or not isinstance(content := turns[-1].get("content"), str):
            raise InvalidRequest("messages must end with a text to go on with", param="messages")
        turns[-1] = {**turns[-1], "content": content + sentinel}
    add_prompt = not request.HasField("add_generation_prompt") or request.add_generation_prompt
    text = template.render(
        turns, tools=shown, add_generation_prompt=add_prompt and not request.continue_final_message, **variables
    )
    if sentinel:
        text, found, _ = text.rpartition(sentinel)
        if not found:
            raise InvalidRequest("the model's chat template does not show the last message as it is", param="messages")
    # The template spells the BOS token where the model wants one; it comes once, whoever asks for it.
    answer.text = unmark(text)
    try:
        answer.token_ids.extend(tokenizer.encode_chat(text, add_bos=request.add_special_tokens))
    except InvalidRequest as error:
        raise InvalidRequest(error.message, param="messages") from None
    return answer


def _with_short_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ids of calls as nine letters and digits, where they came from a server that makes others; equal ones stay equal."""

    def short(id: object) -> str:
        return re.sub("[^A-Za-z0-9]", "", str(id))[-9:].rjust(9, "0")

    changed = []
    for message in messages:
        if isinstance(calls := message.get("tool_calls"), list):
            calls = [call | {"id": short(call.get("id", ""))} if isinstance(call, dict) else call for call in calls]
            message = message | {"tool_calls": calls}
        if message.get("tool_call_id") is not None:
            message = message | {"tool_call_id": short(message["tool_call_id"])}
        changed.append(message)
    return changed


def _tools(request: preheat_pb2.RenderChatRequest) -> tuple[Tool, ...]:
    try:
        tools = chat_types.tools(_json(request.tools, "tools", list))
    except ValueError as error:
        raise InvalidRequest(f"tools {error}", param="tools") from None
    if not tools or (request.tool_name and request.tool_name not in {tool["function"]["name"] for tool in tools}):
        raise InvalidRequest("tools must have the function that is to be called", param="tools")
    return tools


def _json(text: str, param: str, kind: type[Kind]) -> Kind:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{param} must be valid JSON", param=param) from None
    if not isinstance(value, kind):
        raise InvalidRequest(f"{param} must be a JSON {'list' if kind is list else 'object'}", param=param)
    return value
