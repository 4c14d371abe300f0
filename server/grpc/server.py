"""The gRPC front door: JetStream's ``Orchestrator``, our ``Preheat``, ``grpc.health.v1`` and reflection.

`GrpcServer` runs a ``grpc.aio`` server in a thread of its own. It is started first and answers from then on; until
`attach` brings the orchestrator, and until that is ready, ``Decode`` says UNAVAILABLE. What the calls do is in
``server/grpc/decode.py``, ``preheat.py`` and ``health.py``.

Beside the public port the server listens on a Unix socket in a folder of this user's, ``local_address``: the proxy of
the same machine comes in there, whatever TLS the public port has. API keys are asked for on both.

Errors: the code and message are the status; its trailing metadata carries ``preheat-error``, a JSON object of ``type``,
``code``, ``param`` and ``retry_after``, from which `server.client` rebuilds the same error.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hmac
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos import conventions, orchestrator_pb2_grpc, preheat_pb2_grpc
from server.errors import StartError, Unauthenticated
from server.grpc.decode import OrchestratorService
from server.grpc.door import DECODE, HEALTH, PREHEAT, PROOF_METADATA, Model, OrchestratorLike, abort
from server.grpc.health import HealthService
from server.grpc.preheat import PreheatService
from server.grpc.private_folder import PrivateFolder
from server.grpc.streams import Waker
from server.orchestrator.validation import ModelLimits
from server.telemetry.metrics import Metrics
from server.text.tokenizers import Tokenizer

__all__ = ["PROOF_METADATA", "GrpcServer"]

logger = logging.getLogger(__name__)

STOP_GRACE = 1.0  # seconds that running calls get when the server is stopped
LONGEST_SOCKET = 107 if sys.platform == "linux" else 103  # bytes of a socket's path: sun_path without its NUL
OPEN_METHODS = frozenset(
    {f"/{DECODE}/HealthCheck"}
    | {f"/{PREHEAT}/{name}" for name in ("State", "Warmup", "Metrics", "CountInvalid")}
    | {f"/{HEALTH}/{name}" for name in ("Check", "List", "Watch")}
)


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
        fault_hook: for tests: called as ("tokenize", text) where a prompt is tokenized; what it raises is a fault of
            that request.
        on_death: called when the thread of this server has died.
    """

    def __init__(
        self,
        model_name: str,
        *,
        metrics: Metrics,
        host: str = "127.0.0.1",
        port: int = 0,
        slots: int = 0,
        warmup_report: Callable[[], Mapping[str, object]] = dict,
        api_keys: tuple[str, ...] = (),
        tls: tuple[bytes, bytes] | None = None,
        request_timeout: float | None = None,
        fault_hook: Callable[[str, str], None] | None = None,
        on_death: Callable[[BaseException], None] | None = None,
    ):
        self.model_name = model_name
        self.metrics = metrics
        self.slots = slots
        self.warmup_report = warmup_report
        self.request_timeout = request_timeout
        self.fault_hook = fault_hook
        self.on_death: Callable[[BaseException], None] = on_death or (lambda error: None)
        self.created = int(time.time())
        self.proof_key = secrets.token_hex(16)
        self.model: Model | None = None
        self.port = port
        self.local_address = ""
        # Tokenizing and templates run here, so that a long prompt does not stop all streams.
        self.workers = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="preheat-text")
        # Grammars of structured output are compiled here, one at a time: they may take seconds.
        self.grammar_worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="preheat-grammar")
        self._host = host
        self._api_keys = api_keys
        self._tls = tls
        self._early_state = "loading"
        self._reason = ""
        self._folder: PrivateFolder | None = None
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

    def attach(
        self, orchestrator: OrchestratorLike, tokenizer: Tokenizer, limits: ModelLimits, tool_format: str | None = None
    ) -> None:
        """The model is loaded. From here on the state is the orchestrator's. ``tool_format`` is the form in which tools
        are called, where it is not for the chat template to say."""
        self.model = Model.make(orchestrator, tokenizer, limits, tool_format)

    def prepare_guides(self) -> None:
        """Gets ready for structured output, in the background."""
        if self.model is not None:
            self.grammar_worker.submit(self.model.guides.prepare)

    def fail(self, reason: str) -> None:
        """The state is ``failed`` from here on."""
        self._reason = reason
        self._early_state = "failed"

    def start(self) -> None:
        """Binds the ports and serves; returns once it does.

        Raises:
            StartError: the port is taken, the certificate cannot be used, or the temporary directory cannot.
        """
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        try:
            self._folder = PrivateFolder()
        except OSError as error:
            raise StartError(f"the temporary directory cannot be used ({error}); set TMPDIR to one that can") from None
        path = str(self._folder.path / "grpc.sock")
        if (length := len(os.fsencode(path))) > LONGEST_SOCKET:
            self._clean()
            raise StartError(
                f"the path of a socket, {path}, has {length} bytes, and the system allows {LONGEST_SOCKET}; set TMPDIR to a shorter one"
            )
        self.local_address = f"unix:{path}"
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
        for executor in (self.workers, self.grammar_worker):
            executor.shutdown(wait=False, cancel_futures=True)
        self.remove_folder()

    def remove_folder(self) -> None:
        """Removes the folder of the local address; for a process that is about to end without `stop`."""
        if self._folder is not None:
            self._folder.remove()

    def _run(self, started: concurrent.futures.Future[None]) -> None:
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(self._serve(started))
        except BaseException as error:  # handed to start(), which raises it; later ones are seen in health
            if not started.done():
                started.set_exception(error)
            else:
                logger.exception("the gRPC server died")
                self.fail(f"the gRPC server died: {error}")
                self.on_death(error)

    async def _serve(self, started: concurrent.futures.Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self.waker = Waker(self._loop)
        self._stopping = asyncio.Event()
        options = [
            ("grpc.max_receive_message_length", conventions.MESSAGE_LIMIT),
            ("grpc.max_send_message_length", conventions.MESSAGE_LIMIT),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", conventions.KEEPALIVE_SECONDS * 500),
            ("grpc.so_reuseport", 0),  # a second server on the port is an error, not a partner
        ]
        server = grpc.aio.server(interceptors=[_ApiKeys(self._api_keys)], options=options)
        orchestrator_pb2_grpc.add_OrchestratorServicer_to_server(OrchestratorService(self), server)
        preheat_pb2_grpc.add_PreheatServicer_to_server(PreheatService(self), server)
        health_pb2_grpc.add_HealthServicer_to_server(HealthService(self), server)
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
                f"--grpc-port {self.port}: cannot listen on {self.address}; {remedy}stop what uses the port, choose "
                "another, or 0 for a free one"
            ) from None
        server.add_insecure_port(self.local_address)
        await server.start()
        started.set_result(None)
        await self._stopping.wait()
        await server.stop(self._grace)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop, where there is one: a message then costs this thread three quarters of the time."""
    try:
        import uvloop
    except ImportError:  # Windows
        return None
    return uvloop.new_event_loop


if TYPE_CHECKING:  # generic for the type checker only
    _Interceptor = grpc.aio.ServerInterceptor[Message, Message]
    _Handler = grpc.RpcMethodHandler[Message, Message]
    _Context = grpc.aio.ServicerContext[Message, Message]
else:
    _Interceptor = grpc.aio.ServerInterceptor


class _ApiKeys(_Interceptor):
    """Lets in who has a key, and everybody to health, state and metrics."""

    def __init__(self, keys: tuple[str, ...]):
        self._keys = tuple(key.encode() for key in keys)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        details = handler_call_details
        handler = await continuation(details)
        if not self._keys or handler is None or details.method in OPEN_METHODS:
            return handler
        values = [value for name, value in details.invocation_metadata or () if name == "authorization"]
        if any(self._known(value) for value in values):
            return handler
        error = Unauthenticated(
            "an API key is required: send the metadata authorization: Bearer <key>"
            if not values
            else "the API key is not valid"
        )

        async def refuse(request: Message, context: _Context) -> None:
            await abort(context, error)

        async def refuse_stream(request: Message, context: _Context) -> AsyncIterator[Message]:
            await abort(context, error)
            yield  # makes it a generator

        wrap = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        return wrap(
            refuse_stream if handler.response_streaming else refuse,
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _known(self, value: str | bytes) -> bool:
        sent = value.encode() if isinstance(value, str) else value
        if sent[:7].lower() == b"bearer ":
            sent = sent[7:].strip()
        # No early end: the time must not tell which key, nor how much of it, was right.
        return sum(hmac.compare_digest(sent, key) for key in self._keys) > 0
