"""Words that the descriptions of endpoints are written in: JSON schemas and contents of answers, as OpenAPI 3.1 has them."""

from __future__ import annotations

from server.proxy.answer_formats import Json

STRING: Json = {"type": "string"}
INTEGER: Json = {"type": "integer"}
NUMBER: Json = {"type": "number"}


def fixed(*values: str) -> Json:
    """A string that is one of these."""
    return {"type": "string", "enum": list(values)}


def object_of(**properties: Json) -> Json:
    """An object of which everything named is there."""
    return {"type": "object", "required": list(properties), "properties": properties}


def with_optional(schema: Json, **properties: Json) -> Json:
    """The same object, which may have these too."""
    return {**schema, "properties": schema["properties"] | properties}


def list_of(items: Json) -> Json:
    return {"type": "array", "items": items}


def or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def ref(name: str) -> Json:
    """A schema that stands in the description's components."""
    return {"$ref": f"#/components/schemas/{name}"}


def json_content(name: str) -> Json:
    """An answer in JSON, by the name of its schema."""
    return {"application/json": {"schema": ref(name)}}


def stream_content(name: str) -> Json:
    """The same, or events: an event or the whole is what a schema of these would describe, which is left open before 3.2."""
    return json_content(name) | {"text/event-stream": {}}


STREAM_ABOUT = "The answer; with stream, as events."
USAGE = object_of(
    prompt_tokens=INTEGER,
    completion_tokens=INTEGER,
    total_tokens=INTEGER,
    prompt_tokens_details=object_of(cached_tokens=INTEGER),
)
ERROR = object_of(error=object_of(message=STRING, type=STRING, code=or_null(STRING), param=or_null(STRING)))
PROMPT_LOGPROBS = or_null(list_of(or_null({"type": "object"})))
