"""The gRPC front door: JetStream's ``Orchestrator``, our ``Preheat``, ``grpc.health.v1`` and reflection.

`GrpcServer` runs a ``grpc.aio`` server in a thread of its own. It is started first and answers from then on; until `attach` brings
the orchestrator, and until that is ready, ``Decode`` says UNAVAILABLE. A ``Decode`` call becomes a `GenerateRequest`, goes to
``Orchestrator.submit`` with a `StreamSink`, and the coroutine sends what the sink collects. When the client leaves, grpc
cancels the coroutine, which cancels the ticket.

Beside the public port the server listens on a Unix socket in a folder of this user's, ``local_address``: the proxy of the same
machine comes in there, whatever TLS the public port has. API keys are asked for on both.

Errors: the code and message are the status; its trailing metadata carries ``preheat-error``, a JSON object of ``type``, ``code``,
``param`` and ``retry_after``, from which `server.client` rebuilds the same error.
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
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos import orchestrator_pb2, orchestrator_pb2_grpc, preheat_pb2, preheat_pb2_grpc
from server import validation, wire
from server.errors import InternalError, InvalidRequest, ServerError, StartError, Unauthenticated, Unavailable
from server.metrics import Metrics
from server.request import GenerateRequest, Sink
from server.stream import MessageWriter, StreamSink
from server.tokenizers import Tokenizer
from server.tokenizers.chat import unmark
from server.validation import ModelLimits

logger = logging.getLogger(__name__)

STOP_GRACE = 1.0  # seconds that running calls get when the server is stopped
PROOF_METADATA = "preheat-proof"
RETRY_STARTING = 5.0  # seconds after which a client may try again, while the server starts
DECODE = orchestrator_pb2.DESCRIPTOR.services_by_name["Orchestrator"].full_name
PREHEAT = preheat_pb2.DESCRIPTOR.services_by_name["Preheat"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
OPEN_METHODS = frozenset(
    {f"/{DECODE}/HealthCheck"} | {f"/{PREHEAT}/{name}" for name in ("State", "Warmup", "Metrics", "CountInvalid")}
    | {f"/{HEALTH}/{name}" for name in ("Check", "List", "Watch")})


class Ticket(Protocol):
    def cancel(self) -> None: ...


class OrchestratorLike(Protocol):
    """What this door needs of `server.orchestrator.Orchestrator`."""

    state: str

    def submit(self, request: GenerateRequest, sink: Sink, *, proof: bool = False) -> Ticket: ...


@dataclasses.dataclass
class Model:
    """What is known once the model is loaded."""

    orchestrator: OrchestratorLike
    tokenizer: Tokenizer
    limits: ModelLimits


class GrpcServer:
    """See the module. `start`, `attach` once the model is there, `stop`.

    Args:
        model_name: the served model name, known from the start.
        host, port: where to listen; port 0 picks one.
        metrics: the server's metrics.
        slots: for the state.
        warmup_report: makes what ``Warmup`` answers; called in every state.
        api_keys: any of them is let in; none: everybody is.
        tls: certificate chain and private key, both PEM.
        request_timeout: seconds; a request over it ends with DEADLINE_EXCEEDED.
    """

    def __init__(
        self,
        model_name: str,
        *,
        metrics: Metrics,
        host: str = "127.0.0.1",
        port: int = 0,
        slots: int = 0,
        warmup_report: Callable[[], Mapping[str, Any]] = dict,
        api_keys: tuple[str, ...] = (),
        tls: tuple[bytes, bytes] | None = None,
        request_timeout: float | None = None,
    ):
        self.model_name = model_name
        self.metrics = metrics
        self.slots = slots
        self.warmup_report = warmup_report
        self.request_timeout = request_timeout
        self.created = int(time.time())
        self.proof_key = secrets.token_hex(16)
        self.model: Model | None = None
        self.port = port
        self.local_address = ""
        # Tokenizing and templates run here, so that a long prompt does not stop all streams.
        self.workers = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="preheat-text")
        self._host = host
        self._api_keys = api_keys
        self._tls = tls
        self._early_state = "loading"
        self._reason = ""
        self._folder: Path | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping: asyncio.Event | None = None
        self._grace = STOP_GRACE

    @property
    def state(self) -> str:
        """``loading``, ``warming``, ``ready``, ``draining`` or ``failed``."""
        if self._early_state == "failed" or self.model is None:
            return self._early_state
        return self.model.orchestrator.state

    @property
    def reason(self) -> str:
        return self._reason

    @property
    def address(self) -> str:
        """``host:port`` of the public port."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self.port}"

    def attach(self, orchestrator: OrchestratorLike, tokenizer: Tokenizer, limits: ModelLimits) -> None:
        """The model is loaded. From here on the state is the orchestrator's."""
        self.model = Model(orchestrator, tokenizer, limits)

    def fail(self, reason: str) -> None:
        """The state is ``failed`` from here on."""
        self._reason = reason
        self._early_state = "failed"

    def start(self) -> None:
        """Binds the ports and serves; returns once it does.

        Raises:
            StartError: the port is taken, or the certificate cannot be used.
        """
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._folder = Path(tempfile.mkdtemp(prefix="preheat-"))  # mode 0700
        self.local_address = f"unix:{self._folder / 'grpc.sock'}"
        self._thread = threading.Thread(target=self._run, args=(started,), name="preheat-grpc", daemon=True)
        self._thread.start()
        try:
            started.result()
        except BaseException:
            self._thread.join()
            self._clean()
            raise

    def stop(self, grace: float = STOP_GRACE) -> None:
        """Ends the server; calls still running after ``grace`` seconds are cut off."""
        if self._thread is not None and self._thread.is_alive():
            assert self._loop is not None and self._stopping is not None
            self._grace = grace
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()
        self._clean()

    def _clean(self) -> None:
        self.workers.shutdown(wait=False, cancel_futures=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, started: concurrent.futures.Future[None]) -> None:
        try:
            asyncio.run(self._serve(started))
        except BaseException as error:  # handed to start(), which raises it; later ones are seen in health
            if not started.done():
                started.set_exception(error)
            else:
                logger.exception("the gRPC server died")
                self.fail(f"the gRPC server died: {error}")

    async def _serve(self, started: concurrent.futures.Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        options = [
            ("grpc.max_receive_message_length", wire.MESSAGE_LIMIT),
            ("grpc.max_send_message_length", wire.MESSAGE_LIMIT),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", wire.KEEPALIVE_SECONDS * 500),
            ("grpc.so_reuseport", 0),  # a second server on the port is an error, not a partner
        ]
        server = grpc.aio.server(interceptors=[_ApiKeys(self._api_keys)], options=options)
        orchestrator_pb2_grpc.add_OrchestratorServicer_to_server(_Orchestrator(self), server)
        preheat_pb2_grpc.add_PreheatServicer_to_server(_Preheat(self), server)
        health_pb2_grpc.add_HealthServicer_to_server(_Health(self), server)
        reflection.enable_server_reflection((DECODE, PREHEAT, HEALTH, reflection.SERVICE_NAME), server)
        try:
            if self._tls is None:
                self.port = server.add_insecure_port(self.address)
            else:
                certificate, key = self._tls
                self.port = server.add_secure_port(self.address, grpc.ssl_server_credentials([(key, certificate)]))
        except RuntimeError:
            remedy = "check --tls-cert and --tls-key, or " if self._tls else ""
            raise StartError(
                f"--grpc-port {self.port}: cannot listen on {self.address}; {remedy}stop what uses the port, choose another, "
                "or 0 for a free one") from None
        server.add_insecure_port(self.local_address)
        await server.start()
        started.set_result(None)
        await self._stopping.wait()
        await server.stop(self._grace)


class _ApiKeys(grpc.aio.ServerInterceptor):
    """Lets in who has a key, and everybody to health, state and metrics."""

    def __init__(self, keys: tuple[str, ...]):
        self._keys = tuple(key.encode() for key in keys)

    async def intercept_service(self, continuation: Callable[..., Any], details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(details)
        if not self._keys or handler is None or details.method in OPEN_METHODS:
            return handler
        values = [value for name, value in details.invocation_metadata or () if name == "authorization"]
        if any(self._known(value) for value in values):
            return handler
        error = Unauthenticated("an API key is required: send the metadata authorization: Bearer <key>" if not values
                                else "the API key is not valid")

        async def refuse(request: Any, context: grpc.aio.ServicerContext) -> None:
            await abort(context, error)

        async def refuse_stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            await abort(context, error)
            yield  # makes it a generator

        wrap = {
            (False, False): grpc.unary_unary_rpc_method_handler, (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler, (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        return wrap(refuse_stream if handler.response_streaming else refuse, handler.request_deserializer,
                    handler.response_serializer)

    def _known(self, value: str | bytes) -> bool:
        sent = value.encode() if isinstance(value, str) else value
        if sent[:7].lower() == b"bearer ":
            sent = sent[7:].strip()
        # No early end: the time must not tell which key, nor how much of it, was right.
        return sum(hmac.compare_digest(sent, key) for key in self._keys) > 0


async def abort(context: grpc.aio.ServicerContext, error: ServerError) -> None:
    """Ends a call with an error of ours. Does not return."""
    detail = {"type": error.type, "code": error.code, "param": error.param, "retry_after": error.retry_after}
    # HTTP/2 headers are small: a message is cut rather than lost.
    await context.abort(error.grpc_code, error.message[:1500], trailing_metadata=((wire.ERROR, json.dumps(detail)),))


class _Door:
    """What the servicers share."""

    def __init__(self, server: GrpcServer):
        self._server = server

    def _loaded(self) -> Model:
        model = self._server.model
        state = self._server.state
        if state == "failed":
            raise Unavailable(f"the server has failed: {self._server.reason or 'see its log'}", retry_after=RETRY_STARTING)
        if model is None:
            raise Unavailable("the server is starting: its model is being loaded", retry_after=RETRY_STARTING)
        return model

    async def _work(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._server.workers, lambda: function(*arguments, **keywords))

    async def _fault(self, context: grpc.aio.ServicerContext) -> None:
        logger.exception("fault in a gRPC call")
        await abort(context, InternalError("internal error; the server's log has the details"))


class _Orchestrator(_Door, orchestrator_pb2_grpc.OrchestratorServicer):
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
            await abort(context, error)
        except (grpc.aio.AbortError, asyncio.CancelledError, GeneratorExit):
            raise
        except Exception:
            await self._fault(context)
        finally:
            if ticket is not None:
                ticket.cancel()

    def _is_proof(self, context: grpc.aio.ServicerContext) -> bool:
        """The warmup proof comes in as any client does, before the server is ready, by a key that only this process knows."""
        return any(name == PROOF_METADATA and hmac.compare_digest(value, self._server.proof_key)
                   for name, value in context.invocation_metadata() or ())

    async def _prepare(self, request: orchestrator_pb2.DecodeRequest, context: grpc.aio.ServicerContext, proof: bool):
        """Checks the call and makes the orchestrator's request; counts what is refused here."""
        metrics = self._server.metrics
        try:
            model = self._loaded()
            if model.orchestrator.state != "ready" and not proof:
                raise Unavailable(f"the server is {model.orchestrator.state}", retry_after=RETRY_STARTING)
        except Unavailable:
            metrics.outcome("rejected")
            raise
        try:
            parsed = wire.fields_from_proto(request)
            is_text = request.WhichOneof("content") == "text_content"
            if is_text:
                text = request.text_content.text
                validation.check_text_length(text, model.limits)
                ids = await self._work(model.tokenizer.encode, text, add_bos=not request.has_bos)
            elif request.WhichOneof("content") == "token_content":
                ids = request.token_content.token_ids
            else:
                raise InvalidRequest("prompt is required: set text_content or token_content", param="prompt")
            remaining = context.time_remaining()
            timeout = min(math.inf if limit is None else limit for limit in (remaining, self._server.request_timeout))
            built = validation.build_request(
                parsed, ids, model.limits, request_id=parsed.request_id or secrets.token_hex(8),
                detokenize=is_text or parsed.want_text or bool(parsed.stop), deadline=time.monotonic() + timeout)
        except ServerError:
            metrics.outcome("invalid")
            raise
        wire_prompt = None  # text of the echoed prompt; "" where only its log-probs are wanted
        if parsed.echo:
            wire_prompt = request.text_content.text if is_text else await self._work(model.tokenizer.decode, list(ids))
        elif built.prompt_logprobs:
            wire_prompt = ""
        writer = MessageWriter(model.tokenizer, len(built.sampling), text=is_text or parsed.want_text,
                               logprobs=parsed.logprobs, prompt_logprobs=parsed.prompt_logprobs)
        return StreamSink(asyncio.get_running_loop(), len(built.sampling)), writer, wire_prompt, built, model


class _Preheat(_Door, preheat_pb2_grpc.PreheatServicer):
    """What the proxy needs beside decoding."""

    async def State(self, request, context):  # noqa: N802
        metrics = self._server.metrics
        return preheat_pb2.StateResponse(
            state=self._server.state, reason=self._server.reason, slots=self._server.slots,
            running=_gauge(metrics.slots_used), waiting=_gauge(metrics.requests_waiting))

    async def ModelCard(self, request, context):  # noqa: N802
        card = preheat_pb2.ModelCardResponse(name=self._server.model_name, created=self._server.created)
        if (model := self._server.model) is not None:
            card.max_len = model.limits.max_len
            card.vocab_size = model.limits.vocab_size
            card.has_chat_template = model.tokenizer.chat_template is not None
        return card

    async def RenderChat(self, request, context):  # noqa: N802
        async def answer():
            model = self._loaded()
            text, ids = await self._work(
                _render_chat, model.tokenizer, _json(request.messages, "messages", list),
                _json(request.tools, "tools", list) if request.HasField("tools") else None,
                not request.HasField("add_generation_prompt") or request.add_generation_prompt,
                _json(request.template_kwargs or "{}", "chat_template_kwargs", dict))
            return preheat_pb2.RenderChatResponse(text=text, token_ids=ids)

        return await self._answer(answer, context)

    async def Tokenize(self, request, context):  # noqa: N802
        async def answer():
            model = self._loaded()
            add_bos = not request.HasField("add_bos") or request.add_bos
            ids = await self._work(model.tokenizer.encode, request.text, add_bos=add_bos)
            return preheat_pb2.TokenizeResponse(token_ids=ids)

        return await self._answer(answer, context)

    async def Detokenize(self, request, context):  # noqa: N802
        async def answer():
            model = self._loaded()
            validation.check_ids("tokens", request.token_ids, model.limits)
            return preheat_pb2.DetokenizeResponse(text=await self._work(model.tokenizer.decode, list(request.token_ids)))

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


class _Health(_Door, health_pb2_grpc.HealthServicer):
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
            statuses={name: health_pb2.HealthCheckResponse(status=self._status(name)) for name in self._services})

    async def Watch(self, request, context):  # noqa: N802
        sent = None
        while True:
            status = self._status(request.service)
            if status != sent:
                sent = status
                yield health_pb2.HealthCheckResponse(status=status)
            await asyncio.sleep(self._watch_interval)


def _render_chat(tokenizer: Tokenizer, messages: list[Any], tools: list[Any] | None, add_generation_prompt: bool,
                 variables: dict[str, Any]) -> tuple[str, list[int]]:
    if tokenizer.chat_template is None:
        raise InvalidRequest("messages cannot be rendered: the model has no chat template; use /v1/completions", param="messages")
    if not all(isinstance(message, dict) for message in messages):
        raise InvalidRequest("messages must be a list of objects", param="messages")
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in variables:
            raise InvalidRequest(f"chat_template_kwargs must not have {name}: it is a field of its own", param="chat_template_kwargs")
    text = tokenizer.chat_template.render(
        messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables)
    # The template spells the BOS token where the model wants one.
    return unmark(text), tokenizer.encode(text, add_bos=False, parse_special=True)


def _gauge(gauge: Any) -> int:
    return int(next(iter(gauge.collect())).samples[0].value)


def _json(text: str, param: str, kind: type) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{param} must be valid JSON", param=param) from None
    if not isinstance(value, kind):
        raise InvalidRequest(f"{param} must be a JSON {'list' if kind is list else 'object'}", param=param)
    return value
