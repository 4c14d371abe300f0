"""What an endpoint is: where it is, what it does, and what ``/openapi.json`` says of it.

``server/proxy/endpoints`` has one module for each; ``routes.py`` makes the application's routes of them, and
``openapi.py`` the description.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response

from server.api.fields import Table
from server.proxy.answer_formats import Json
from server.proxy.upstreams import Metadata, Upstreams


@dataclasses.dataclass(frozen=True)
class Body:
    """A request's body: the name of its schema, and the fields it may have."""

    name: str
    table: Table


@dataclasses.dataclass(frozen=True)
class Description:
    """What the API's description says of an endpoint beside its path.

    ``schemas`` are the components that ``answer`` names, by their names there; several endpoints may share one. Errors that
    all have (of bodies, keys and the server) are added where they belong.
    """

    summary: str
    answer: Mapping[str, Json]  # media type -> content, of status 200
    body: Body | None = None
    about: str = "The answer."
    errors: tuple[int, ...] = ()
    parameters: tuple[Json, ...] = ()
    schemas: Mapping[str, Json] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class Endpoint:
    """One endpoint. ``handler`` raises `ServerError`, which ``transport.Front`` answers.

    ``open``: no API key is asked for, which is for what says nothing of users and runs nothing of the model.
    """

    path: str  # as Starlette spells it: {name:path} is a parameter
    handler: Callable[[Proxy, Request], Awaitable[Response]]
    description: Description
    method: str = "GET"
    open: bool = False
    also: tuple[str, ...] = ()  # further paths


@dataclasses.dataclass(frozen=True, eq=False)
class Proxy:
    """What handlers work with."""

    upstreams: Upstreams
    endpoints: tuple[Endpoint, ...]


def client_metadata(request: Request) -> Metadata:
    """The client's key, for the orchestrator."""
    value = request.headers.get("authorization")
    sendable = value is not None and value.isascii() and value.isprintable()
    return (("authorization", value),) if sendable and value else ()
