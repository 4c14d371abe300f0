"""A request's fields as a ``DecodeRequest``, there and back, by the descriptions of ``server/api/fields.py``.

No model and no engine is needed, so that the proxy and clients use it too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from protos.orchestrator_pb2 import DecodeRequest
from server.api import fields, parsing
from server.api.fields import RequestFields

_SILENT = RequestFields()
_KINDS = {name: description.wire.kind for name, description in fields.DESCRIPTIONS.items() if description.wire}
# name in the proto -> how a value of protobuf becomes what a client's JSON would have
_PLAIN: dict[str, Callable[[Any], Any]] = {
    name: dict if _KINDS[field.target].startswith("map") else list if _KINDS[field.target].startswith("repeated") else lambda value: value
    for name, field in fields.GRPC.items()
}


def fields_from_proto(request: DecodeRequest) -> RequestFields:
    """Checks the fields of a ``DecodeRequest``: what JetStream's have as 0 or empty is absent.

    Raises:
        InvalidRequest: see `server.api.parsing.parse`.
    """
    body = {field.name: _PLAIN[field.name](value) for field, value in request.ListFields() if field.name in _PLAIN}
    if request.prompt_only:
        body["max_tokens"] = request.max_tokens
    return parsing.parse(body, fields.GRPC)


def fields_to_proto(parsed: RequestFields) -> DecodeRequest:
    """A ``DecodeRequest`` without its content. ``max_tokens`` 0 becomes ``prompt_only``."""
    values = {
        name: _PLAIN[name](value)
        for name, field in fields.GRPC.items()
        if (value := getattr(parsed, field.target)) != getattr(_SILENT, field.target)
    }
    request = DecodeRequest(**{"num_samples": parsed.n, **values})
    if parsed.max_tokens == 0:
        request.prompt_only = True
    return request


def named_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``DecodeRequest`` from a client's options: one text stands for a list of it, whose characters it else would be."""
    return {name: [value] if _PLAIN.get(name) is list and isinstance(value, str) else value for name, value in options.items()}
