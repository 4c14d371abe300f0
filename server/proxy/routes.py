"""The application of the proxy: every endpoint at its paths, `Front` around them, CORS around that."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from server.proxy.endpoint import Proxy
from server.proxy.endpoints import ENDPOINTS
from server.proxy.transport import Front, http_exception
from server.proxy.upstreams import Balancing, Upstreams


def make_app(
    addresses: Sequence[str],
    *,
    api_keys: Sequence[str] = (),
    cors_origins: Sequence[str] = (),
    ca: Path | None = None,
    balancing: Balancing | None = None,
) -> Starlette:
    """The ASGI application.

    Args:
        addresses: of the orchestrators' gRPC ports, ``host:port``, ``unix:path`` or ``dns:host:port``.
        api_keys: asked of clients; whatever key a client sends is passed on to the orchestrators.
        cors_origins: whose pages browsers let read answers; ``*``: everybody's.
        ca: certificates that verify the orchestrators' TLS; `None`: no TLS.
        balancing: how requests are spread over several.
    """
    upstreams = Upstreams(addresses, ca, balancing)
    proxy = Proxy(upstreams, ENDPOINTS)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await upstreams.start()
        yield
        await upstreams.stop()

    routes = [
        Route(path, functools.partial(endpoint.handler, proxy), methods=[endpoint.method])
        for endpoint in proxy.endpoints
        for path in (endpoint.path, *endpoint.also)
    ]
    open_paths = frozenset(path for endpoint in proxy.endpoints if endpoint.open for path in (endpoint.path, *endpoint.also))
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={HTTPException: http_exception},
        middleware=[*_cors(cors_origins), Middleware(Front, api_keys=api_keys, open_paths=open_paths)],
    )
    app.router.redirect_slashes = False
    return app


def _cors(origins: Sequence[str]) -> list[Middleware]:
    """Outside of `Front`, so that browsers may read its errors, and preflights (which carry no key) are answered."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],  # echoes what is asked for: clients send x-stainless-* and headers of their own
            allow_private_network=True,  # a page of the Web may call a server at home
            expose_headers=["x-request-id", "retry-after"],
        )
    ]
