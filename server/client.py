"""A small client for the gRPC port, synchronous (`Client`) and asynchronous (`AsyncClient`).

>>> with Client("127.0.0.1:9000") as client:
...     print(client.generate("The capital of France is", max_tokens=8).text)
...     for piece in client.stream("Once upon a time", max_tokens=64, temperature=0.8, seed=1):
...         print(piece.text, end="")

Options are the sampling fields of the HTTP API, by the same names, and what else ``server/api/fields.py`` describes for gRPC. Failures
are raised as the types of `server.errors`, whatever they were on the wire.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc

from protos import conventions, orchestrator_pb2_grpc, preheat_pb2, preheat_pb2_grpc
from protos.orchestrator_pb2 import DecodeRequest, DecodeResponse
from server import errors
from server.api.decode_fields import named_fields

if TYPE_CHECKING:
    from protos.preheat_pb2_grpc import PreheatAsyncStub

Request = TypeVar("Request")
Response = TypeVar("Response")

_OPTIONS = [
    ("grpc.max_receive_message_length", conventions.MESSAGE_LIMIT),
    ("grpc.max_send_message_length", conventions.MESSAGE_LIMIT),
    ("grpc.keepalive_time_ms", conventions.KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.enable_http_proxy", 0),  # a proxy in the environment is for the web
    # A server that starts is reached soon after it listens, not after a backoff of minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
_TYPES = {
    error.grpc_code: error
    for error in (
        errors.InternalError,
        errors.InvalidRequest,
        errors.Unauthenticated,
        errors.NotFound,
        errors.MethodNotAllowed,
        errors.TooLarge,
        errors.Cancelled,
        errors.Unavailable,
        errors.TimedOut,
    )
}
_CODES = {error.code: error for error in (errors.QueueFull, errors.ModelNotFound, errors.TooLarge)}


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a stream brings for the first sample."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None


@dataclasses.dataclass(frozen=True)
class Completion:
    """A whole answer (of the first sample)."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str  # "stop" or "length"
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


def decode_request(prompt: str | Sequence[int], *, max_tokens: int = 0, n: int = 1, **options: Any) -> DecodeRequest:
    """A request for a prompt: text (tokenized by the server) or token ids (used as they are, text comes back too).

    Args:
        prompt: text or token ids.
        max_tokens: of each sample; 0: as many as fit.
        n: samples.
        options: fields of ``DecodeRequest`` from number 20, such as ``temperature``, ``seed``, ``stop``.

    Raises:
        ValueError: ``DecodeRequest`` has no such field. Values are checked by the server.
    """
    request = DecodeRequest(max_tokens=max_tokens, num_samples=n, **named_fields(options))
    if isinstance(prompt, str):
        request.text_content.text = prompt
    else:
        request.token_content.token_ids.extend(prompt)
        request.want_text = True
    return request


def error_from_rpc(error: grpc.RpcError) -> errors.ServerError:
    """The error of ours that a failed call stands for."""
    code, message = error.code(), error.details() or error.code().name
    # Pairs, whatever their type stubs say.
    trailing = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    metadata = dict(trailing)
    try:
        detail = json.loads(metadata.get(conventions.ERROR, "{}"))
    except ValueError:
        detail = {}
    kind = _CODES.get(detail.get("code")) or _TYPES.get(code, errors.InternalError)
    if kind is errors.Unavailable and not detail:  # the server says why; this is gRPC's own
        kind = errors.Unreachable
    made = kind(message, param=detail.get("param"), retry_after=detail.get("retry_after"))
    if detail:
        made.code, made.type = detail.get("code"), detail.get("type", made.type)
    return made


def _credentials(ca: Path | None) -> grpc.ChannelCredentials | None:
    return None if ca is None else grpc.ssl_channel_credentials(ca.read_bytes())


def _metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def _piece(message: DecodeResponse) -> Piece:
    sample = message.stream_content.samples[0]
    return Piece(
        sample.text, tuple(sample.token_ids), sample.finish_reason if sample.HasField("finish_reason") else None
    )


class _Collector:
    """Puts the messages of a stream together."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._usage = DecodeResponse.Usage()

    def add(self, message: DecodeResponse) -> None:
        self._pieces.append(_piece(message))
        if message.HasField("usage"):
            self._usage = message.usage

    def completion(self) -> Completion:
        return Completion(
            text="".join(piece.text for piece in self._pieces),
            token_ids=tuple(token for piece in self._pieces for token in piece.token_ids),
            finish_reason=next((piece.finish_reason for piece in self._pieces if piece.finish_reason), ""),
            prompt_tokens=self._usage.prompt_tokens,
            completion_tokens=self._usage.completion_tokens,
            cached_tokens=self._usage.cached_tokens,
        )


class Client:
    """Synchronous. ``address`` is ``host:port``; ``ca`` holds the certificates (PEM) that verify the server's TLS."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        ca: Path | None = None,
        timeout: float | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ):
        credentials = _credentials(ca)
        self.channel = (
            grpc.insecure_channel(address, _OPTIONS)
            if credentials is None
            else grpc.secure_channel(address, credentials, _OPTIONS)
        )
        self.orchestrator = orchestrator_pb2_grpc.OrchestratorStub(self.channel)
        self.preheat = preheat_pb2_grpc.PreheatStub(self.channel)
        self._metadata = (*_metadata(api_key), *metadata)
        self._timeout = timeout  # seconds, of each call

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.channel.close()

    def decode(self, request: DecodeRequest) -> Generator[DecodeResponse, None, None]:
        """The messages of one request. Closing the iterator cancels the request."""
        call = self.orchestrator.Decode(request, timeout=self._timeout, metadata=self._metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None
        finally:
            call.cancel()

    def stream(self, prompt: str | Sequence[int], **options: Any) -> Iterator[Piece]:
        """Generates piece by piece; options as for `decode_request`."""
        for message in self.decode(decode_request(prompt, **options)):
            yield _piece(message)

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Completion:
        """Generates and waits for all of it; options as for `decode_request`."""
        collector = _Collector()
        for message in self.decode(decode_request(prompt, **options)):
            collector.add(message)
        return collector.completion()

    def call(self, method: grpc.UnaryUnaryMultiCallable[Request, Response], request: Request) -> Response:
        """Calls a method of the stub ``preheat``, such as ``client.preheat.State``."""
        try:
            return method(request, timeout=self._timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None

    def state(self) -> preheat_pb2.StateResponse:
        return self.call(self.preheat.State, preheat_pb2.StateRequest())

    def tokenize(self, text: str, **options: Any) -> list[int]:
        """Token ids; options are fields of ``TokenizeRequest``, such as ``add_bos``."""
        return list(self.call(self.preheat.Tokenize, preheat_pb2.TokenizeRequest(text=text, **options)).token_ids)

    def detokenize(self, token_ids: Sequence[int], **options: Any) -> str:
        """The text of token ids; options are fields of ``DetokenizeRequest``."""
        return self.call(self.preheat.Detokenize, preheat_pb2.DetokenizeRequest(token_ids=token_ids, **options)).text


class DecodeCall:
    """A request that was accepted: iterate over its messages, or `cancel` it."""

    def __init__(self, call: grpc.aio.UnaryStreamCall[DecodeRequest, DecodeResponse]):
        self._call = call

    async def __aiter__(self) -> AsyncIterator[DecodeResponse]:
        try:
            while isinstance(message := await self._read(), DecodeResponse):  # else it is grpc's EOF
                yield message
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None

    async def _read(self) -> DecodeResponse | object:
        """The next message. A read of gRPC that is cancelled itself loses some native memory, 250 bytes each time; so
        whoever leaves cancels the call, which ends the read."""
        read = asyncio.ensure_future(self._call.read())
        try:
            return await asyncio.shield(read)
        except asyncio.CancelledError:
            self._call.cancel()
            read.add_done_callback(_nobody_waits)
            raise

    def cancel(self) -> None:
        """Cancels the request, if it is not over."""
        self._call.cancel()


def _nobody_waits(read: asyncio.Future[DecodeResponse | object]) -> None:
    if not read.cancelled():
        read.exception()  # looked at, so that it is not reported as forgotten


class AsyncClient:
    """Asynchronous; made and used in one event loop. Arguments as `Client`; ``server_name`` is the name that the server's
    certificate is for, where ``address`` is not by that name."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        ca: Path | None = None,
        timeout: float | None = None,
        server_name: str | None = None,
    ):
        credentials = _credentials(ca)
        self.address = address
        options: list[tuple[str, Any]] = list(_OPTIONS)
        if server_name is not None:
            options += [("grpc.ssl_target_name_override", server_name), ("grpc.default_authority", server_name)]
        self.channel = (
            grpc.aio.insecure_channel(address, options)
            if credentials is None
            else grpc.aio.secure_channel(address, credentials, options)
        )
        self.orchestrator = orchestrator_pb2_grpc.OrchestratorStub(self.channel)
        self.preheat = preheat_pb2_grpc.PreheatStub(self.channel)
        self._metadata = _metadata(api_key)
        self._timeout = timeout

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self.channel.close(None)

    async def connect(self, timeout: float) -> bool:
        """Whether there is a connection; waits for one that is being made, so many seconds. A call made without one fails
        before anything is sent.

        Raises:
            Unreachable: it took too long.
        """
        states, state = grpc.ChannelConnectivity, self.channel.get_state(try_to_connect=True)
        try:
            async with asyncio.timeout(timeout):
                while state in (states.IDLE, states.CONNECTING):
                    await self.channel.wait_for_state_change(state)
                    state = self.channel.get_state(try_to_connect=True)
        except TimeoutError:
            raise errors.Unreachable(f"no connection to {self.address} within {timeout:g} s", reason="unreachable") from None
        return bool(state == states.READY)

    async def start(self, request: DecodeRequest, *, metadata: Sequence[tuple[str, str]] | None = None) -> DecodeCall:
        """Sends a request and waits until it is queued; raises what it is refused with. The call must be read or
        cancelled."""
        call = self.orchestrator.Decode(
            request, timeout=self._timeout, metadata=self._metadata if metadata is None else tuple(metadata)
        )
        try:
            if conventions.ACCEPTED not in dict(await call.initial_metadata()):
                async for _ in call:  # raises what the call ended with
                    pass
                raise errors.InternalError("the server ended the request without accepting or refusing it")
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None
        except asyncio.CancelledError:
            call.cancel()
            raise
        return DecodeCall(call)

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeResponse, None]:
        """The messages of one request. Closing the iterator, or cancelling who iterates, cancels the request."""
        call = await self.start(request)
        try:
            async for message in call:
                yield message
        finally:
            call.cancel()

    async def stream(self, prompt: str | Sequence[int], **options: Any) -> AsyncIterator[Piece]:
        """Generates piece by piece; options as for `decode_request`."""
        async for message in self.decode(decode_request(prompt, **options)):
            yield _piece(message)

    async def generate(self, prompt: str | Sequence[int], **options: Any) -> Completion:
        """Generates and waits for all of it; options as for `decode_request`."""
        collector = _Collector()
        async for message in self.decode(decode_request(prompt, **options)):
            collector.add(message)
        return collector.completion()

    async def call(
        self,
        method: Callable[[PreheatAsyncStub], grpc.aio.UnaryUnaryMultiCallable[Request, Response]],
        request: Request,
        *,
        timeout: float | None = None,
        metadata: Sequence[tuple[str, str]] | None = None,
    ) -> Response:
        """Calls a method of the ``preheat.v1.Preheat`` service, such as ``lambda preheat: preheat.State``."""
        try:
            return await method(self.preheat)(
                request,
                timeout=timeout or self._timeout,
                metadata=self._metadata if metadata is None else tuple(metadata),
            )
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None
