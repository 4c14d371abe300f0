"""JSON schemas as grammars want them: what a schema does not list is not written, and white space is a pretty printer's.

JSON Schema lets an object have any further members unless ``additionalProperties`` says otherwise, and a model that is let
invents them until it is cut off. So here, as in llama.cpp and in xgrammar's strict mode, an object that lists its members
(``properties`` or ``patternProperties``) has no others, unless ``additionalProperties`` (or ``unevaluatedProperties``) is
``true`` or a schema. That is ``"unevaluatedProperties": false`` at every depth: members are counted across ``allOf``,
``$ref`` and the branch of ``anyOf`` or ``oneOf`` that is taken, so that no part forbids what another one lists. A list whose
first items are described (``prefixItems``) has no more than those, unless ``items`` tells of others. What lists nothing,
such as ``{"type": "object"}``, stays free.

llguidance knows no ``unevaluatedProperties``. `closed` says the same with what it knows: beside the parts of an ``allOf``
goes one that has every member that is listed and ``"additionalProperties": false``; where there are branches, one such part
goes into each of them.
"""

from __future__ import annotations

import dataclasses
import json
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import TypeGuard, TypeVar

# Between JSON's tokens: a space, or one line end with its indentation.
WHITESPACE = r" |\n( {0,32}|\t{0,8})"
OPTIONS = {"whitespace_pattern": WHITESPACE, "coerce_one_of": True}  # oneOf is kept to as anyOf, as by other servers
MAX_SCHEMAS = 20_000  # in what comes out: branches multiply, and a short schema can ask for a huge one

# Keywords that say what a value may be: those that llguidance takes, and those that it refuses by name. All others, among
# them `discriminator`, which it would take for a condition, are notes for people and programs.
_TAKEN = frozenset(
    "$ref allOf anyOf oneOf const enum type"
    " items additionalItems prefixItems minItems maxItems"
    " properties additionalProperties patternProperties required minProperties maxProperties"
    " minLength maxLength pattern format"
    " minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split()
)
_KEPT = _TAKEN | frozenset(
    "$dynamicRef $recursiveRef contains dependencies dependentRequired dependentSchemas else if maxContains minContains not"
    " propertyNames then unevaluatedItems unevaluatedProperties uniqueItems".split()
)
_FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")  # that it takes
# JSON Schema's others (2020-12, Validation, 7.3), which it refuses. All further ones are notes: Pydantic's "path", OpenAPI's "int32".
_REFUSED_FORMATS = (
    *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template"),
    *("json-pointer", "relative-json-pointer", "regex"),
)
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9]")  # a pattern that it does not
_CHOICES = ("anyOf", "oneOf")
_MAPS = ("properties", "patternProperties")  # of schemas of other values, by name
_NESTED = ("additionalItems", "additionalProperties", "contains", "items", "prefixItems", "propertyNames")  # or lists of them


Kind = TypeVar("Kind")
Schema = dict[str, object]


def guiding(schema: Mapping[str, object], *, lenient: bool = False) -> str:
    """The text of what llguidance is to compile for a schema: closed, with options, of which the schema's own win.

    Args and raises: as `closed`.
    """
    own = schema.get("x-guidance", {})
    options = OPTIONS | own if isinstance(own, dict) else own
    return json.dumps(closed(schema, lenient=lenient) | {"x-guidance": options}, ensure_ascii=False)


def closed(schema: Mapping[str, object], place: str = "#", *, lenient: bool = False) -> Schema:
    """The schema of what is listed only, with definitions of its own.

    Args:
        schema: a JSON schema, of draft 4 to 2020-12.
        place: where it will be, if it is to be a part of another: a JSON pointer with ``#`` before it.
        lenient: leave out what llguidance cannot keep to, instead of having it refused.

    Raises:
        ValueError: a ``$ref`` leads nowhere, or the schema is too large when its references are followed.
    """
    return _Closer(schema, place, lenient).whole()


@dataclasses.dataclass(frozen=True)
class _Listed:
    """What a schema, or several that apply to the same value, say of the members and items that there are."""

    names: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    members: bool = False  # they list members, be it none
    other_members: bool = False  # and tell of others
    prefix: int = 0  # items that are described one by one
    min_items: int = 0
    other_items: bool = False

    def __or__(self, other: _Listed) -> _Listed:
        return _Listed(
            self.names | other.names,
            self.patterns | other.patterns,
            self.members or other.members,
            self.other_members or other.other_members,
            max(self.prefix, other.prefix),
            max(self.min_items, other.min_items),
            self.other_items or other.other_items,
        )

    def closure(self) -> Schema:
        """The schema of what has nothing else; empty: there is nothing to forbid."""
        schema: Schema = {}
        if self.members and not self.other_members:
            schema["properties"] = dict.fromkeys(sorted(self.names), True)
            if self.patterns:
                schema["patternProperties"] = dict.fromkeys(sorted(self.patterns), True)
            schema["additionalProperties"] = False
        if self.min_items <= self.prefix and self.prefix and not self.other_items:
            schema["maxItems"] = self.prefix
        return schema


NOTHING = _Listed()


@dataclasses.dataclass(frozen=True)
class _Known:
    """What is known of a schema: what it lists in any of its branches, and whether it has branches at all."""

    listed: _Listed = NOTHING
    branches: bool = False

    def __or__(self, other: _Known) -> _Known:
        return _Known(self.listed | other.listed, self.branches or other.branches)


class _Closer:
    """Writes one schema anew. Schemas are told apart by identity: the document does not change meanwhile."""

    def __init__(self, document: Mapping[str, object], place: str, lenient: bool):
        self._document = document
        self._place = place
        self._keeps = _can_be_kept if lenient else _is_kept
        self._bases: dict[int, str] = {}  # of each schema: what its references are relative to
        self._identified: Schema = {"": document}
        self._identify(document, "")
        self._known: dict[int, _Known] = {}
        self._references: dict[tuple[int, _Listed | None], str] = {}
        self._definitions: Schema = {}
        self._count = 0

    def whole(self) -> Schema:
        schema = self._closed(self._document, NOTHING)
        assert isinstance(schema, dict)
        if "$schema" in self._document:  # by which llguidance reads older drafts
            schema = {"$schema": self._document["$schema"], **schema}
        if self._definitions:
            schema["$defs"] = self._definitions
        return schema

    def _closed(self, schema: object, others: _Listed) -> object:
        """A schema whose value has what it lists, and what ``others`` do that apply to the same value."""
        known = self._know(schema)
        if known.branches:
            return self._written(schema, others)
        if _is_reference(schema):  # alone, so it may lead to what it is in
            return {"$ref": self._reference(schema, others)}
        closure = (others | known.listed).closure()
        if not closure or schema is False:
            return self._written(schema, None)
        if schema is True:
            return closure
        if not isinstance(schema, dict) or others != NOTHING or any(True for _ in self._parts(schema)):
            return {"allOf": [self._written(schema, None), closure]}
        written = self._object(schema, None)
        if "additionalProperties" in closure:
            written.setdefault("type", "object")
            listed = written.get("properties", {})  # whose order is the text's
            if isinstance(listed, dict):
                written["properties"] = listed | {name: True for name in _of(closure, "properties", dict) if name not in listed}
            written["additionalProperties"] = False
        if "maxItems" in closure:
            most = known.listed.prefix
            written["maxItems"] = min(_count(schema, "maxItems", most), most)
        return written

    def _written(self, schema: object, others: _Listed | None) -> object:
        """A schema with each of its keys; ``others`` as in `_closed`; `None`: what it is a part of is closed as a whole."""
        return self._object(schema, others) if isinstance(schema, dict) else schema

    def _object(self, schema: Schema, others: _Listed | None) -> Schema:
        """As `_written`, of a schema that is an object."""
        self._count += 1
        if self._count > MAX_SCHEMAS:
            raise ValueError(f"it is more than {MAX_SCHEMAS} schemas when its references and branches are followed")
        written: Schema = {}
        for key, value in schema.items():
            if not self._keeps(schema, key) or (key == "unevaluatedProperties" and isinstance(value, bool)):
                continue
            if key == "$ref":
                beside = self._beside(schema, value, others)
                if beside is not None and not self._know(self._target(schema)).branches:
                    beside = None
                written[key] = self._reference(schema, beside)
            elif key == "allOf" and isinstance(value, list):
                written[key] = [self._part(part, self._beside(schema, part, others)) for part in value]
            elif key in _CHOICES and isinstance(value, list):
                beside = self._beside(schema, value, others)
                written[key] = [self._written(part, None) if beside is None else self._closed(part, beside) for part in value]
            elif key in _MAPS and isinstance(value, dict):
                written[key] = {name: self._closed(part, NOTHING) for name, part in value.items()}
            elif key in _NESTED and isinstance(value, list):
                written[key] = [self._closed(part, NOTHING) for part in value]
            elif key in _NESTED:
                written[key] = self._closed(value, NOTHING)
            else:
                written[key] = value
        return written

    def _part(self, part: object, beside: _Listed | None) -> object:
        return self._closed(part, beside) if beside is not None and self._know(part).branches else self._written(part, None)

    def _beside(self, schema: Schema, part: object, others: _Listed | None) -> _Listed | None:
        """What is listed beside one part of a schema."""
        if others is None:
            return None
        listed = others | _own(schema)
        for value, other in self._parts(schema):
            if value is not part:
                listed |= other.listed
        return listed

    def _reference(self, schema: Schema, others: _Listed | None) -> str:
        """A definition for each way in which a schema is referred to."""
        target = self._target(schema)
        key = id(target), others
        if key not in self._references:
            name = str(len(self._references))
            self._references[key] = f"{self._place}/$defs/{name}"
            self._definitions[name] = self._written(target, None) if others is None else self._closed(target, others)
        return self._references[key]

    # What schemas say.

    def _know(self, schema: object) -> _Known:
        if not isinstance(schema, dict):
            return _Known()
        if id(schema) not in self._known:
            self._known[id(schema)] = _Known()  # for a schema that refers to itself
            known = _Known(_own(schema))
            for _, part in self._parts(schema):
                known |= part
            self._known[id(schema)] = known
        return self._known[id(schema)]

    def _parts(self, schema: Schema) -> Iterator[tuple[object, _Known]]:
        """What applies to the same value, as it stands in the schema: ``$ref``, each of ``allOf``, lists of branches."""
        for key in ("$ref", "allOf", *_CHOICES):
            value = schema.get(key)
            if key == "$ref" and value is not None:
                yield value, self._know(self._target(schema))
            elif key == "allOf" and isinstance(value, list):
                yield from ((part, self._know(part)) for part in value)
            elif isinstance(value, list):
                known = _Known(branches=True)
                for branch in value:
                    known |= self._know(branch)
                yield value, known

    # References.

    def _identify(self, value: object, base: str) -> None:
        """Finds what schemas call themselves."""
        if isinstance(value, list):
            for item in value:
                self._identify(item, base)
        elif isinstance(value, dict):
            if isinstance(identifier := value.get("$id"), str):
                base = urllib.parse.urljoin(base, identifier).removesuffix("#")
                self._identified.setdefault(base, value)
            if isinstance(anchor := value.get("$anchor"), str):
                self._identified.setdefault(f"{base}#{anchor}", value)
            self._bases[id(value)] = base
            for item in value.values():
                self._identify(item, base)

    def _target(self, schema: Schema) -> object:
        reference = schema["$ref"]
        if not isinstance(reference, str):
            raise ValueError("$ref must be a string")
        name, _, fragment = reference.partition("#")
        base = self._bases[id(schema)]
        base = urllib.parse.urljoin(base, name) if name else base
        fragment = urllib.parse.unquote(fragment)
        if f"{base}#{fragment}" in self._identified:
            return self._identified[f"{base}#{fragment}"]
        target = self._identified.get(base)
        for step in filter(None, fragment.split("/")) if fragment.strip("/") else ():
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and step.isdecimal() and int(step) < len(target):
                target = target[int(step)]
            else:
                target = target.get(step) if isinstance(target, dict) else None
        if not isinstance(target, (dict, bool)):
            raise ValueError(f"$ref {reference!r} leads nowhere: a reference must be to a schema within the schema")
        return target


def _own(schema: Schema) -> _Listed:
    """What a schema lists by itself, its parts left aside."""
    properties, patterns = (_of(schema, key, dict) for key in _MAPS)
    others, items = schema.get("unevaluatedProperties"), schema.get("items")
    prefix = items if isinstance(items, list) else _of(schema, "prefixItems", list)
    return _Listed(
        frozenset(name for name in (*properties, *_of(schema, "required", list)) if isinstance(name, str)),
        frozenset(patterns),
        members=others is False or any(isinstance(schema.get(key), dict) for key in _MAPS),
        other_members="additionalProperties" in schema or others not in (None, False),
        prefix=len(prefix),
        min_items=_count(schema, "minItems", 0),
        other_items="additionalItems" in schema or ("items" in schema and not isinstance(items, list)),
    )


def _is_kept(schema: Schema, key: str) -> bool:
    """Whether a keyword says what a value may be."""
    if key == "format" and isinstance(schema[key], str):
        return schema[key] in (*_FORMATS, *_REFUSED_FORMATS)
    return key in _KEPT


def _can_be_kept(schema: Schema, key: str) -> bool:
    """Whether llguidance keeps to a keyword."""
    if key == "format":
        return schema[key] in _FORMATS
    if key == "pattern":
        return _LOOKS_AROUND.search(str(schema[key])) is None
    if key in ("minProperties", "maxProperties"):
        return "properties" not in schema
    return key in _TAKEN


def _is_reference(schema: object) -> TypeGuard[Schema]:
    return isinstance(schema, dict) and _KEPT.intersection(schema) == {"$ref"}


def _of(schema: Schema, key: str, kind: type[Kind]) -> Kind:
    """A key's value; where it is of another kind, which llguidance is to refuse, as if it were not there."""
    value = schema.get(key)
    return value if isinstance(value, kind) else kind()


def _count(schema: Schema, key: str, otherwise: int) -> int:
    value = schema.get(key)
    return value if isinstance(value, int) else otherwise
