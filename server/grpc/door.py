"""What the gRPC services share: the loaded model, the state they answer by, and how a call ends with an error."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from typing import NoReturn, ParamSpec, Protocol, TypeVar

import grpc
from grpc_health.v1 import health_pb2

from protos import conventions, orchestrator_pb2, preheat_pb2
from server.errors import InternalError, ServerError, Unavailable
from server.grpc.streams import Waker
from server.orchestrator.request import GenerateRequest, Sink
from server.orchestrator.validation import ModelLimits
from server.telemetry.metrics import Metrics
from server.text.guided import Guides
from server.text.tokenizers import Tokenizer
from server.text.tool_forms import control_markers
from server.text.tool_use import ToolUse

Request = TypeVar("Request")
Response = TypeVar("Response")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

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

    @property
    def state(self) -> str: ...

    @property
    def load(self) -> tuple[int, int]: ...

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
    """What the services need of `server.grpc.server.GrpcServer`, where these are explained."""

    model_name: str
    created: int
    slots: int
    metrics: Metrics
    model: Model | None
    request_timeout: float | None
    proof_key: str
    fault_hook: Callable[[str, str], None] | None
    warmup_report: Callable[[], Mapping[str, object]]
    workers: concurrent.futures.ThreadPoolExecutor
    grammar_worker: concurrent.futures.ThreadPoolExecutor
    waker: Waker

    @property
    def state(self) -> str: ...

    @property
    def reason(self) -> str: ...


async def abort(context: grpc.aio.ServicerContext[Request, Response], error: ServerError) -> NoReturn:
    """Ends a call with an error of ours. Does not return."""
    detail = {"type": error.type, "code": error.code, "param": error.param, "retry_after": error.retry_after}
    # HTTP/2 headers are small: a message is cut rather than lost.
    await context.abort(error.grpc_code, error.message[:1500], trailing_metadata=((conventions.ERROR, json.dumps(detail)),))


class Door:
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

    async def _work(
        self, function: Callable[Arguments, Result], *arguments: Arguments.args, **keywords: Arguments.kwargs
    ) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._server.workers, lambda: function(*arguments, **keywords))

    async def _fault(self, context: grpc.aio.ServicerContext[Request, Response]) -> NoReturn:
        logger.exception("fault in a gRPC call")
        await abort(context, InternalError("internal error; the server's log has the details"))
