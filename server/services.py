"""The gRPC services: what each call does. ``server/grpc_service.py`` is the server that they run in.

A ``Decode`` call becomes a `GenerateRequest`, goes to ``Orchestrator.submit`` with a `StreamSink`, and the coroutine
sends what the sink collects. When the client leaves, grpc cancels the coroutine, which cancels the ticket. What is
refused before it reaches the orchestrator is counted here; the orchestrator counts the rest.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import hmac
import json
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import orchestrator_pb2, orchestrator_pb2_grpc, preheat_pb2, preheat_pb2_grpc
from server import checks, fields, validation, wire
from server.chat_rendering import render_chat
from server.errors import InternalError, InvalidRequest, ServerError, Unavailable
from server.fields import RequestFields, check_model_name
from server.guided import Guide, Guides
from server.live_request import log_outcome
from server.metrics import Metrics, Outcome
from server.request import GenerateRequest, Sink
from server.stream import MessageWriter, StreamSink, Waker
from server.tokenizers import Tokenizer
from server.tool_forms import control_markers
from server.tool_use import ToolUse
from server.validation import ModelLimits

logger = logging.getLogger(__name__)

PROOF_METADATA = "preheat-proof"  # with the server's `proof_key`: a request of the warmup proof
RETRY_STARTING = 5.0  # seconds after which a client may try again, while the server starts
DECODE = orchestrator_pb2.DESCRIPTOR.services_by_name["Orchestrator"].full_name
PREHEAT = preheat_pb2.DESCRIPTOR.services_by_name["Preheat"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class Ticket(Protocol):
    def cancel(self) -> None: ...


class OrchestratorLike(Protocol):
    """What this door needs of `server.orchestrator.Orchestrator`."""

    state: str
    load: tuple[int, int]

    def submit(self, request: GenerateRequest, sink: Sink, *, proof: bool = False) -> Ticket: ...


@dataclasses.dataclass
class Model:
    """What is known once the model is loaded."""

    orchestrator: OrchestratorLike
    tokenizer: Tokenizer
    limits: ModelLimits
    guides: Guides
    tool_use: ToolUse | None  # None: it has no chat template
    tool_markers: frozenset[int]  # control tokens that mark a tool call

    @classmethod
    def make(
        cls, orchestrator: OrchestratorLike, tokenizer: Tokenizer, limits: ModelLimits, tool_format: str | None = None
    ) -> Model:
        guides = Guides(tokenizer, limits.eos_token_ids, limits.vocab_size)
        markers = frozenset(control_markers(tokenizer).values())
        return cls(orchestrator, tokenizer, limits, guides, ToolUse.of(tokenizer, tool_format), markers)


class Server(Protocol):
    """What the services need of `server.grpc_service.GrpcServer`, where these are explained."""

    model_name: str
    created: int
    slots: int
    metrics: Metrics
    model: Model | None
    request_timeout: float | None
    proof_key: str
    fault_hook: Callable[[str, str], None] | None
    warmup_report: Callable[[], Mapping[str, Any]]
    workers: concurrent.futures.ThreadPoolExecutor
    grammar_worker: concurrent.futures.ThreadPoolExecutor
    waker: Waker

    @property
    def state(self) -> str: ...

    @property
    def reason(self) -> str: ...


async def abort(context: grpc.aio.ServicerContext, error: ServerError) -> None:
    """Ends a call with an error of ours. Does not return."""
    detail = {"type": error.type, "code": error.code, "param": error.param, "retry_after": error.retry_after}
    # HTTP/2 headers are small: a message is cut rather than lost.
    await context.abort(error.grpc_code, error.message[:1500], trailing_metadata=((wire.ERROR, json.dumps(detail)),))


class _Door:
    """What the servicers share."""

    def __init__(self, server: Server):
        self._server = server

    def _loaded(self) -> Model:
        model = self._server.model
        state = self._server.state
        if state == "failed":
            raise Unavailable(
                f"the server has failed: {self._server.reason or 'see its log'}", retry_after=RETRY_STARTING
            )
        if model is None:
            raise Unavailable("the server is starting: its model is being loaded", retry_after=RETRY_STARTING)
        return model

    async def _work(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._server.workers, lambda: function(*arguments, **keywords))

    async def _fault(self, context: grpc.aio.ServicerContext) -> None:
        logger.exception("fault in a gRPC call")
        await abort(context, InternalError("internal error; the server's log has the details"))


class OrchestratorService(_Door, orchestrator_pb2_grpc.OrchestratorServicer):
    """JetStream's service."""

    async def HealthCheck(self, request, context):  # noqa: N802 (the proto's name)
        return orchestrator_pb2.HealthCheckResponse(is_live=self._server.state != "failed")

    async def Decode(self, request, context):  # noqa: N802
        ticket: Ticket | None = None
        try:
            proof = self._is_proof(context)
            sink, writer, wire_prompt, built, model = await self._prepare(request, context, proof)
            ticket = model.orchestrator.submit(built, sink, proof=proof)
            await context.send_initial_metadata(((wire.ACCEPTED, "1"),))
            echoed = wire_prompt is None  # nothing to bring back
            while True:
                await sink.ready()
                prompt_logprobs, pending, usage, error = sink.take()
                if not echoed and (prompt_logprobs is not None or not built.prompt_logprobs):
                    echoed = True
                    for message in writer.prompt(built.prompt, wire_prompt or None, prompt_logprobs):
                        yield message
                for message in writer.deltas(pending, usage):
                    yield message
                if error is not None:
                    raise error
                if usage is not None:
                    ticket = None
                    return
        except ServerError as error:
            if error.param == "n":
                error.param = "num_samples"  # what this API calls it
            await abort(context, error)
        except (grpc.aio.AbortError, asyncio.CancelledError, GeneratorExit):
            raise
        except Exception:
            await self._fault(context)
        finally:
            if ticket is not None:
                ticket.cancel()

    def _is_proof(self, context: grpc.aio.ServicerContext) -> bool:
        """The warmup proof comes in as any client does, before the server is ready, by a key that only this process
        knows."""
        return any(
            name == PROOF_METADATA and hmac.compare_digest(value, self._server.proof_key)
            for name, value in context.invocation_metadata() or ()
        )

    async def _prepare(self, request: orchestrator_pb2.DecodeRequest, context: grpc.aio.ServicerContext, proof: bool):
        """Checks the call and makes the orchestrator's request; counts what is refused here."""
        try:
            model = self._loaded()
            if model.orchestrator.state != "ready" and not proof:
                raise Unavailable(f"the server is {model.orchestrator.state}", retry_after=RETRY_STARTING)
        except Unavailable as error:
            self._refused(request, "rejected", error)
            raise
        try:
            parsed = wire.fields_from_proto(request)
            is_text = request.WhichOneof("content") == "text_content"
            if is_text:
                text = request.text_content.text
                validation.check_text_length(text, model.limits)
                add_bos = parsed.add_special_tokens is not False and not request.has_bos
                ids = await self._work(self._encode, model.tokenizer, text, add_bos, parsed.parse_special)
            elif request.WhichOneof("content") == "token_content":
                ids = request.token_content.token_ids
            else:
                raise InvalidRequest("prompt is required: set text_content or token_content", param="prompt")
            remaining = context.time_remaining()
            timeout = min(math.inf if limit is None else limit for limit in (remaining, self._server.request_timeout))
            built = validation.build_request(
                parsed,
                ids,
                model.limits,
                request_id=parsed.request_id or secrets.token_hex(8),
                detokenize=is_text or parsed.want_text or bool(parsed.stop),
                deadline=time.monotonic() + timeout,
            )
            built = dataclasses.replace(
                built,
                guide=await self._guide(model, parsed),
                shown_special=_shown_special(model, parsed),
            )
        except ServerError as error:
            self._refused(request, "invalid", error)
            raise
        except asyncio.CancelledError:
            self._refused(request, "cancelled", "the client left before its request was queued")
            raise
        except Exception:
            self._refused(request, "error", "a fault in reading the request")
            raise
        wire_prompt = None  # text of the echoed prompt; "" where only its log-probs are wanted
        if parsed.echo:
            wire_prompt = (
                request.text_content.text
                if is_text
                else await self._work(model.tokenizer.decode, list(ids), skip_special=parsed.skip_special_tokens)
            )
        elif built.prompt_logprobs:
            wire_prompt = ""
        writer = MessageWriter(
            model.tokenizer,
            built,
            echoed=wire_prompt or "",
            prompt=request.text_content.text if is_text else None,
            text=is_text or parsed.want_text,
            logprobs=parsed.logprobs,
            prompt_logprobs=parsed.prompt_logprobs,
        )
        return StreamSink(self._server.waker, len(built.sampling)), writer, wire_prompt, built, model


    async def _guide(self, model: Model, parsed: RequestFields) -> Guide | None:
        """Compiled before the request is queued, in a thread of its own, so that a heavy one delays other such only."""
        for name in fields.GUIDED:
            if (value := getattr(parsed, name)) is not None:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._server.grammar_worker, model.guides.compile, name, value)
        return None

    def _encode(self, tokenizer: Tokenizer, text: str, add_bos: bool, parse_special: bool) -> list[int]:
        if self._server.fault_hook is not None:
            self._server.fault_hook("tokenize", text)
        return tokenizer.encode(text, add_bos=add_bos, parse_special=parse_special)

    def _refused(self, request: orchestrator_pb2.DecodeRequest, outcome: Outcome, error: ServerError | str) -> None:
        """Counts and logs a request that does not reach the orchestrator."""
        self._server.metrics.outcome(outcome)
        try:
            identifier = checks.request_id(request.request_id)
        except ValueError:
            identifier = "-"
        log_outcome(identifier, outcome, error=error if isinstance(error, str) else error.message)


class PreheatService(_Door, preheat_pb2_grpc.PreheatServicer):
    """What the proxy needs beside decoding."""

    async def State(self, request, context):  # noqa: N802
        metrics, model = self._server.metrics, self._server.model
        return preheat_pb2.StateResponse(
            capacity=None if model is None else model.orchestrator.load[1],
            state=self._server.state,
            reason=self._server.reason,
            slots=self._server.slots,
            running=_gauge(metrics.slots_used),
            waiting=_gauge(metrics.requests_waiting),
        )

    async def ModelCard(self, request, context):  # noqa: N802
        card = preheat_pb2.ModelCardResponse(name=self._server.model_name, created=self._server.created)
        if (model := self._server.model) is not None:
            card.max_len = model.limits.max_len
            card.vocab_size = model.limits.vocab_size
            card.has_chat_template = model.tokenizer.chat_template is not None
            card.adapters.extend(model.limits.adapters)
        return card

    async def RenderChat(self, request, context):  # noqa: N802
        async def answer():
            model = self._loaded()
            return await self._work(render_chat, model.tokenizer, model.tool_use, request)

        return await self._answer(answer, context)

    async def Tokenize(self, request, context):  # noqa: N802
        async def answer():
            model = self._loaded()
            if request.HasField("model"):
                check_model_name(request.model, model.limits.name, model.limits.adapters)
            return await self._work(_tokenize, model, request)

        return await self._answer(answer, context)

    async def Detokenize(self, request, context):  # noqa: N802
        async def answer():
            model = self._loaded()
            if request.HasField("model"):
                check_model_name(request.model, model.limits.name, model.limits.adapters)
            validation.check_ids("tokens", request.token_ids, model.limits)
            skip_special = not request.HasField("skip_special_tokens") or request.skip_special_tokens
            ids = list(request.token_ids)
            text = await self._work(model.tokenizer.decode, ids, skip_special=skip_special)
            return preheat_pb2.DetokenizeResponse(text=text)

        return await self._answer(answer, context)

    async def TokenizerInfo(self, request, context):  # noqa: N802
        async def answer():
            tokenizer = self._loaded().tokenizer
            templates = {} if tokenizer.chat_template is None else tokenizer.chat_template.sources
            info = dict(tokenizer.info)
            if "default" in templates:
                info["chat_template"] = templates["default"]
            if len(templates) > 1:
                info["chat_templates"] = dict(templates)
            return preheat_pb2.TokenizerInfoResponse(json=json.dumps(info))

        return await self._answer(answer, context)

    async def Warmup(self, request, context):  # noqa: N802
        return preheat_pb2.WarmupResponse(json=json.dumps(dict(self._server.warmup_report())))

    async def Metrics(self, request, context):  # noqa: N802
        return preheat_pb2.MetricsResponse(text=self._server.metrics.render())

    async def CountInvalid(self, request, context):  # noqa: N802
        self._server.metrics.requests.labels(outcome="invalid").inc(max(0, request.count))
        return preheat_pb2.CountInvalidResponse()

    async def _answer(self, answer: Callable[[], Any], context: grpc.aio.ServicerContext) -> Any:
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


class HealthService(_Door, health_pb2_grpc.HealthServicer):
    """``grpc.health.v1``: SERVING while requests are accepted, overall and for each service."""

    _services = ("", DECODE, PREHEAT, HEALTH)
    _watch_interval = 0.2  # seconds between looks at the state

    def _status(self, service: str) -> int:
        statuses = health_pb2.HealthCheckResponse
        if service not in self._services:
            return statuses.SERVICE_UNKNOWN
        return statuses.SERVING if self._server.state == "ready" else statuses.NOT_SERVING

    async def Check(self, request, context):  # noqa: N802
        status = self._status(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, request, context):  # noqa: N802
        return health_pb2.HealthListResponse(
            statuses={name: health_pb2.HealthCheckResponse(status=self._status(name)) for name in self._services}
        )

    async def Watch(self, request, context):  # noqa: N802
        sent = None
        while True:
            status = self._status(request.service)
            if status != sent:
                sent = status
                yield health_pb2.HealthCheckResponse(status=status)
            await asyncio.sleep(self._watch_interval)


def _shown_special(model: Model, parsed: RequestFields) -> frozenset[int]:
    """The control tokens that the answer's text shows."""
    if not parsed.skip_special_tokens:
        return model.tokenizer.special_ids
    return model.tool_markers if parsed.show_tool_markers else frozenset()


def _gauge(gauge: Any) -> int:
    return int(next(iter(gauge.collect())).samples[0].value)
