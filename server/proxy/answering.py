"""Answers of the model, which endpoints that generate have in common: a body is read and checked, the endpoint's plan says what to
ask of the orchestrator and how the answer looks, and what comes back is written so, whole or as events.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from protos.orchestrator_pb2 import DecodeRequest
from server.api import decode_fields, parsing
from server.api.fields import RequestFields, Table
from server.errors import InvalidRequest, ModelNotFound, TooLarge
from server.proxy.answer_formats import AnswerFormat, Choice, Json, TotalUsage
from server.proxy.endpoint import Proxy, client_metadata
from server.proxy.generation import Generation
from server.proxy.transport import EventStream, read_json, until_disconnect
from server.proxy.upstreams import Metadata

LIMITS = (404, 429, 504)  # what may be wrong beyond a body's fields: statuses
Plan = Callable[[Proxy, RequestFields, Metadata], Awaitable[tuple[list[DecodeRequest], AnswerFormat]]]


async def answer(proxy: Proxy, request: Request, table: Table, plan: Plan) -> Response:
    """Answers a request whose body may have the fields of ``table``.

    Args:
        plan: what to ask, one request for each prompt, and the format of the answer; raises what `Decode` would, too.
    """
    metadata, upstreams = client_metadata(request), proxy.upstreams

    async def begin() -> tuple[RequestFields, AnswerFormat, Generation]:
        try:
            parsed = dataclasses.replace(parsing.parse(body, table), request_id=request.scope["preheat.request_id"])
            requests, answer_format = await plan(proxy, parsed, metadata)
        except (InvalidRequest, ModelNotFound):
            upstreams.count_invalid()  # what Decode refuses, the orchestrator counts
            raise
        try:
            return parsed, answer_format, await Generation(upstreams, requests, metadata).open()
        except InvalidRequest as error:
            raise _in_the_clients_words(error, parsed) from None

    try:
        body = await read_json(request)
    except (InvalidRequest, TooLarge):
        upstreams.count_invalid()
        raise
    parsed, answer_format, generation = await until_disconnect(request, begin())
    made = Answer(generation, answer_format, parsed)
    if parsed.stream:
        return EventStream(made.events(), close=generation.close)
    try:
        return JSONResponse(await until_disconnect(request, made.whole()))
    finally:
        await generation.close()


async def model_name(proxy: Proxy, parsed: RequestFields, metadata: Metadata) -> str:
    """The name of the model that answers: the served one's, which a request may leave out, or an adapter's."""
    card = await proxy.upstreams.model_card(metadata)
    parsing.check_model_name(parsed.model, card.name, card.adapters)
    return card.name if parsed.model is None else parsed.model


def decode_requests(parsed: RequestFields) -> list[DecodeRequest]:
    """One request per prompt."""
    requests = []
    for prompt in parsed.prompt:
        request = decode_fields.fields_to_proto(parsed)
        if isinstance(prompt, str):
            request.text_content.text = prompt
        else:
            request.token_content.token_ids.extend(prompt)
            request.want_text = True
        requests.append(request)
    return requests


class Answer:
    """One HTTP request's answer, whole or as events."""

    def __init__(self, generation: Generation, answer_format: AnswerFormat, parsed: RequestFields):
        self._generation = generation
        self._answer_format = answer_format
        self._parsed = parsed
        self._samples = parsed.n
        self._choices = [
            Choice(index, echo=parsed.echo, include_stop=parsed.include_stop) for index in range(len(generation) * parsed.n)
        ]
        self._usage = TotalUsage()

    async def _read(self) -> AsyncIterator[list[Choice]]:
        """The choices that changed, message by message."""
        try:
            async for choices in self._changed():
                yield choices
        except InvalidRequest as error:  # a grammar that led nowhere
            raise _in_the_clients_words(error, self._parsed) from None

    async def _changed(self) -> AsyncIterator[list[Choice]]:
        async for prompt, message in self._generation.messages():
            choices = self._choices[prompt * self._samples : (prompt + 1) * self._samples]
            for choice, sample in zip(choices, message.stream_content.samples, strict=True):
                if message.HasField("prompt"):
                    choice.add_prompt(message.prompt)
                choice.add(sample)
            if message.HasField("usage"):
                self._usage.add(message.usage)
            yield choices

    async def whole(self) -> Json:
        async for _ in self._read():
            pass
        return self._answer_format.whole(self._choices, self._usage)

    async def events(self) -> AsyncIterator[Json]:
        for chunk in self._answer_format.first_chunks(self._choices):
            yield chunk
        async for choices in self._read():
            for choice in choices:
                for chunk in self._answer_format.chunks(choice.take()):
                    yield chunk
        last = self._answer_format.usage_chunk(self._usage)
        if last is not None:
            yield last


def _in_the_clients_words(error: InvalidRequest, parsed: RequestFields) -> InvalidRequest:
    """Names the field that the client sent, where it has another name for the orchestrator or a guide was made of it."""
    message, named = error.message, error.param
    if named is None:
        return error
    sent = parsed.spelled.get(named, named)
    if named.startswith("guided_"):
        called = bool(parsed.tools) and parsed.tool_choice != "none"
        sent = parsed.guide_field or ("tools" if called else named)
        message = message.replace(named, sent, 1)
    elif named == "prompt" and parsed.messages:
        sent = "messages"  # of which the prompt was made
    elif named == "num_samples":
        sent = "n"
    else:
        message = message.replace(named, sent)
    made = InvalidRequest(message, param=sent)
    made.code = error.code
    return made
