"""``GET /metrics``: Prometheus' text of all orchestrators that answer, and of the proxy where there are several."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from server.proxy.endpoint import Description, Endpoint, Proxy
from server.proxy.metrics import merge, own
from server.proxy.schemas import STRING


async def metrics(proxy: Proxy, request: Request) -> Response:
    await proxy.upstreams.report_invalid()
    upstreams = proxy.upstreams
    text = merge(await upstreams.metrics(), labelled=upstreams.several)
    if upstreams.several:
        text += own(upstreams.all)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


METRICS = Endpoint(
    "/metrics",
    metrics,
    Description("Prometheus metrics", answer={"text/plain": {"schema": STRING}}, errors=(503,)),
    open=True,
)
