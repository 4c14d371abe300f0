"""``GET /health`` and ``GET /ready``: whether the best of the orchestrators lives, and whether it answers."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.errors import Unavailable
from server.proxy.endpoint import Description, Endpoint, Proxy
from server.proxy.schemas import STRING, fixed, json_content, object_of
from server.proxy.transport import error_response
from server.proxy.upstreams import RETRY_UNREACHABLE


async def health(proxy: Proxy, request: Request) -> Response:
    upstreams = proxy.upstreams
    await upstreams.ask_states()
    alive = next((upstream for upstream in upstreams.by_preference() if upstream.alive), None)
    if alive is not None:
        return JSONResponse({"status": "ok", "state": alive.state})
    dead = upstreams.all[0]
    error = Unavailable(f"the orchestrator is {dead.state}: {dead.reason or 'see its log'}", retry_after=RETRY_UNREACHABLE)
    return error_response(error, {"status": "dead", "state": dead.state})


async def ready(proxy: Proxy, request: Request) -> Response:
    await proxy.upstreams.ask_states()
    best = proxy.upstreams.by_preference()[0]
    if best.state == "ready":
        return JSONResponse({"state": "ready"})
    return error_response(Unavailable(f"not ready: {best.state}", retry_after=RETRY_UNREACHABLE), {"state": best.state})


HEALTH = Endpoint(
    "/health",
    health,
    Description(
        "Whether the server can serve or is still starting",
        answer=json_content("Health"),
        errors=(503,),
        schemas={"Health": object_of(status=fixed("ok"), state=STRING)},
    ),
    open=True,
)
READY = Endpoint(
    "/ready",
    ready,
    Description(
        "Whether requests are answered now",
        answer=json_content("Ready"),
        errors=(503,),
        schemas={"Ready": object_of(state=fixed("ready"))},
    ),
    open=True,
)
