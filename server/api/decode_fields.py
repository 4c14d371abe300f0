"""A request's fields as a ``DecodeRequest``, there and back.

No model and no engine is needed, so that the proxy uses it too.
"""

from __future__ import annotations

from typing import Any

from protos import orchestrator_pb2
from server.api import fields
from server.api.fields import RequestFields

_SILENT = RequestFields()


def fields_from_proto(request: orchestrator_pb2.DecodeRequest) -> RequestFields:
    """Checks the fields of a ``DecodeRequest``: what JetStream's have as 0 or empty is absent.

    Raises:
        InvalidRequest: see `server.api.fields.parse`.
    """
    body: dict[str, Any] = {}
    for descriptor, value in request.ListFields():
        if descriptor.name in fields.GRPC:
            if descriptor.name == "logit_bias":
                value = dict(value)
            elif descriptor.name in ("stop", "stop_token_ids", "guided_choice"):
                value = list(value)
            body[descriptor.name] = value
    if request.prompt_only:
        body["max_tokens"] = request.max_tokens
    return fields.parse(body, fields.GRPC)


def fields_to_proto(parsed: RequestFields) -> orchestrator_pb2.DecodeRequest:
    """A ``DecodeRequest`` without its content. ``max_tokens`` 0 becomes ``prompt_only``."""
    request = orchestrator_pb2.DecodeRequest(
        max_tokens=parsed.max_tokens or 0,
        num_samples=parsed.n,
        logit_bias=dict(parsed.logit_bias),
        stop=parsed.stop,
        stop_token_ids=parsed.stop_token_ids,
        guided_choice=parsed.guided_choice or (),
        lora_adapter_id=parsed.lora_adapter_id or "",
    )
    for name in fields.GRPC:
        value = getattr(parsed, name, None)
        if value != getattr(_SILENT, name, None) and request.DESCRIPTOR.fields_by_name[name].has_presence:
            setattr(request, name, value)
    if parsed.max_tokens == 0:
        request.prompt_only = True
    return request
