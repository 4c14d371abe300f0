"""The HTTP API's description, ``GET /openapi.json``: OpenAPI 3.1, made from the endpoints and the tables that requests are
checked by.

Request schemas and what they say come from ``server/api/fields.py`` and the checks; what depends on the model (lengths, token
ids) or on several fields at once is refused with 400 beyond what a schema can say.
"""

from __future__ import annotations

import functools
import re

from server.api import field_types
from server.proxy.answer_formats import Json
from server.proxy.endpoint import Body, Endpoint
from server.proxy.schemas import ERROR, json_content, or_null

VERSION = "1"  # of the API


def request_schema(body: Body) -> Json:
    """A request body. `null` is the same as absent; fields that are not named are ignored."""
    properties = {}
    for name, field in body.table.items():
        schema = dict(field_types.schema_of(field.check))
        properties[name] = {**(schema if field.required else or_null(schema)), "description": field.about}
    required = [name for name, field in body.table.items() if field.required]
    return {"type": "object", "required": required, "properties": properties}


_ERRORS = {
    400: "The request is not valid; param names the field.",
    401: "An API key is required.",
    404: "Another model is served.",
    413: "The body is too large, as sent or as decompressed.",
    415: "The body's Content-Encoding is neither gzip nor deflate.",
    429: "The queue is full; Retry-After says when to return.",
    500: "A fault of the server.",
    503: "Starting, draining or dead; Retry-After says when to return.",
    504: "The request took longer than --request-timeout.",
}
_OF_BODIES = (400, 413, 415)
_BEHIND_THE_KEY = (401, 500, 503)


@functools.cache
def document(endpoints: tuple[Endpoint, ...]) -> Json:
    """The description of these endpoints.

    Raises `ValueError` where two describe a component of one name differently.
    """
    paths: Json = {}
    schemas: Json = {}
    for endpoint in endpoints:
        description = endpoint.description
        components: Json = dict(description.schemas)
        if description.body is not None:
            components[description.body.name] = request_schema(description.body)
        for name, schema in components.items():
            if schemas.setdefault(name, schema) != schema:
                raise ValueError(f"{endpoint.path} describes {name} otherwise than another endpoint does")
        for path in (endpoint.path, *endpoint.also):
            paths.setdefault(_openapi_path(path), {})[endpoint.method.lower()] = _operation(endpoint, path)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Preheat",
            "version": VERSION,
            "description": "An inference server for large language models on JAX. Every answer has the header "
            "x-request-id: the one that was sent, or a new one.",
        },
        "security": [{"bearer": []}, {}],
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": ERROR},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _openapi_path(path: str) -> str:
    """{name:path} of Starlette's is {name}."""
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", path)


def _operation(endpoint: Endpoint, path: str) -> Json:
    """The endpoint at one of its paths."""
    description, body = endpoint.description, endpoint.description.body
    operation: Json = {"summary": description.summary}
    if body is not None:
        identifier = body.name.removesuffix("Request").lower()
        operation["operationId"] = identifier if path == endpoint.path else f"{path.split('/')[1]}-{identifier}"
        operation["requestBody"] = {"required": True, "content": json_content(body.name)}
    errors = {*description.errors, *(_OF_BODIES if body is not None else ()), *(() if endpoint.open else _BEHIND_THE_KEY)}
    refusals = {str(status): {"description": _ERRORS[status], "content": json_content("Error")} for status in sorted(errors)}
    operation["responses"] = {"200": {"description": description.about, "content": description.answer}} | refusals
    if endpoint.open:
        operation["security"] = []
    if description.parameters:
        operation["parameters"] = list(description.parameters)
    return operation
