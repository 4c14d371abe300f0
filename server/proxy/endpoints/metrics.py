"""``GET /metrics``: Prometheus' text of all orchestrators that answer."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from protos import preheat_pb2
from server.errors import ServerError
from server.proxy.endpoint import Description, Endpoint, Proxy
from server.proxy.metrics import merge
from server.proxy.schemas import STRING


async def metrics(proxy: Proxy, request: Request) -> Response:
    await proxy.upstreams.report_invalid()
    texts: dict[str, str] = {}
    refusal: ServerError | None = None
    for upstream in proxy.upstreams.all:
        try:
            answer = await upstream.client.call(lambda preheat: preheat.Metrics, preheat_pb2.MetricsRequest(), timeout=10)
            texts[upstream.client.address] = answer.text
        except ServerError as error:
            refusal = error
    if not texts:
        assert refusal is not None
        raise refusal
    return PlainTextResponse(merge(texts), media_type="text/plain; version=0.0.4")


METRICS = Endpoint(
    "/metrics",
    metrics,
    Description("Prometheus metrics", answer={"text/plain": {"schema": STRING}}, errors=(503,)),
    open=True,
)
