"""Every error a client can be answered with, and the one table that maps them to HTTP and gRPC codes.

Raise the most specific type; its message says what was found, where, and what to do. Anything that is not a `ServerError` is a
fault of ours: it is logged with its traceback and answered as `InternalError` without it.
"""

from __future__ import annotations

import grpc


class ServerError(Exception):
    """Base of the errors that are answered to clients."""

    status = 500  # HTTP
    grpc_code = grpc.StatusCode.INTERNAL
    type = "server_error"  # OpenAI's error.type
    code: str | None = None  # OpenAI's error.code

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None):
        super().__init__(message)
        self.message = message.encode(errors="backslashreplace").decode()  # it may quote a lone surrogate, which no answer can hold
        self.param = param  # the request field at fault
        self.retry_after = retry_after  # seconds


class InvalidRequest(ServerError):
    """A field is missing, of the wrong type or out of range."""

    status = 400
    grpc_code = grpc.StatusCode.INVALID_ARGUMENT
    type = "invalid_request_error"


class Unauthenticated(ServerError):
    status = 401
    grpc_code = grpc.StatusCode.UNAUTHENTICATED
    type = "authentication_error"
    code = "invalid_api_key"


class NotFound(ServerError):
    status = 404
    grpc_code = grpc.StatusCode.NOT_FOUND
    type = "invalid_request_error"
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(ServerError):
    status = 405
    grpc_code = grpc.StatusCode.UNIMPLEMENTED
    type = "invalid_request_error"
    code = "method_not_allowed"


class TooLarge(ServerError):
    """The body or message is over our limit."""

    status = 413
    grpc_code = grpc.StatusCode.RESOURCE_EXHAUSTED
    type = "invalid_request_error"
    code = "request_too_large"


class UnsupportedEncoding(InvalidRequest):
    """The body came in a ``Content-Encoding`` that is not read here."""

    status = 415
    code = "unsupported_encoding"


class QueueFull(ServerError):
    status = 429
    grpc_code = grpc.StatusCode.RESOURCE_EXHAUSTED
    type = "rate_limit_error"
    code = "queue_full"


class Cancelled(ServerError):
    """The client went away. Nobody reads this over HTTP; 499 is nginx's code for it."""

    status = 499
    grpc_code = grpc.StatusCode.CANCELLED
    code = "cancelled"


class Unavailable(ServerError):
    """Starting, draining or dead: another server, or this one later, can answer."""

    status = 503
    grpc_code = grpc.StatusCode.UNAVAILABLE
    code = "unavailable"


class Unreachable(Unavailable):
    """Nothing came back from the server, not even why.

    ``reason``: ``unreachable``, there was no connection, so it has not got the request; ``lost``, the connection broke;
    ``silent``, it took too long.
    """

    def __init__(self, message: str, *, reason: str = "lost", param: str | None = None, retry_after: float | None = None):
        super().__init__(message, param=param, retry_after=retry_after)
        self.reason = reason


class TimedOut(ServerError):
    status = 504
    grpc_code = grpc.StatusCode.DEADLINE_EXCEEDED
    type = "timeout_error"
    code = "timeout"


class InternalError(ServerError):
    """A fault of ours."""

    code = "internal_error"


class StartError(Exception):
    """The server cannot start. The message names the file, tensor, option or port, and the remedy; no traceback is shown."""
