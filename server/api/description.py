"""How a field of a request is described: once, where `server.api.fields.RequestFields` declares it.

A description says by which names the field comes in, at which doors, how each door checks it, what it means, what holds where it
is left out, where it stands in ``DecodeRequest``, whether ``preheat generate`` has a flag of it, and whether the sampler takes it as
it is. Everything else is read from there: the tables that requests are checked by (``server/api/fields.py``), the OpenAPI schema,
the way to gRPC and back (``decode_fields``), flags, what validation hands to the sampler, ``docs/api.md`` and the proto (``document``).
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple, TypeVar

from server.api.field_types import Check

T = TypeVar("T")
_KEY = "description"  # in a dataclass field's metadata


class Door(enum.Flag):
    """Where a request may come in."""

    GENERATE = enum.auto()
    COMPLETIONS = enum.auto()
    CHAT = enum.auto()
    GRPC = enum.auto()
    TOKENIZE = enum.auto()
    DETOKENIZE = enum.auto()

    RAW = GENERATE | COMPLETIONS
    OPENAI = COMPLETIONS | CHAT
    HTTP = GENERATE | OPENAI
    EVERYWHERE = HTTP | GRPC


class Name(NamedTuple):
    """A name under which a field comes in at some doors."""

    at: Door
    check: Check | None = None  # None: as the field is checked under its own name at the same door
    name: str = ""  # empty: the attribute's own
    about: str = ""  # empty: what the field's description says
    of: tuple[str, ...] = ()  # whose spelling it is, where it is another server's
    required: bool = False


class Wire(NamedTuple):
    """Where a field stands in ``DecodeRequest``. Numbers are for ever; those below 20 are JetStream's."""

    number: int
    kind: str  # as the proto spells it: "optional double", "repeated string", "map<int32, double>"; without a label: JetStream's


class Option(NamedTuple):
    """A number that the sampler takes as it is: `engine.api.SamplingParams` has it by the same name."""

    neutral: float  # where nobody says anything
    of_model: bool  # generation_config.json may say it
    plain: float  # where nobody says anything, on /generate and over gRPC


class Description(NamedTuple):
    """See the module."""

    names: tuple[Name, ...]
    about: str
    absent: str = ""  # what holds where it is left out; empty: see ``option``, and the attribute's default
    wire: Wire | None = None
    flag: bool = False
    option: Option | None = None


def described(
    default: T, *names: Name, about: str = "", absent: str = "", wire: Wire | None = None, flag: bool = False
) -> T:
    """A dataclass's attribute with its description. The type is that of the attribute, for type checkers."""
    attribute: T = _attribute(default, Description(names, about, absent, wire, flag))
    return attribute


def option(
    check: Check, wire: Wire, *, about: str, neutral: float, of_model: bool = False, plain: float | None = None
) -> Any:
    """A number for the sampler: allowed everywhere, a flag of ``preheat generate``, `None` where a request is silent.

    Args:
        check: of the value.
        wire: where it stands in ``DecodeRequest``.
        about: what it does.
        neutral: the value that holds where nobody says anything.
        of_model: a model's generation_config.json may say it.
        plain: what holds on /generate and over gRPC instead of ``neutral``.
    """
    taken = Option(neutral, of_model, neutral if plain is None else plain)
    return _attribute(None, Description((Name(Door.EVERYWHERE, check),), about, "", wire, True, taken))


def _attribute(default: object, description: Description) -> Any:
    return dataclasses.field(default=default, metadata={_KEY: description})


def descriptions(described: type) -> dict[str, Description]:
    """Of the attributes of a dataclass that are described, in their order."""
    return {field.name: field.metadata[_KEY] for field in dataclasses.fields(described) if _KEY in field.metadata}
