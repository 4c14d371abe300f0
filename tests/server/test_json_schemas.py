"""What a JSON schema lets a model write, member by member and space by space. The texts are worked out by hand: those that
are good are valid by JSON Schema too; those that are bad have something that nothing in the schema lists, or break it."""

from __future__ import annotations

import ipaddress
import json
import pathlib
import time
from typing import Annotated, Literal

import guide_harness
import pydantic
import pytest

from server.errors import InvalidRequest
from server.text.json_schemas import MAX_SCHEMAS, closed


def allows(schema, text):
    return guide_harness.allows("guided_json", json.dumps(schema), text)


A, B, C = ({"type": "object", "properties": {name: {"type": "integer"}}} for name in "abc")
NODE = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}, "required": ["v"]}
CASES = [
    # (schema, good, bad)
    (A, ['{"a": 1}', "{}"], ['{"x": 1}', '{"a": 1, "x": 1}', '{"a": "1"}']),
    (A | {"additionalProperties": False}, ['{"a": 1}'], ['{"a": 1, "x": 1}']),
    (A | {"additionalProperties": True}, ['{"a": 1, "x": "y"}'], ['{"a": "1"}']),
    (A | {"additionalProperties": {}}, ['{"a": 1, "x": "y"}'], []),
    (A | {"additionalProperties": {"type": "null"}}, ['{"a": 1, "x": null}'], ['{"a": 1, "x": 2}']),
    (A | {"unevaluatedProperties": True}, ['{"a": 1, "x": "y"}'], []),
    (A | {"unevaluatedProperties": False}, ['{"a": 1}'], ['{"a": 1, "x": 1}']),
    ({"type": "object", "unevaluatedProperties": False}, ["{}"], ['{"x": 1}']),
    ({"properties": {"a": {"type": "integer"}}}, ['{"a": 1}'], ['{"a": 1, "x": 1}', "5"]),
    # What lists nothing is free.
    ({"type": "object"}, ["{}", '{"x": {"y": [1]}}'], ["5"]),
    ({"type": "object", "required": ["a"]}, ['{"a": 1}', '{"a": 1, "x": 1}'], ["{}"]),
    ({}, ["5", '{"x": 1}'], []),
    ({"type": "object", "properties": {}}, ["{}"], ['{"x": 1}']),
    # A member that is required and not described may be anything.
    (A | {"required": ["b"]}, ['{"a": 1, "b": "x"}', '{"b": []}'], ['{"a": 1}', '{"b": 1, "x": 1}']),
    # In the order in which they are listed.
    ({"type": "object", "properties": {"z": True, "m": True, "a": True}}, ['{"z":1,"m":2,"a":3}'], ['{"a":3,"z":1}']),
    ({"type": "object", "patternProperties": {"^n_": {"type": "integer"}}}, ['{"n_1": 1, "n_2": 2}'], ['{"x": 1}']),
    # At every depth.
    ({"type": "object", "properties": {"o": A}}, ['{"o": {"a": 1}}'], ['{"o": {"x": 1}}']),
    ({"type": "array", "items": A}, ['[{"a": 1}, {}]'], ['[{"x": 1}]']),
    ({"type": "object", "additionalProperties": A}, ['{"x": {"a": 1}}'], ['{"x": {"y": 1}}']),
    ({"type": "object", "patternProperties": {"^n": A}}, ['{"n": {"a": 1}}'], ['{"n": {"x": 1}}']),
    ({"type": ["object", "null"], "properties": {"a": True}}, ['{"a": 1}', "null"], ['{"x": 1}', "5"]),
    ({"anyOf": [A, {"type": "null"}]}, ['{"a": 1}', "null"], ['{"x": 1}']),
    # References, recursion.
    ({"$ref": "#/$defs/a", "$defs": {"a": A}}, ['{"a": 1}'], ['{"x": 1}']),
    ({"$ref": "#/definitions/a~1b", "definitions": {"a/b": A}}, ['{"a": 1}'], ['{"x": 1}']),
    ({"$ref": "#a", "$defs": {"x": A | {"$anchor": "a"}}}, ['{"a": 1}'], ['{"x": 1}']),
    ({"$id": "http://h/s", "$ref": "t", "$defs": {"x": A | {"$id": "t"}}}, ['{"a": 1}'], ['{"x": 1}']),
    (
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
        ['{"v": 1, "next": {"v": 2, "next": {"v": 3}}}'],
        ['{"v": 1, "next": {"v": 2, "x": 3}}', '{"v": 1, "next": {}}'],
    ),
    ({"type": "object", "properties": {"r": {"$ref": "#"}}}, ['{"r": {"r": {}}}'], ['{"r": {"x": {}}}']),
    ({"type": "object", "properties": {"p": A, "q": {"$ref": "#/properties/p"}}}, ['{"q": {"a": 1}}'], ['{"q": {"x": 1}}']),
    ({"$ref": "#/$defs/a", "description": "x", "$defs": {"a": A}}, ['{"a": 1}'], ['{"x": 1}']),
    # Parts do not forbid each other's members.
    ({"allOf": [A, B]}, ['{"a": 1, "b": 2}', '{"b": 2}'], ['{"a": 1, "c": 2}', '{"a": "1"}']),
    ({**A, "allOf": [B, {"allOf": [C]}]}, ['{"a": 1, "b": 2, "c": 3}'], ['{"x": 1}', '{"c": "3"}']),
    ({"allOf": [{"$ref": "#/$defs/a"}], **B, "$defs": {"a": A}}, ['{"a": 1, "b": 2}'], ['{"a": 1, "x": 2}']),
    ({**B, "$ref": "#/$defs/a", "$defs": {"a": A}}, ['{"b": 2, "a": 1}'], ['{"b": 2, "x": 1}']),
    ({"allOf": [A, {"type": "object"}]}, ['{"a": 1}'], ['{"x": 1}']),
    ({"allOf": [A, {"type": "object", "additionalProperties": True}]}, ['{"a": 1, "x": 1}'], ['{"a": "1"}']),
    ({"allOf": [A | {"additionalProperties": False}, {"required": ["a"]}]}, ['{"a": 1}'], ["{}", '{"a": 1, "x": 1}']),
    (  # a recursive type that extends another
        {
            "$ref": "#/$defs/tree",
            "$defs": {
                "tree": {"allOf": [A, {"type": "object", "properties": {"sub": {"$ref": "#/$defs/tree"}}}]},
            },
        },
        ['{"a": 1, "sub": {"a": 2, "sub": {}}}'],
        ['{"sub": {"a": 2, "x": 3}}'],
    ),
    # Of the branches that are taken, and of what is beside them.
    ({"anyOf": [A, B]}, ['{"a": 1}', '{"b": 1}'], ['{"a": 1, "b": 1}', '{"x": 1}']),
    ({"oneOf": [A, B]}, ['{"a": 1}', '{"b": 1}'], ['{"a": 1, "b": 1}']),
    ({**A, "anyOf": [B, C]}, ['{"a": 1, "b": 1}', '{"a": 1, "c": 1}'], ['{"b": 1, "c": 1}', '{"a": 1, "x": 1}']),
    ({"anyOf": [B, C], **A}, ['{"b": 1, "a": 1}', '{"c": 1}'], ['{"b": "1", "a": 1}', '{"x": 1}']),
    (
        {"type": "object", "properties": {"a": True, "b": True}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a": 1}', '{"b": 1}', '{"a": 1, "b": 1}'],
        ["{}", '{"a": 1, "x": 1}'],
    ),
    ({**A, "anyOf": [B, True]}, ['{"a": 1, "b": 1}', '{"a": 1}'], ['{"a": 1, "x": 1}', '{"a": 1, "b": "x"}']),
    ({"anyOf": [A, {"type": "object"}]}, ['{"a": 1}', '{"x": 1}'], ["5"]),
    ({"allOf": [{"anyOf": [A, B]}, C]}, ['{"a": 1, "c": 1}', '{"b": 1, "c": 1}'], ['{"a": 1, "b": 1}', '{"a": 1, "x": 1}']),
    (
        {"allOf": [{"anyOf": [A, B]}, {"anyOf": [C, {"type": "object", "properties": {"d": True}}]}]},
        ['{"a": 1, "c": 1}', '{"b": 1, "d": 1}'],
        ['{"a": 1, "b": 1}', '{"c": 1, "d": 1}', '{"a": 1, "x": 1}'],
    ),
    (
        {**C, "allOf": [{"$ref": "#/$defs/e"}], "$defs": {"e": {"anyOf": [A, {"$ref": "#/$defs/b"}]}, "b": B}},
        ['{"c": 1, "a": 1}', '{"c": 1, "b": 1}'],
        ['{"a": 1, "b": 1}', '{"c": 1, "x": 1}'],
    ),
    # Lists.
    ({"type": "array", "prefixItems": [A, B]}, ['[{"a": 1}, {"b": 1}]', "[]"], ['[{}, {}, 5]', '[{"b": 1}]']),
    ({"type": "array", "items": [A, B]}, ['[{"a": 1}, {"b": 1}]'], ["[{}, {}, 5]"]),
    ({"type": "array", "prefixItems": [A], "items": {"type": "integer"}}, ["[{}, 5, 6]"], ['[{}, "x"]']),
    ({"type": "array", "items": [A], "additionalItems": True}, ["[{}, 5]"], []),
    ({"type": "array", "prefixItems": [A], "minItems": 2}, ["[{}, 5]"], ["[{}]"]),
    ({"allOf": [{"type": "array", "prefixItems": [A]}, {"prefixItems": [True, B]}]}, ["[{}, {}]"], ["[{}, {}, 1]"]),
    ({"type": "array"}, ['[1, {"x": 2}]'], ["5"]),
    # Names of members that are keywords of schemas, and values that look like schemas.
    (
        {"type": "object", "properties": {"$ref": {"type": "string"}, "title": A, "properties": {"type": "integer"}}},
        ['{"$ref": "x", "title": {"a": 1}, "properties": 5}'],
        ['{"title": {"x": 1}}'],
    ),
    ({"const": {"properties": {"$ref": "#/nowhere"}}}, ['{"properties": {"$ref": "#/nowhere"}}'], ["{}"]),
    ({"enum": [{"x": 1}, {"title": 2}]}, ['{"x": 1}', '{"title": 2}'], ['{"y": 1}']),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=lambda value: json.dumps(value)[:60])
def test_what_is_not_listed_is_not_written(schema, good, bad):
    assert [text for text in good if not allows(schema, text)] == []
    assert [text for text in bad if allows(schema, text)] == []


SPACES = [
    ('{"a":[1,2],"b":{}}', True),
    ('{"a": [1, 2], "b": {}}', True),
    (json.dumps({"a": [1, 2], "b": {}}, indent=2), True),
    (json.dumps({"a": [1, {"c": []}], "b": {}}, indent=8), True),
    (json.dumps({"a": [1, 2], "b": {}}, indent="\t"), True),
    ('{ "a" : [ 1 , 2 ] }', True),
    ('{"a":  1}', False),
    ('{"a":\t1}', False),
    ('{"a":\n\n1}', False),
    ('{"a":\n \t1}', False),
    ('{"a":\r\n1}', False),
    ('{\n' + " " * 32 + '"a": 1\n}', True),
    ('{\n' + " " * 33 + '"a": 1\n}', False),
    (' {"a": 1}', False),
    ('{"a": 1} ', False),
]


@pytest.mark.parametrize(("text", "good"), SPACES)
@pytest.mark.parametrize("schema", [{"type": "object"}, {"type": "object", "properties": {"a": True, "b": True}}])
def test_space_between_tokens_is_a_pretty_printers(schema, text, good):
    assert allows(schema, text) == good


def test_a_schema_may_say_otherwise_of_space():
    schema = {**A, "x-guidance": {"whitespace_pattern": "[ ]{3}"}}
    assert allows(schema, '{   "a":1}') and not allows(schema, '{ "a":1}')


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    name: str | None = None
    friends: list[Pet] = []


Pet = Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]


class Owner(pydantic.BaseModel):
    pets: list[Pet]
    notes: dict[str, int] = {}


class Open(pydantic.BaseModel, extra="allow"):
    a: int


Dog.model_rebuild()


@pytest.mark.parametrize(
    ("model", "good", "bad"),
    [
        (
            Owner,
            ['{"pets": [{"kind": "cat", "lives": 3}, {"kind": "dog", "friends": [{"kind": "cat"}]}], "notes": {"x": 1}}'],
            ['{"pets": [{"kind": "cat", "name": "x"}]}', '{"pets": [], "x": 1}', '{"pets": [{"kind": "cow"}]}'],
        ),
        (Open, ['{"a": 1, "x": [2]}'], ['{"a": "x"}']),
    ],
)
def test_what_pydantic_sends(model, good, bad):
    for text in good:
        model.model_validate_json(text)
        assert allows(model.model_json_schema(), text)
    assert not any(allows(model.model_json_schema(), text) for text in bad)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$ref": "#/$defs/nowhere"}, "nowhere"),
        ({"$ref": "#nowhere"}, "nowhere"),
        ({"$ref": "other.json#/a"}, "other.json"),
        ({"$ref": 5}, r"\$ref must be a string"),
        ({"$ref": "#"}, "matches no text"),
        ({"allOf": [{"$ref": "#"}]}, "cannot be compiled"),
        ({"properties": 5}, "properties"),
        ({"type": "object", "required": 5}, "required"),
        ({"type": "array", "prefixItems": 5}, "prefixItems"),
        ({"allOf": 5}, "allOf"),
        ({"anyOf": {}}, "anyOf"),
        ({"unevaluatedItems": False}, "unevaluatedItems"),
        ({"unevaluatedProperties": {"type": "string"}}, "unevaluatedProperties"),
        ({"type": "object", "propertyNames": {"pattern": "x"}}, "propertyNames"),
        ({"x-guidance": 5}, "cannot be compiled"),
    ],
)
def test_what_is_no_schema_is_refused(schema, message):
    with pytest.raises(InvalidRequest, match=message):
        guide_harness.GUIDES.compile("guided_json", json.dumps(schema))


def test_formats_that_json_schema_does_not_define_are_notes():
    """As its specification has it (2020-12, Validation, 7.2.3), and as Pydantic means them: of secrets, paths, networks."""

    class Login(pydantic.BaseModel):
        secret: pydantic.SecretStr
        folder: pathlib.Path
        network: ipaddress.IPv4Network

    schema = Login.model_json_schema()
    assert {member["format"] for member in schema["properties"].values()} == {"password", "path", "ipv4network"}
    assert allows(schema, '{"secret": "x", "folder": "/tmp", "network": "10.0.0.0/8"}')
    with pytest.raises(InvalidRequest, match="json-pointer"):  # is defined, and not kept to
        allows({"type": "string", "format": "json-pointer"}, '"/a"')


def test_a_schema_that_is_too_wide_is_refused_for_that():
    """Where it is found out: with thousands of members that may come next, after the first."""
    wide = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(1500)}}
    matcher = guide_harness.GUIDES.compile("guided_json", json.dumps(wide)).matcher()
    with pytest.raises(InvalidRequest, match="items; max is"):  # noqa: PT012 (one of them)
        for token in b'{"p1":':
            matcher.accept(token)


def test_a_schema_that_multiplies_is_refused_soon():
    """Two branches at each of 40 levels, each with a member of its own: 2^40 ways."""
    levels = {
        f"l{level}": {"anyOf": [{"$ref": f"#/$defs/l{level + 1}", "properties": {f"{side}{level}": True}} for side in "ab"]}
        for level in range(40)
    }
    began = time.monotonic()
    with pytest.raises(ValueError, match=str(MAX_SCHEMAS)):
        closed({"$ref": "#/$defs/l0", "$defs": levels | {"l40": A}})
    assert time.monotonic() - began < 10


def test_a_part_of_another_schema_refers_to_itself():
    schema = {"$defs": {"t": closed(NODE | {"$defs": {"node": NODE}}, "#/$defs/t")}, "$ref": "#/$defs/t"}
    references = [schema["$defs"]["t"]["properties"]["next"]["$ref"]]
    assert references == ["#/$defs/t/$defs/0"] and "0" in schema["$defs"]["t"]["$defs"]
