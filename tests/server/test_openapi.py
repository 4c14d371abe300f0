"""The API's description against the API: bodies drawn from its schemas, answers held against them.

What draws and what checks are written here, from JSON Schema's own rules, for the few keywords that the description
uses.
"""

from __future__ import annotations

import json
import math
import re

import httpx
import pytest
from front_doors import open_doors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.mock import Table
from server.api import fields
from server.proxy import openapi
from server.proxy.endpoints import ENDPOINTS
from server.proxy.routes import make_app

DOCUMENT = openapi.document(ENDPOINTS)
NEXT = Table({token: {(token + 1) % 256: 0.9, 257: 0.1} for token in range(256)})
KEYWORDS = {
    "type", "enum", "anyOf", "items", "properties", "required", "additionalProperties", "minimum", "maximum",
    "exclusiveMinimum", "minLength", "maxLength", "minItems", "maxItems", "maxProperties", "pattern", "description",
    "$ref",
}  # fmt: skip


@pytest.fixture(scope="module")
def http():
    with open_doors(NEXT, slots=8, max_queue=512) as doors, httpx.Client(base_url=doors.http, timeout=30) as client:
        yield client


def resolve(schema):
    while "$ref" in schema:
        schema = DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def is_type(value, name):
    if name in ("integer", "number"):
        kinds = (int,) if name == "integer" else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool)
    kinds = {"string": str, "boolean": bool, "array": list, "object": dict, "null": type(None)}
    return isinstance(value, kinds[name])


def fits(value, schema):
    """Whether a value is valid."""
    schema = resolve(schema)
    assert schema.keys() <= KEYWORDS
    if "anyOf" in schema and not any(fits(value, choice) for choice in schema["anyOf"]):
        return False
    if "enum" in schema and not any(type(value) is type(item) and value == item for item in schema["enum"]):
        return False
    if "type" in schema and not is_type(value, schema["type"]):
        return False
    if is_type(value, "number"):
        return (
            schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf)
            and value > schema.get("exclusiveMinimum", -math.inf)
        )  # fmt: skip
    if isinstance(value, str):
        long_enough = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf)
        return long_enough and re.search(schema.get("pattern", ""), value) is not None
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", math.inf):
            return False
        return all(fits(item, schema.get("items", {})) for item in value)
    if isinstance(value, dict):
        if set(schema.get("required", ())) - value.keys() or len(value) > schema.get("maxProperties", math.inf):
            return False
        known = schema.get("properties", {})
        return all(fits(item, known.get(key, schema.get("additionalProperties", {}))) for key, item in value.items())
    return True


TEXT = st.text(st.characters(codec="utf-8"), max_size=6)
SCALARS = st.none() | st.booleans() | st.integers(-5, 5) | TEXT
ANYTHING = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=2))


def values(schema):
    """Valid values, small ones."""
    schema = resolve(schema)
    if "anyOf" in schema:
        return st.one_of([values(choice) for choice in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "integer":
            low, high = schema.get("minimum", -9), schema.get("maximum", 9)
            return st.integers(low, high) | st.integers(max(low, 0), min(high, 9))
        case "number":
            low = schema.get("minimum", schema.get("exclusiveMinimum"))
            return st.floats(low, schema["maximum"], exclude_min="exclusiveMinimum" in schema)
        case "string" if "pattern" in schema:
            return st.from_regex(schema["pattern"], fullmatch=True)
        case "string":
            return st.text(st.characters(codec="utf-8"), min_size=schema.get("minLength", 0), max_size=6)
        case "array":
            return st.lists(values(schema["items"]), min_size=schema.get("minItems", 0), max_size=3)
        case "object" if "properties" not in schema:
            inner = values(schema.get("additionalProperties", {}))
            return st.dictionaries(st.integers(0, 319).map(str), inner, max_size=3)
        case "object":
            required = {name: values(schema["properties"][name]) for name in schema.get("required", ())}
            optional = {name: values(item) for name, item in schema["properties"].items() if name not in required}
            return st.fixed_dictionaries(required, optional=optional)
    return ANYTHING


def operations():
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def hold(path, method, response):
    """An answer is one of those described, and looks as described."""
    answers = DOCUMENT["paths"][path][method]["responses"]
    assert str(response.status_code) in answers, (response.status_code, response.text)
    content = answers[str(response.status_code)]["content"]
    kind = response.headers["content-type"].partition(";")[0]
    assert kind in content
    if kind == "application/json":
        assert fits(response.json(), content[kind]["schema"]), response.text


def test_it_is_served_to_everybody(http):
    response = http.get("/openapi.json")
    assert response.json() == json.loads(json.dumps(DOCUMENT)) and response.json()["openapi"].startswith("3.1")
    hold("/openapi.json", "get", response)


def test_every_route_and_every_field_is_described():
    app = make_app(["x:1"])
    routes = {(route.path.replace(":path", ""), method.lower()) for route in app.routes for method in route.methods}
    assert {(path, method) for path, method, _ in operations()} == routes - {(path, "head") for path, _ in routes}
    schemas = DOCUMENT["components"]["schemas"]
    tables = {
        "Generate": fields.GENERATE, "Completion": fields.COMPLETIONS, "Chat": fields.CHAT,
        "Tokenize": fields.TOKENIZE, "Detokenize": fields.DETOKENIZE,
    }  # fmt: skip
    for kind, table in tables.items():
        name = f"{kind}Request"
        assert schemas[name]["properties"].keys() == table.keys()
        for field, schema in schemas[name]["properties"].items():
            assert {"type", "anyOf", "enum"} & schema.keys(), field
            assert schema["description"]


@pytest.mark.parametrize("path", [path for path, method, _ in operations() if method == "get"])
def test_answers_to_get(http, path):
    response = http.get(path.replace("{name}", "mock"))
    assert response.status_code == 200
    hold(path, "get", response)


@pytest.mark.parametrize("path", [path for path, method, _ in operations() if method == "post"])
def test_bodies_by_the_schema(http, path):
    schema = resolve(DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"])
    usual = {name: schema["properties"][name] for name in ("max_tokens", "n") if name in schema["properties"]}
    statuses = set()

    @settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def run(data):
        body = {name: data.draw(values(schema["properties"][name]), name) for name in schema["required"]}
        names = data.draw(st.lists(st.sampled_from(sorted(schema["properties"])), max_size=4, unique=True))
        body |= {name: data.draw(values(schema["properties"][name]), name) for name in names if name not in body}
        body = {"max_tokens": 2} | body if "max_tokens" in usual else body
        assert fits(body, schema)
        response = http.post(path, content=json.dumps(body).encode())
        statuses.add(response.status_code)
        assert response.status_code < 500, (body, response.text)
        hold(path, "post", response)

    run()
    assert 200 in statuses


@pytest.mark.parametrize("path", [path for path, method, _ in operations() if method == "post"])
def test_what_no_schema_allows_is_refused_by_name(http, path):
    """One field at a time is replaced by values of other kinds."""
    schema = resolve(DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"])
    good = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "text": "a", "tokens": [97]}
    base = {name: good[name] for name in schema["required"]}
    others = [5, -1, 2**70, 1.5, "x", "", True, [], [None], {}, {"a": []}, [[[]]]]
    for name, allowed in schema["properties"].items():
        for value in others:
            if not fits(value, allowed):
                response = http.post(path, json=base | {name: value})
                assert response.status_code == 400, (name, value, response.text)
                assert response.json()["error"]["param"] == name, (name, value, response.text)
                hold(path, "post", response)
