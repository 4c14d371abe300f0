"""The transport side of the proxy: bodies in, answers and events out, errors in their envelope, clients that leave.

`Front` is the outermost layer: it gives each request its id, asks for the API key, and turns whatever is raised into
the error envelope. `read_json` reads a body within limits. `until_disconnect` runs work for as long as the client is
there.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import secrets
import sys
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api import field_types
from server.errors import (
    Cancelled,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    ServerError,
    TooLarge,
    Unauthenticated,
    UnsupportedEncoding,
)
from server.proxy.answer_formats import Json, error_body

logger = logging.getLogger(__name__)

BODY_LIMIT = 16 * 2**20  # bytes, as sent and as decompressed
ENCODINGS = ("gzip", "deflate")  # of bodies
MAX_DEPTH = 64  # of nested lists and objects
Result = TypeVar("Result")


class Front:
    """See the module. ``api_keys``: any of them is let in; none: everybody is, as to ``open_paths``."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], open_paths: frozenset[str]):
        self._app = app
        self._keys = tuple(key.encode() for key in api_keys)
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(reversed(scope["headers"]))
        identifier = _request_id(headers.get(b"x-request-id"))
        scope["preheat.request_id"] = identifier
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", identifier.encode())]
            await send(message)

        try:
            if self._keys and scope["path"] not in self._open_paths:
                self._check_key(headers.get(b"authorization"))
            await self._app(scope, receive, send_with_id)
        except ServerError as error:
            if started:
                raise
            await error_response(error)(scope, receive, send_with_id)
        except Exception:
            logger.exception("fault in request %s", identifier)
            if not started:
                await error_response(InternalError("internal error; the proxy's log has the details"))(
                    scope, receive, send_with_id
                )

    def _check_key(self, value: bytes | None) -> None:
        if value is None:
            raise Unauthenticated("an API key is required: send the header Authorization: Bearer <key>")
        scheme, _, sent = value.partition(b" ")
        # No early end: the time must not tell which key, nor how much of it, was right.
        known = sum(hmac.compare_digest(sent.strip(), key) for key in self._keys) > 0
        if scheme.lower() != b"bearer" or not known:
            raise Unauthenticated("the API key is not valid")


def _request_id(sent: bytes | None) -> str:
    """The client's own id where it is fit to be logged, else a new one."""
    if sent is not None:
        try:
            return field_types.request_id(sent.decode("ascii"))
        except ValueError:
            pass
    return secrets.token_hex(8)


def error_json(error: ServerError) -> Json:
    return error_body(error.message, error.type, error.code, error.param)


def error_response(error: ServerError, extra: Json | None = None) -> Response:
    headers = {}
    if error.retry_after is not None or error.status in (429, 503):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after or 1)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, UnsupportedEncoding):
        headers["accept-encoding"] = ", ".join(ENCODINGS)
    return JSONResponse({**(extra or {}), **error_json(error)}, status_code=error.status, headers=headers)


async def http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405, in our envelope."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        response = error_response(MethodNotAllowed(f"{request.method} is not allowed for {request.url.path}"))
    elif error.status_code == 404:
        response = error_response(NotFound(f"there is no {request.url.path!a}"))
    else:
        response = error_response(InvalidRequest(error.detail))
        response.status_code = error.status_code
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


async def read_json(request: Request) -> Json:
    """The body, a JSON object.

    Raises:
        TooLarge: it is over `BODY_LIMIT`, as sent or as decompressed.
        UnsupportedEncoding: its ``Content-Encoding`` is none of `ENCODINGS`.
        InvalidRequest: it is not a JSON object in UTF-8, nested too deeply, or cannot be decompressed.
    """
    encoding = _encoding(request.headers.getlist("content-encoding"))
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) < 19 and int(declared) > BODY_LIMIT:
        raise TooLarge(f"the body has {int(declared)} bytes; the limit is {BODY_LIMIT}")
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > BODY_LIMIT:
                raise TooLarge(f"the body is over the limit of {BODY_LIMIT} bytes")
    except ClientDisconnect:
        raise Cancelled("the client left") from None
    return parse_json(bytes(body) if encoding is None else decompress(bytes(body), encoding))


def _encoding(headers: Sequence[str]) -> str | None:
    """The one coding of a body; `None`: it is as it is."""
    spelled = [coding.strip() for header in headers for coding in header.split(",")]
    codings = [coding for coding in spelled if coding and coding.lower() != "identity"]
    if not codings:
        return None
    name = codings[0].lower().removeprefix("x-")  # RFC 9110 8.4.1.3: x-gzip is gzip
    if len(codings) > 1 or name not in ENCODINGS:
        shown = field_types.shown(", ".join(codings))
        raise UnsupportedEncoding(
            f"Content-Encoding {shown} is not read here: send the body as it is, or in one of {', '.join(ENCODINGS)}"
        )
    return name


def decompress(body: bytes, encoding: str) -> bytes:
    """A body as it was before ``encoding``, one of `ENCODINGS`. Takes at most `BODY_LIMIT` bytes of memory beside it.

    Raises:
        TooLarge: it would be over `BODY_LIMIT`; what is beyond is never made.
        InvalidRequest: it is not that encoding, cut short, or followed by something else.
    """
    window = zlib.MAX_WBITS
    if encoding == "gzip":
        window |= 16
    elif not (len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2]) % 31 == 0):
        window = -window  # without the header of RFC 1950: what some clients call deflate
    inflater = zlib.decompressobj(window)
    try:
        plain = inflater.decompress(body, BODY_LIMIT + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the body is not valid {encoding}, as Content-Encoding says: {error}") from None
    if len(plain) > BODY_LIMIT:
        raise TooLarge(f"the body, decompressed ({encoding}), is over the limit of {BODY_LIMIT} bytes")
    if not inflater.eof:
        raise InvalidRequest(f"the body is not valid {encoding}, as Content-Encoding says: it ends early")
    if inflater.unused_data:
        extra = len(inflater.unused_data)
        raise InvalidRequest(f"the body is not valid {encoding}, as Content-Encoding says: {extra} bytes follow its end")
    return plain


def parse_json(body: bytes) -> Json:
    """See `read_json`."""
    if not body.strip():
        raise InvalidRequest("the body is empty; a JSON object is expected")
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: byte {error.start} is not valid") from None
    except RecursionError:
        raise InvalidRequest(f"the body is nested more than {MAX_DEPTH} deep") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {str(error)[:200]}") from None
    except ValueError:  # of int()
        raise InvalidRequest(f"the body has an integer of more than {sys.get_int_max_str_digits()} digits") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    if not field_types.within_depth(value, MAX_DEPTH):
        raise InvalidRequest(f"the body is nested more than {MAX_DEPTH} deep")
    return value


def _no_constant(name: str) -> None:
    raise InvalidRequest(f"the body is not valid JSON: {name} is not a JSON number")


async def until_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Runs ``work``; cancels it and raises `Cancelled` when the client leaves first. The body must have been read."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("the client left")
        return task.result()
    finally:
        left.cancel()
        task.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. An error while they are made is an event of its own; ``[DONE]`` ends every stream.

    ``close`` is awaited at the end, also when the client leaves. What can fail with a status must have been done
    before.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[Json], *, close: Callable[[], Awaitable[None]]):
        self._events = events
        self._close = close
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send, scope.get("preheat.request_id", "")))
        left = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({sending, left}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            left.cancel()
            sending.cancel()
            await asyncio.gather(sending, left, return_exceptions=True)
            await self._close()

    async def _send(self, send: Send, identifier: str) -> None:
        async def event(data: str) -> None:
            await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for item in self._events:
                await event(dumps(item))
        except ServerError as error:
            await event(dumps(error_json(error)))
        except Exception:
            logger.exception("fault in the stream of request %s", identifier)
            await event(dumps(error_json(InternalError("internal error; the proxy's log has the details"))))
        await event("[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


# `json.dumps` would make an encoder for each event.
dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
