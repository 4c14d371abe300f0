"""The HTTP API's description, ``GET /openapi.json``: OpenAPI 3.1, made from the tables that requests are checked by.

Request schemas and what they say come from ``server/api/fields.py`` and the checks; what depends on the model (lengths, token ids) or on
several fields at once is refused with 400 beyond what a schema can say.
"""

from __future__ import annotations

import functools
from typing import Any

from server.api import field_types, fields
from server.api.fields import Table

Json = dict[str, Any]

VERSION = "1"  # of the API

_NUMBER_OR_NULL: Json = {"anyOf": [{"type": "number"}, {"type": "null"}]}
_STRING_OR_NULL: Json = {"anyOf": [{"type": "string"}, {"type": "null"}]}


def _object(**properties: Json) -> Json:
    """An object of which everything named is there."""
    return {"type": "object", "required": list(properties), "properties": properties}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _reasons(*more: str) -> Json:
    return {"type": "string", "enum": ["stop", "length", *more]}


def _schemas() -> Json:
    string, integer = {"type": "string"}, {"type": "integer"}
    token = _object(token=string, logprob={"type": "number"}, bytes=_list(integer))
    function = _object(name=string, arguments=string)
    call = _object(id=string, type={"type": "string", "enum": ["function"]}, function=function)
    message = _object(role={"type": "string", "enum": ["assistant"]}, content=_STRING_OR_NULL)
    message["properties"]["tool_calls"] = _list(call)
    envelope = {"id": string, "created": integer, "model": string}
    completion = _object(
        index=integer,
        text=string,
        finish_reason=_reasons(),
        logprobs=_or_null(
            _object(
                tokens=_list(string),
                token_logprobs=_list(_NUMBER_OR_NULL),
                top_logprobs=_list(_or_null({"type": "object", "additionalProperties": {"type": "number"}})),
                text_offset=_list(integer),
            )
        ),
    )
    prompt_logprobs = _or_null(_list(_or_null({"type": "object"})))
    completion["properties"]["prompt_logprobs"] = prompt_logprobs
    chat = _object(
        index=integer,
        message=message,
        finish_reason=_reasons("tool_calls"),
        logprobs=_or_null(
            _object(content=_list({**token, "properties": token["properties"] | {"top_logprobs": _list(token)}}))
        ),
    )
    chat_completion = _object(
        object={"type": "string", "enum": ["chat.completion"]}, choices=_list(chat), usage=_ref("Usage"), **envelope
    )
    chat_completion["properties"]["prompt_logprobs"] = prompt_logprobs
    return {
        "GenerateRequest": _request(fields.GENERATE),
        "CompletionRequest": _request(fields.COMPLETIONS),
        "ChatRequest": _request(fields.CHAT),
        "TokenizeRequest": _request(fields.TOKENIZE),
        "DetokenizeRequest": _request(fields.DETOKENIZE),
        "Generated": _object(response=string),
        "Completion": _object(
            object={"type": "string", "enum": ["text_completion"]},
            choices=_list(completion),
            usage=_ref("Usage"),
            **envelope,
        ),
        "ChatCompletion": chat_completion,
        "Usage": _object(
            prompt_tokens=integer,
            completion_tokens=integer,
            total_tokens=integer,
            prompt_tokens_details=_object(cached_tokens=integer),
        ),
        "Model": _object(
            id=string,
            object={"type": "string", "enum": ["model"]},
            created=integer,
            owned_by=string,
            max_model_len=_or_null(integer),
            parent=_or_null(string),  # the served model, of an adapter
        ),
        "Models": _object(object={"type": "string", "enum": ["list"]}, data=_list(_ref("Model"))),
        "Tokens": _tokens(),
        "Text": _object(text=string, prompt=string, content=string),
        "TokenizerInfo": _object(tokenizer_class=string),  # and more, as in a tokenizer_config.json
        "Health": _object(status={"type": "string", "enum": ["ok"]}, state=string),
        "Ready": _object(state={"type": "string", "enum": ["ready"]}),
        "Error": _object(
            error=_object(message=string, type=string, code=_STRING_OR_NULL, param=_STRING_OR_NULL),
        ),
    }


def _tokens() -> Json:
    integer: Json = {"type": "integer"}
    piece = _object(id=integer, piece={"anyOf": [{"type": "string"}, _list(integer)]})
    tokens = _object(tokens=_list({"anyOf": [integer, piece]}), count=integer, max_model_len=integer)
    tokens["properties"]["token_strs"] = _list({"type": "string"})
    return tokens


def _request(table: Table) -> Json:
    """A request body. `null` is the same as absent; fields that are not named are ignored."""
    properties = {}
    for name, field in table.items():
        schema = dict(field_types.schema_of(field.check))
        properties[name] = {**(schema if field.required else _or_null(schema)), "description": field.about}
    required = [name for name, field in table.items() if field.required]
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
_OF_ALL = (401, 500, 503)


def _answers(schema: str, *errors: int, stream: bool = False) -> Json:
    content: Json = {"application/json": {"schema": _ref(schema)}}
    if stream:
        content["text/event-stream"] = {}  # what a schema would describe, an event or the whole, is left open before 3.2
    about = "The answer; with stream, as events." if stream else "The answer."
    answers: Json = {"200": {"description": about, "content": content}}
    for status in sorted(errors):
        answers[str(status)] = {
            "description": _ERRORS[status],
            "content": {"application/json": {"schema": _ref("Error")}},
        }
    return answers


def _post(summary: str, request: str, answer: str, *errors: int, stream: bool = False) -> Json:
    return {
        "post": {
            "summary": summary,
            "operationId": request.removesuffix("Request").lower(),
            "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(request)}}},
            "responses": _answers(answer, 400, 413, 415, *_OF_ALL, *errors, stream=stream),
        }
    }


def _as_v1(methods: Json) -> Json:
    """The same under another path."""
    return {"post": methods["post"] | {"operationId": "v1-" + methods["post"]["operationId"]}}


def _get(summary: str, responses: Json, *, open: bool = True, parameters: list[Json] | None = None) -> Json:
    operation: Json = {"summary": summary, "responses": responses}
    if open:
        operation["security"] = []
    if parameters:
        operation["parameters"] = parameters
    return {"get": operation}


def _plain(media: str, schema: Json | None = None, *errors: int) -> Json:
    content = {media: {"schema": schema or {"type": "string"}}}
    answers: Json = {"200": {"description": "The answer.", "content": content}}
    return answers | {key: value for key, value in _answers("Error", *errors).items() if key != "200"}


@functools.cache
def document() -> Json:
    """The description of all routes."""
    limits = (404, 429, 504)
    name: Json = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    tokenize = _post("Token ids of a text or a conversation", "TokenizeRequest", "Tokens", 404)
    detokenize = _post("The text of token ids", "DetokenizeRequest", "Text", 404)
    paths = {
        "/generate": _post("Continues a text", "GenerateRequest", "Generated", *limits, stream=True),
        "/v1/completions": _post("OpenAI's completions", "CompletionRequest", "Completion", *limits, stream=True),
        "/v1/chat/completions": _post(
            "OpenAI's chat completions", "ChatRequest", "ChatCompletion", *limits, stream=True
        ),
        "/v1/models": _get("The served model and its adapters", _answers("Models", *_OF_ALL), open=False),
        "/v1/models/{name}": _get(
            "The served model or an adapter by name", _answers("Model", 404, *_OF_ALL), open=False, parameters=[name]
        ),
        "/tokenize": tokenize,
        "/detokenize": detokenize,
        "/v1/tokenize": _as_v1(tokenize),
        "/v1/detokenize": _as_v1(detokenize),
        "/tokenizer_info": _get("What the tokenizer says of itself", _answers("TokenizerInfo", *_OF_ALL), open=False),
        "/health": _get("Whether the server can serve or is still starting", _answers("Health", 503)),
        "/ready": _get("Whether requests are answered now", _answers("Ready", 503)),
        "/warmup": _get("The warmup report", _plain("application/json", {"type": "object"}, 503)),
        "/metrics": _get("Prometheus metrics", _plain("text/plain", None, 503)),
        "/openapi.json": _get("This description", _plain("application/json", {"type": "object"})),
        "/": _get("A page for people", _plain("text/html")),
    }
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
            "schemas": _schemas(),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }
