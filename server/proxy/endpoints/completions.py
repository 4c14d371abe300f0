"""``POST /v1/completions``: OpenAI's completions, of texts or token ids."""

from __future__ import annotations

import dataclasses

from starlette.requests import Request
from starlette.responses import Response

from protos.orchestrator_pb2 import DecodeRequest
from server.api import fields
from server.api.fields import RequestFields
from server.proxy.answer_formats import AnswerFormat, CompletionFormat
from server.proxy.answering import LIMITS, answer, decode_requests, model_name
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

DEFAULT_TOKENS = 16  # OpenAI's


async def completions(proxy: Proxy, request: Request) -> Response:
    return await answer(proxy, request, fields.COMPLETIONS, plan)


async def plan(proxy: Proxy, parsed: RequestFields, metadata: Metadata) -> tuple[list[DecodeRequest], AnswerFormat]:
    if parsed.max_tokens is None and not parsed.as_many_as_fit:
        parsed = dataclasses.replace(parsed, max_tokens=DEFAULT_TOKENS)
    answer_format = CompletionFormat(
        await model_name(proxy, parsed, metadata),
        logprobs=parsed.logprobs,
        prompt_logprobs=parsed.shown_prompt_logprobs,
        include_usage=parsed.include_usage,
    )
    return decode_requests(dataclasses.replace(parsed, model_defaults=True)), answer_format


LOGPROBS = object_of(
    tokens=list_of(STRING),
    token_logprobs=list_of(or_null(NUMBER)),
    top_logprobs=list_of(or_null({"type": "object", "additionalProperties": NUMBER})),
    text_offset=list_of(INTEGER),
)
CHOICE = object_of(index=INTEGER, text=STRING, finish_reason=fixed("stop", "length"), logprobs=or_null(LOGPROBS))
COMPLETION = object_of(
    object=fixed("text_completion"),
    choices=list_of(with_optional(CHOICE, prompt_logprobs=PROMPT_LOGPROBS)),
    usage=ref("Usage"),
    id=STRING,
    created=INTEGER,
    model=STRING,
)
COMPLETIONS = Endpoint(
    "/v1/completions",
    completions,
    Description(
        "OpenAI's completions",
        answer=stream_content("Completion"),
        body=Body("CompletionRequest", fields.COMPLETIONS),
        about=STREAM_ABOUT,
        errors=LIMITS,
        schemas={"Completion": COMPLETION, "Usage": USAGE},
    ),
    method="POST",
)
