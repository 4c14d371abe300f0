"""Writes what the descriptions of fields say into ``docs/api.md`` and ``protos/orchestrator.proto``, between their markers.

``make docs`` and ``make protos`` run it, in a checkout. A marker is a line of its own, ``<!-- begin fields -->`` in Markdown and
``// begin fields`` in the proto, and the next line with ``end`` closes it; what stands between is made from ``server/api/fields.py`` and
``server/api/peer_fields.py``, and a test fails when it is stale.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from server.api import fields, peer_fields
from server.api.description import Description
from server.api.field_types import INT32_MAX, INT64_MAX, Json, schema_of
from server.api.fields import CHAT, COMPLETIONS, DESCRIPTIONS, GENERATE, GRPC, RequestFields, Table

ROOT = Path(__file__).parents[2]
API, PROTO = Path("docs/api.md"), Path("protos/orchestrator.proto")
FIRST_OF_OURS = 20  # number in ``DecodeRequest``
PROTO_WIDTH = 123

_ROUTES: dict[str, Table] = {"`/generate`": GENERATE, "`/v1/completions`": COMPLETIONS, "chat": CHAT}


# What a schema allows, in words.


def words(schema: Json) -> str:
    """What a schema of ``server/api/field_types.py`` allows: "0 to 1", "true, false", "a text of 1 to 1024 characters"."""
    if "anyOf" in schema:
        return ", or ".join(dict.fromkeys(words(choice) for choice in schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(json.dumps(value) for value in schema["enum"])
    match schema.get("type"):
        case "integer" | "number":
            low = f"above {_number(schema['exclusiveMinimum'])}," if "exclusiveMinimum" in schema else _number(schema["minimum"])
            return f"{low} to {_number(schema['maximum'])}"
        case "boolean":
            return "true, false"
        case "string" if "maxLength" in schema:
            return f"a text of {schema.get('minLength', 0)} to {schema['maxLength']} characters"
        case "string":
            return "a text"
        case "array":
            most = f" of up to {schema['maxItems']}" if "maxItems" in schema else ""
            return f"a list{most}: {_each(schema['items'])}"
        case "object" if "additionalProperties" in schema:
            return f"an object of up to {schema['maxProperties']}: {_each(schema['additionalProperties'])}"
        case "object":
            return "an object"
        case other:
            raise ValueError(f"no words for a schema of type {other}")


def _each(schema: Json) -> str:
    return words(schema).removeprefix("a ").replace("text of", "texts of") + (" each" if schema["type"] == "string" else "")


def _number(value: float) -> str:
    if value is True:
        return "true"
    if value in (INT32_MAX, INT64_MAX):
        return f"2^{int(value + 1).bit_length() - 1} - 1"
    if value == -INT64_MAX - 1:
        return "-2^63"
    power = re.fullmatch(r"10*", f"{value:.0f}")
    return f"10^{len(power[0]) - 1}" if power and value > 10_000 else f"{value:g}"


# docs/api.md


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return _row(*head) + _row(*["---"] * len(head)) + "".join(_row(*row) for row in rows)


def _named(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _shared() -> list[str]:
    """The fields that every route takes, but for spellings of other servers."""
    shared = [name for name in CHAT if name in GENERATE and name in COMPLETIONS and not CHAT[name].of]
    return [name for name in shared if all(schema_of(table[name].check).get("type") != "null" for table in _ROUTES.values())]


def _allowed(name: str) -> str:
    """What the routes allow; where one differs from most, it is named."""
    by_route = {route: words(schema_of(table[name].check)) for route, table in _ROUTES.items()}
    usual = max(by_route.values(), key=list(by_route.values()).count)
    return "; ".join([usual, *(f"{route}: {said}" for route, said in by_route.items() if said != usual)])


def _absent(name: str) -> str:
    description = DESCRIPTIONS.get(GENERATE[name].target)
    if description is None:
        return ""
    if description.absent:
        return description.absent
    if option := description.option:
        of_model = "the model's `generation_config.json`, else " if option.of_model else ""
        plain = f"; {option.plain:g} on `/generate`" if option.plain != option.neutral else ""
        return f"{of_model}{option.neutral:g}{plain}"
    default = getattr(RequestFields, GENERATE[name].target)
    return "" if default is None or default == () else json.dumps(default)


def _sampling() -> str:
    rows = ((f"`{name}`", _allowed(name), _absent(name), GENERATE[name].about) for name in _shared())
    return _table(("field", "allowed", "absent", "meaning"), rows)


def _order() -> str:
    return f"They are applied in this order: `logit_bias`, `min_tokens`, grammar, {_named(fields.OPTIONS)}.\n"


def _honoured() -> str:
    names = dict.fromkeys(name for table in _ROUTES.values() for name, field in table.items() if field.of)
    rows = []
    for name in names:
        where = [route for route, table in _ROUTES.items() if name in table and table[name].of]
        field = next(table[name] for table in _ROUTES.values() if name in table and table[name].of)
        shown = f"`{name}`" + ("" if len(where) == len(_ROUTES) else f" ({', '.join(where)})")
        rows.append((shown, ", ".join(field.of), words(schema_of(field.check)), field.about))
    return _table(("field", "of", "allowed", "meaning"), rows)


def _refused() -> str:
    def shown(names: Mapping[str, tuple[object, ...]]) -> str:
        return ", ".join(f"`{name}`" + (f" ({', '.join(map(json.dumps, values))})" if values else "") for name, values in names.items())

    return _table(("field", "of", "because"), ((shown(row.names), ", ".join(row.of), row.why) for row in peer_fields.REFUSED))


def _ignored() -> str:
    return _table(("field", "of", "because"), ((_named(row.names), ", ".join(row.of), row.why) for row in peer_fields.IGNORED))


def _by_number() -> list[tuple[str, Description]]:
    """The fields of ``DecodeRequest`` that are ours, by the names they have there."""
    found = [(name, DESCRIPTIONS[field.target]) for name, field in GRPC.items()]
    return sorted(
        (pair for pair in found if pair[1].wire and pair[1].wire.number >= FIRST_OF_OURS), key=lambda pair: _wire_number(pair[1])
    )


def _wire_number(description: Description) -> int:
    assert description.wire is not None
    return description.wire.number


def _numbers() -> str:
    rows = ((str(_wire_number(description)), f"`{name}`", description.about) for name, description in _by_number())
    return _table(("number", "field", "meaning"), rows)


# protos/orchestrator.proto


def _proto_fields() -> str:
    lines = []
    for name, description in _by_number():
        assert description.wire is not None
        comment = [line for said in (description.about, _proto_words(name, description)) for line in textwrap.wrap(said, PROTO_WIDTH)]
        lines += [*(f"  // {line}" for line in comment), f"  {description.wire.kind} {name} = {description.wire.number};"]
    return "".join(f"{line}\n" for line in lines)


def _proto_words(name: str, description: Description) -> str:
    """What is allowed, and what holds where it is left out. Of the forms that JSON may have only the one that the proto has is named."""
    assert description.wire is not None
    schema = schema_of(GRPC[name].check)
    kind = description.wire.kind
    wanted = "array" if kind.startswith("repeated") else "object" if kind.startswith("map") else "string"
    schema = next((choice for choice in schema.get("anyOf", ()) if choice["type"] == wanted), schema)
    default = getattr(RequestFields, GRPC[name].target) if description.option is None else description.option.plain
    allowed = "" if schema in ({"type": "boolean"}, {"type": "string"}) else f"allowed: {words(schema)}"
    absent = "" if default is None or default is False or default == () else f"absent: {_number(default)}"
    said = "; ".join(filter(None, (allowed, absent)))
    return said and f"{said[0].upper()}{said[1:]}."


PARTS: dict[Path, dict[str, Callable[[], str]]] = {
    API: {"fields": _sampling, "order": _order, "honoured": _honoured, "refused": _refused, "ignored": _ignored, "numbers": _numbers},
    PROTO: {"fields": _proto_fields},
}


def filled(path: Path, text: str) -> str:
    """The text of one of the files of `PARTS`, with all its parts as they are to be.

    Raises:
        ValueError: a pair of markers is missing.
    """
    lines = text.splitlines(keepends=True)
    for part, make in PARTS[path].items():
        marks = [f"<!-- {word} {part} -->" if path.suffix == ".md" else f"// {word} {part}" for word in ("begin", "end")]
        found = [index for mark in marks for index, line in enumerate(lines) if line.strip() == mark]
        if len(found) != 2 or found[0] > found[1]:
            raise ValueError(f"{path} must have the lines {marks[0]!r} and {marks[1]!r}, once each: put them where the part is to stand")
        lines[found[0] + 1 : found[1]] = [make()]
        lines = "".join(lines).splitlines(keepends=True)
    return "".join(lines)


def main() -> int:
    """Writes what is stale and names it."""
    for path in PARTS:
        old = (ROOT / path).read_text(encoding="utf-8")
        new = filled(path, old)
        if new != old:
            (ROOT / path).write_text(new, encoding="utf-8")
            print(f"{path} is written anew")
    return 0


if __name__ == "__main__":
    sys.exit(main())
