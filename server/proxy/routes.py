"""The routes of the proxy."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from protos import preheat_pb2
from protos.orchestrator_pb2 import DecodeRequest
from server.api import decode_fields, fields, parsing
from server.api.fields import RequestFields
from server.errors import InvalidRequest, ModelNotFound, ServerError, TooLarge, Unavailable
from server.proxy import openapi
from server.proxy.answer_formats import (
    AnswerFormat,
    ChatFormat,
    Choice,
    CompletionFormat,
    GenerateFormat,
    Json,
    TotalUsage,
)
from server.proxy.chat_request import chat_request
from server.proxy.metrics import merge
from server.proxy.tokenization import detokenize_answer, detokenize_requests, tokenize_answer, tokenize_request
from server.proxy.transport import EventStream, Front, error_response, http_exception, read_json, until_disconnect
from server.proxy.upstreams import RETRY_UNREACHABLE, Generation, Metadata, Upstreams
from server.text import json_schemas
from server.text.tool_forms import FORMS
from server.text.tool_forms.base import CALLS

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
PAGE = Path(__file__).with_name("page.html")


def make_app(
    addresses: Sequence[str],
    *,
    api_keys: Sequence[str] = (),
    cors_origins: Sequence[str] = (),
    ca: Path | None = None,
) -> Starlette:
    """The ASGI application.

    Args:
        addresses: of the orchestrators' gRPC ports, ``host:port`` or ``unix:path``.
        api_keys: asked of clients; whatever key a client sends is passed on to the orchestrators.
        cors_origins: whose pages browsers let read answers; ``*``: everybody's.
        ca: certificates that verify the orchestrators' TLS; `None`: no TLS.
    """
    upstreams = Upstreams(addresses, ca)
    proxy = Proxy(upstreams)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await upstreams.start()
        yield
        await upstreams.stop()

    routes = [
        Route("/generate", proxy.generate, methods=["POST"]),
        Route("/v1/completions", proxy.completions, methods=["POST"]),
        Route("/v1/chat/completions", proxy.chat, methods=["POST"]),
        Route("/v1/models", proxy.models),
        Route("/v1/models/{name:path}", proxy.model),
        Route("/tokenize", proxy.tokenize, methods=["POST"]),
        Route("/detokenize", proxy.detokenize, methods=["POST"]),
        Route("/v1/tokenize", proxy.tokenize, methods=["POST"]),
        Route("/v1/detokenize", proxy.detokenize, methods=["POST"]),
        Route("/tokenizer_info", proxy.tokenizer_info),
        Route("/health", proxy.health),
        Route("/ready", proxy.ready),
        Route("/warmup", proxy.warmup),
        Route("/metrics", proxy.metrics),
        Route("/openapi.json", proxy.openapi),
        Route("/", proxy.page),
    ]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={HTTPException: http_exception},
        middleware=[*_cors(cors_origins), Middleware(Front, api_keys=api_keys)],
    )
    app.router.redirect_slashes = False
    return app


def _cors(origins: Sequence[str]) -> list[Middleware]:
    """Outside of `Front`, so that browsers may read its errors, and preflights (which carry no key) are answered."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],  # echoes what is asked for: clients send x-stainless-* and headers of their own
            allow_private_network=True,  # a page of the Web may call a server at home
            expose_headers=["x-request-id", "retry-after"],
        )
    ]


class Proxy:
    """The endpoints. They raise `ServerError`, which `Front` answers."""

    def __init__(self, upstreams: Upstreams):
        self._upstreams = upstreams

    # Answers of the model.

    async def generate(self, request: Request) -> Response:
        return await self._answer(request, fields.GENERATE, self._plan_generate)

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, fields.COMPLETIONS, self._plan_completions)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, fields.CHAT, self._plan_chat)

    async def _answer(self, request: Request, table: fields.Table, plan: Callable[..., Any]) -> Response:
        metadata = _metadata(request)

        async def begin() -> tuple[RequestFields, AnswerFormat, Generation]:
            try:
                parsed = dataclasses.replace(parsing.parse(body, table), request_id=request.scope["preheat.request_id"])
                requests, answer_format = await plan(parsed, metadata)
            except (InvalidRequest, ModelNotFound):
                self._upstreams.count_invalid()  # what Decode refuses, the orchestrator counts
                raise
            try:
                return parsed, answer_format, await Generation(self._upstreams, requests, metadata).open()
            except InvalidRequest as error:
                raise _in_the_clients_words(error, parsed) from None

        try:
            body = await read_json(request)
        except (InvalidRequest, TooLarge):
            self._upstreams.count_invalid()
            raise
        parsed, answer_format, generation = await until_disconnect(request, begin())
        answer = Answer(generation, answer_format, parsed)
        if parsed.stream:
            return EventStream(answer.events(), close=generation.close)
        try:
            return JSONResponse(await until_disconnect(request, answer.whole()))
        finally:
            await generation.close()

    async def _plan_generate(self, parsed: RequestFields, metadata: Metadata) -> tuple[list[DecodeRequest], AnswerFormat]:
        return _decode_requests(parsed), GenerateFormat()

    async def _plan_completions(self, parsed: RequestFields, metadata: Metadata) -> tuple[list[DecodeRequest], AnswerFormat]:
        if parsed.max_tokens is None and not parsed.as_many_as_fit:
            parsed = dataclasses.replace(parsed, max_tokens=DEFAULT_COMPLETION_TOKENS)
        answer_format = CompletionFormat(
            await self._name(parsed, metadata),
            logprobs=parsed.logprobs,
            prompt_logprobs=parsed.shown_prompt_logprobs,
            include_usage=parsed.include_usage,
        )
        return _decode_requests(dataclasses.replace(parsed, model_defaults=True)), answer_format

    async def _plan_chat(self, parsed: RequestFields, metadata: Metadata) -> tuple[list[DecodeRequest], AnswerFormat]:
        name = await self._name(parsed, metadata)
        rendered = await self._upstreams.call(lambda preheat: preheat.RenderChat, chat_request(parsed), metadata)
        tools = parsed.tools if parsed.tool_choice != "none" else ()
        parsed = dataclasses.replace(parsed, prompt=(tuple(rendered.token_ids),), model_defaults=True)
        parser = None
        if tools:
            names = [tool["function"]["name"] for tool in tools]
            form = FORMS[rendered.tool_format]
            parser = functools.partial(form.parser, names, parallel=parsed.parallel_tool_calls)
            parsed = _guided_by_tools(parsed, rendered.tool_grammar)
        answer_format = ChatFormat(
            name,
            logprobs=parsed.logprobs,
            prompt_logprobs=parsed.shown_prompt_logprobs,
            include_usage=parsed.include_usage,
            parser=parser,
        )
        return _decode_requests(parsed), answer_format

    async def _name(self, parsed: RequestFields, metadata: Metadata) -> str:
        """The name of the model that answers: the served one's, which a request may leave out, or an adapter's."""
        card = await self._upstreams.call(lambda preheat: preheat.ModelCard, preheat_pb2.ModelCardRequest(), metadata)
        parsing.check_model_name(parsed.model, card.name, card.adapters)
        return card.name if parsed.model is None else parsed.model

    # The model and its tokenizer.

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": list((await self._cards(request)).values())})

    async def model(self, request: Request) -> Response:
        cards, name = await self._cards(request), request.path_params["name"]
        served, *adapters = cards
        parsing.check_model_name(name, served, adapters)
        return JSONResponse(cards[name])

    async def _cards(self, request: Request) -> dict[str, Json]:
        """The served model and its adapters, by name."""
        card = await self._upstreams.call(lambda preheat: preheat.ModelCard, preheat_pb2.ModelCardRequest(), _metadata(request))
        shared = {
            "object": "model",
            "created": card.created,
            "owned_by": "preheat",
            "max_model_len": card.max_len if card.HasField("max_len") else None,
        }
        adapters = {name: {"id": name, **shared, "parent": card.name} for name in card.adapters}
        return {card.name: {"id": card.name, **shared, "parent": None}, **adapters}

    async def tokenize(self, request: Request) -> Response:
        body = await read_json(request)
        asked, pieces = tokenize_request(body)
        answer = await self._upstreams.call(lambda preheat: preheat.Tokenize, asked, _metadata(request))
        return JSONResponse(tokenize_answer(body, answer, pieces=pieces))

    async def detokenize(self, request: Request) -> Response:
        asked, metadata = detokenize_requests(await read_json(request)), _metadata(request)
        answers = [await self._upstreams.call(lambda preheat: preheat.Detokenize, one, metadata) for one in asked]
        return JSONResponse(detokenize_answer([answer.text for answer in answers]))

    async def tokenizer_info(self, request: Request) -> Response:
        answer = await self._upstreams.call(lambda preheat: preheat.TokenizerInfo, preheat_pb2.TokenizerInfoRequest(), _metadata(request))
        return Response(answer.json, media_type="application/json")

    # State.

    async def health(self, request: Request) -> Response:
        await self._upstreams.ask_states()
        alive = next((upstream for upstream in self._upstreams.by_preference() if upstream.alive), None)
        if alive is not None:
            return JSONResponse({"status": "ok", "state": alive.state})
        dead = self._upstreams.all[0]
        error = Unavailable(
            f"the orchestrator is {dead.state}: {dead.reason or 'see its log'}", retry_after=RETRY_UNREACHABLE
        )
        return error_response(error, {"status": "dead", "state": dead.state})

    async def ready(self, request: Request) -> Response:
        await self._upstreams.ask_states()
        best = self._upstreams.by_preference()[0]
        if best.state == "ready":
            return JSONResponse({"state": "ready"})
        return error_response(
            Unavailable(f"not ready: {best.state}", retry_after=RETRY_UNREACHABLE), {"state": best.state}
        )

    async def warmup(self, request: Request) -> Response:
        answer = await self._upstreams.call(lambda preheat: preheat.Warmup, preheat_pb2.WarmupRequest())
        return Response(answer.json, media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        await self._upstreams.report_invalid()
        texts: dict[str, str] = {}
        refusal: ServerError | None = None
        for upstream in self._upstreams.all:
            try:
                answer = await upstream.client.call(lambda preheat: preheat.Metrics, preheat_pb2.MetricsRequest(), timeout=10)
                texts[upstream.client.address] = answer.text
            except ServerError as error:
                refusal = error
        if not texts:
            assert refusal is not None
            raise refusal
        return PlainTextResponse(merge(texts), media_type="text/plain; version=0.0.4")

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(openapi.document())

    async def page(self, request: Request) -> Response:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))


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


def _decode_requests(parsed: RequestFields) -> list[DecodeRequest]:
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


def _guided_by_tools(parsed: RequestFields, calls: str) -> RequestFields:
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


def _metadata(request: Request) -> Metadata:
    """The client's key, for the orchestrator."""
    value = request.headers.get("authorization")
    sendable = value is not None and value.isascii() and value.isprintable()
    return (("authorization", value),) if sendable and value else ()
