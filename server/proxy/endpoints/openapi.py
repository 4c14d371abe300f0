"""``GET /openapi.json``: the description of all endpoints."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.proxy.endpoint import Description, Endpoint, Proxy
from server.proxy.openapi import document


async def openapi(proxy: Proxy, request: Request) -> Response:
    return JSONResponse(document(proxy.endpoints))


OPENAPI = Endpoint(
    "/openapi.json",
    openapi,
    Description("This description", answer={"application/json": {"schema": {"type": "object"}}}),
    open=True,
)
