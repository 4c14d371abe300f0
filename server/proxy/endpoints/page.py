"""``GET /``: a page for people."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from server.proxy.endpoint import Description, Endpoint, Proxy
from server.proxy.schemas import STRING

FILE = Path(__file__).with_name("page.html")


async def page(proxy: Proxy, request: Request) -> Response:
    return HTMLResponse(FILE.read_text(encoding="utf-8"))


PAGE = Endpoint("/", page, Description("A page for people", answer={"text/html": {"schema": STRING}}), open=True)
