"""``POST /generate``: a text is continued; the short form, without OpenAI's envelope."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from protos.orchestrator_pb2 import DecodeRequest
from server.api import fields
from server.api.fields import RequestFields
from server.proxy.answer_formats import AnswerFormat, GenerateFormat
from server.proxy.answering import LIMITS, answer, decode_requests
from server.proxy.endpoint import Body, Description, Endpoint, Proxy
from server.proxy.schemas import STREAM_ABOUT, STRING, object_of, stream_content
from server.proxy.upstreams import Metadata


async def generate(proxy: Proxy, request: Request) -> Response:
    return await answer(proxy, request, fields.GENERATE, plan)


async def plan(proxy: Proxy, parsed: RequestFields, metadata: Metadata) -> tuple[list[DecodeRequest], AnswerFormat]:
    return decode_requests(parsed), GenerateFormat()


GENERATE = Endpoint(
    "/generate",
    generate,
    Description(
        "Continues a text",
        answer=stream_content("Generated"),
        body=Body("GenerateRequest", fields.GENERATE),
        about=STREAM_ABOUT,
        errors=LIMITS,
        schemas={"Generated": object_of(response=STRING)},
    ),
    method="POST",
)
