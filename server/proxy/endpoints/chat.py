"""``POST /v1/chat/completions``: OpenAI's chat completions, with tools."""

from __future__ import annotations

import dataclasses
import functools
import json

from starlette.requests import Request
from starlette.responses import Response

from protos.orchestrator_pb2 import DecodeRequest
from server.api import fields
from server.api.fields import RequestFields
from server.errors import InvalidRequest
from server.proxy.answer_formats import AnswerFormat, ChatFormat
from server.proxy.answering import LIMITS, answer, decode_requests, model_name
from server.proxy.chat_request import chat_request
from server.proxy.endpoint import Body, Description, Endpoint, Proxy
from server.proxy.schemas import (
    INTEGER,
    NUMBER,
    PROMPT_LOGPROBS,
    STREAM_ABOUT,
    STRING,
    USAGE,
    fixed,
    list_of,
    object_of,
    or_null,
    ref,
    stream_content,
    with_optional,
)
from server.proxy.upstreams import Metadata
from server.text import json_schemas
from server.text.tool_forms import FORMS
from server.text.tool_forms.base import CALLS


async def chat(proxy: Proxy, request: Request) -> Response:
    return await answer(proxy, request, fields.CHAT, plan)


async def plan(proxy: Proxy, parsed: RequestFields, metadata: Metadata) -> tuple[list[DecodeRequest], AnswerFormat]:
    name = await model_name(proxy, parsed, metadata)
    rendered = await proxy.upstreams.call(lambda preheat: preheat.RenderChat, chat_request(parsed), metadata)
    tools = parsed.tools if parsed.tool_choice != "none" else ()
    parsed = dataclasses.replace(parsed, prompt=(tuple(rendered.token_ids),), model_defaults=True)
    parser = None
    if tools:
        names = [tool["function"]["name"] for tool in tools]
        form = FORMS[rendered.tool_format]
        parser = functools.partial(form.parser, names, parallel=parsed.parallel_tool_calls)
        parsed = guided_by_tools(parsed, rendered.tool_grammar)
    answer_format = ChatFormat(
        name,
        logprobs=parsed.logprobs,
        prompt_logprobs=parsed.shown_prompt_logprobs,
        include_usage=parsed.include_usage,
        parser=parser,
    )
    return decode_requests(parsed), answer_format


def guided_by_tools(parsed: RequestFields, calls: str) -> RequestFields:
    """``calls`` is what the model may write; empty: anything. Beside it, an answer in the format that is asked for."""
    if not calls:
        return dataclasses.replace(parsed, show_tool_markers=True)
    grammar = f"{CALLS}\n{calls}"
    if parsed.guided_json is not None:
        try:
            answer = json_schemas.guiding(json.loads(parsed.guided_json))
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"response_format cannot be compiled: {error}", param="response_format") from None
        grammar = f"{CALLS} | answer\nanswer: %json {answer}\n{calls}"
    return dataclasses.replace(parsed, show_tool_markers=True, guided_json=None, guided_grammar=grammar)


CALL = object_of(id=STRING, type=fixed("function"), function=object_of(name=STRING, arguments=STRING))
MESSAGE = object_of(role=fixed("assistant"), content=or_null(STRING))
TOKEN = object_of(token=STRING, logprob=NUMBER, bytes=list_of(INTEGER))
CHOICE = object_of(
    index=INTEGER,
    message=with_optional(MESSAGE, tool_calls=list_of(CALL)),
    finish_reason=fixed("stop", "length", "tool_calls"),
    logprobs=or_null(object_of(content=list_of(with_optional(TOKEN, top_logprobs=list_of(TOKEN))))),
)
CHAT_COMPLETION = object_of(
    object=fixed("chat.completion"), choices=list_of(CHOICE), usage=ref("Usage"), id=STRING, created=INTEGER, model=STRING
)
CHAT = Endpoint(
    "/v1/chat/completions",
    chat,
    Description(
        "OpenAI's chat completions",
        answer=stream_content("ChatCompletion"),
        body=Body("ChatRequest", fields.CHAT),
        about=STREAM_ABOUT,
        errors=LIMITS,
        schemas={"ChatCompletion": with_optional(CHAT_COMPLETION, prompt_logprobs=PROMPT_LOGPROBS), "Usage": USAGE},
    ),
    method="POST",
)
