"""``GET /warmup``: every program with its times and bytes, and the stages of the start."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from protos import preheat_pb2
from server.proxy.endpoint import Description, Endpoint, Proxy


async def warmup(proxy: Proxy, request: Request) -> Response:
    answer = await proxy.upstreams.call(lambda preheat: preheat.Warmup, preheat_pb2.WarmupRequest())
    return Response(answer.json, media_type="application/json")


WARMUP = Endpoint(
    "/warmup",
    warmup,
    Description("The warmup report", answer={"application/json": {"schema": {"type": "object"}}}, errors=(503,)),
    open=True,
)
