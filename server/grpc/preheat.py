"""Our ``preheat.v1.Preheat``: what the proxy needs beside decoding."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import grpc
from prometheus_client import Gauge

from protos import preheat_pb2, preheat_pb2_grpc
from server.api.parsing import check_model_name
from server.errors import ServerError
from server.grpc.chat_rendering import render_chat
from server.grpc.door import Door, Model, Request, Response, abort
from server.orchestrator import validation


class PreheatService(Door, preheat_pb2_grpc.PreheatServicer):
    """What the proxy needs beside decoding."""

    async def State(
        self, request: preheat_pb2.StateRequest, context: grpc.aio.ServicerContext[preheat_pb2.StateRequest, preheat_pb2.StateResponse]
    ) -> preheat_pb2.StateResponse:
        metrics, model = self._server.metrics, self._server.model
        return preheat_pb2.StateResponse(
            capacity=None if model is None else model.orchestrator.load[1],
            state=self._server.state,
            reason=self._server.reason,
            slots=self._server.slots,
            running=_gauge(metrics.slots_used),
            waiting=_gauge(metrics.requests_waiting),
            kv_pages=_gauge(metrics.kv_pages_total),
        )

    async def ModelCard(
        self,
        request: preheat_pb2.ModelCardRequest,
        context: grpc.aio.ServicerContext[preheat_pb2.ModelCardRequest, preheat_pb2.ModelCardResponse],
    ) -> preheat_pb2.ModelCardResponse:
        card = preheat_pb2.ModelCardResponse(name=self._server.model_name, created=self._server.created)
        if (model := self._server.model) is not None:
            card.max_len = model.limits.max_len
            card.vocab_size = model.limits.vocab_size
            card.has_chat_template = model.tokenizer.chat_template is not None
            card.adapters.extend(model.limits.adapters)
        return card

    async def RenderChat(
        self,
        request: preheat_pb2.RenderChatRequest,
        context: grpc.aio.ServicerContext[preheat_pb2.RenderChatRequest, preheat_pb2.RenderChatResponse],
    ) -> preheat_pb2.RenderChatResponse:
        async def answer() -> preheat_pb2.RenderChatResponse:
            model = self._loaded()
            return await self._work(render_chat, model.tokenizer, model.tool_use, request)

        return await self._answer(answer, context)

    async def Tokenize(
        self,
        request: preheat_pb2.TokenizeRequest,
        context: grpc.aio.ServicerContext[preheat_pb2.TokenizeRequest, preheat_pb2.TokenizeResponse],
    ) -> preheat_pb2.TokenizeResponse:
        async def answer() -> preheat_pb2.TokenizeResponse:
            model = self._loaded()
            if request.HasField("model"):
                check_model_name(request.model, model.limits.name, model.limits.adapters)
            return await self._work(_tokenize, model, request)

        return await self._answer(answer, context)

    async def Detokenize(
        self,
        request: preheat_pb2.DetokenizeRequest,
        context: grpc.aio.ServicerContext[preheat_pb2.DetokenizeRequest, preheat_pb2.DetokenizeResponse],
    ) -> preheat_pb2.DetokenizeResponse:
        async def answer() -> preheat_pb2.DetokenizeResponse:
            model = self._loaded()
            if request.HasField("model"):
                check_model_name(request.model, model.limits.name, model.limits.adapters)
            validation.check_ids("tokens", request.token_ids, model.limits)
            skip_special = not request.HasField("skip_special_tokens") or request.skip_special_tokens
            ids = list(request.token_ids)
            text = await self._work(model.tokenizer.decode, ids, skip_special=skip_special)
            return preheat_pb2.DetokenizeResponse(text=text)

        return await self._answer(answer, context)

    async def TokenizerInfo(
        self,
        request: preheat_pb2.TokenizerInfoRequest,
        context: grpc.aio.ServicerContext[preheat_pb2.TokenizerInfoRequest, preheat_pb2.TokenizerInfoResponse],
    ) -> preheat_pb2.TokenizerInfoResponse:
        async def answer() -> preheat_pb2.TokenizerInfoResponse:
            tokenizer = self._loaded().tokenizer
            templates = {} if tokenizer.chat_template is None else tokenizer.chat_template.sources
            info = dict(tokenizer.info)
            if "default" in templates:
                info["chat_template"] = templates["default"]
            if len(templates) > 1:
                info["chat_templates"] = dict(templates)
            return preheat_pb2.TokenizerInfoResponse(json=json.dumps(info))

        return await self._answer(answer, context)

    async def Warmup(
        self, request: preheat_pb2.WarmupRequest, context: grpc.aio.ServicerContext[preheat_pb2.WarmupRequest, preheat_pb2.WarmupResponse]
    ) -> preheat_pb2.WarmupResponse:
        return preheat_pb2.WarmupResponse(json=json.dumps(dict(self._server.warmup_report())))

    async def Metrics(
        self,
        request: preheat_pb2.MetricsRequest,
        context: grpc.aio.ServicerContext[preheat_pb2.MetricsRequest, preheat_pb2.MetricsResponse],
    ) -> preheat_pb2.MetricsResponse:
        return preheat_pb2.MetricsResponse(text=self._server.metrics.render())

    async def CountInvalid(
        self,
        request: preheat_pb2.CountInvalidRequest,
        context: grpc.aio.ServicerContext[preheat_pb2.CountInvalidRequest, preheat_pb2.CountInvalidResponse],
    ) -> preheat_pb2.CountInvalidResponse:
        self._server.metrics.requests.labels(outcome="invalid").inc(max(0, request.count))
        return preheat_pb2.CountInvalidResponse()

    async def _answer(
        self, answer: Callable[[], Awaitable[Response]], context: grpc.aio.ServicerContext[Request, Response]
    ) -> Response:
        try:
            return await answer()
        except ServerError as error:
            await abort(context, error)
        except Exception:
            await self._fault(context)


def _tokenize(model: Model, request: preheat_pb2.TokenizeRequest) -> preheat_pb2.TokenizeResponse:
    tokenizer = model.tokenizer
    if request.HasField("chat"):
        ids = list(render_chat(tokenizer, model.tool_use, request.chat).token_ids)
    else:
        ids = tokenizer.encode(
            request.text,
            add_bos=not request.HasField("add_bos") or request.add_bos,
            parse_special=not request.HasField("parse_special") or request.parse_special,
        )
    answer = preheat_pb2.TokenizeResponse(token_ids=ids, max_len=model.limits.max_len)
    if request.describe:
        answer.tokens.extend(
            preheat_pb2.TokenizeResponse.Token(piece=tokenizer.token_piece(id), raw=tokenizer.token_bytes(id))
            for id in ids
        )
    return answer


def _gauge(gauge: Gauge) -> int:
    return int(next(iter(gauge.collect())).samples[0].value)
