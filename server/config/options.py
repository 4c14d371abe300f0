"""From the command line, the environment and a TOML file to one validated dataclass.

A configuration is a frozen dataclass whose fields are made with `option`. Each field is one option: ``max_len`` is
``--max-len`` on the command line, ``PREHEAT_MAX_LEN`` in the environment and ``max-len`` (or ``max_len``) in the file.
`load` takes each value from the first of them that has it, and parses all three in the same way, so a mistake is
reported in the same words wherever it was made: option, value, source, what is allowed.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from server.errors import StartError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")
MAX_SECONDS = 1e9  # 31 years; a wait of more than 292 is more than the system's clocks count
ENVIRONMENT_PREFIX = "PREHEAT_"


def option(
    default: object,
    parse: Callable[[str], object],
    help: str,
    *,
    metavar: str | None = None,
    many: bool = False,
    shown: str | None = None,
    secret: bool = False,
) -> Any:
    """A dataclass field that is an option; of whatever type the field has.

    ``parse`` makes the value from text and raises `ValueError` that says what is allowed. ``many``: comma-separated and
    repeatable, parsed one by one into a tuple. ``shown`` is the default in ``--help`` where it is not the field's own.
    """
    metadata = {"parse": parse, "help": help, "metavar": metavar, "many": many, "shown": shown}
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


def flag_name(field: str) -> str:
    """``max_len`` -> ``--max-len``."""
    return "--" + field.replace("_", "-")


# Parsers of one value. Their errors complete the sentence "<option> <value> (<source>): ...".


def text(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    return value


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    allowed = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"

    def parse(value: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", value.strip()):
            raise ValueError(f"must be {allowed}")
        number = int(value)
        if number < low or (high is not None and number > high):
            raise ValueError(f"must be {allowed}")
        return number

    return parse


def port(value: str) -> int:
    try:
        return integer(0, 65535)(value)
    except ValueError:
        raise ValueError("must be a port from 0 to 65535 (0 picks a free one)") from None


def seconds(low: float, *, none: bool = False) -> Callable[[str], float | None]:
    """A number of seconds; with ``none`` also the word, for no limit."""

    def parse(value: str) -> float | None:
        if none and value.strip().lower() == "none":
            return None
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if not low <= number <= MAX_SECONDS:
            raise ValueError(f"must be a number of seconds from {low:g} to {MAX_SECONDS:g}" + (", or none" if none else ""))
        return number

    return parse


def choice(*values: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value not in values:
            raise ValueError(f"must be one of {', '.join(values)}")
        return value

    return parse


def boolean(value: str) -> bool:
    truth = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    try:
        return truth[value.strip().lower()]
    except KeyError:
        raise ValueError("must be true or false") from None


def memory_size(value: str) -> int:
    """Bytes: ``12GiB``, ``512MiB`` (powers of 1024), ``12GB`` (powers of 1000) or a plain number."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGT])(i?)B?|B)?", value.strip(), re.IGNORECASE)
    if not match:
        raise ValueError("must be a size such as 12GiB or 800MiB")
    number, prefix, binary = match.groups()
    # A bare letter means the binary unit, as memory is counted: 12G is 12GiB; only GB is decimal.
    decimal = prefix is not None and not binary and value.strip().upper().endswith("B")
    exponent = " KMGT".index(prefix.upper()) if prefix else 0
    size = float(number) * (1000 if decimal else 1024) ** exponent
    if not 1 <= size < 2**63:
        raise ValueError("must be more than 0 bytes, and less than 8 EiB")
    return int(size)


def existing_file(value: str) -> Path:
    path = Path(value).expanduser()
    try:
        with path.open("rb"):
            return path
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None


def api_key(value: str) -> str:
    if not re.fullmatch(r"[\x21-\x7e]+", value):
        raise ValueError("must be printable ASCII without spaces")
    return value


def origin(value: str) -> str:
    """A web origin as browsers spell it: ``https://example.org``, ``http://localhost:3000``; ``*`` for all, ``null`` for
    pages without one (files, sandboxed frames)."""
    spelled = value.strip().lower()
    match = re.fullmatch(r"([a-z][a-z0-9+.-]*)://([^/?#@\s:*]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?/?", spelled)
    if spelled in ("*", "null"):
        return spelled
    if not match:
        raise ValueError("must be scheme://host or scheme://host:port, without a path; or * alone")
    scheme, host, port = match.groups()
    usual = {"http": "80", "https": "443"}.get(scheme)  # browsers leave it out
    return f"{scheme}://{host}" + (f":{port}" if port and port != usual else "")


# Loading.


def add_arguments(parser: argparse.ArgumentParser, config: type) -> None:
    """Adds ``--config`` and one argument per option. Values stay text; `load` parses them."""
    parser.add_argument("--config", metavar="FILE", help="TOML file with the same options")
    for field in dataclasses.fields(config):
        default = field.metadata["shown"] or ("off" if field.default is False else field.default)
        keywords: dict[str, Any] = {"dest": field.name, "default": None}
        if field.metadata["parse"] is boolean:
            keywords |= {"action": "store_const", "const": "true"}
        else:
            keywords["metavar"] = field.metadata["metavar"] or field.name.upper()
            if field.metadata["many"]:
                keywords["action"] = "append"
        help_text = f"{field.metadata['help']} (default: {default})".replace("%", "%%")
        parser.add_argument(flag_name(field.name), help=help_text, **keywords)


def load(config: type[Config], arguments: Mapping[str, str | list[str] | None], environment: Mapping[str, str]) -> Config:
    """Makes a configuration.

    Args: config: a dataclass made of `option` fields; its ``__post_init__`` may raise `StartError`. arguments: of the
        command line, by field name; text, a list of texts, or `None` where not given. ``config`` is the file.
        environment: variables ``PREHEAT_<FIELD>`` are read.

    Raises:
        StartError: a value is not allowed, or the file cannot be read or has an unknown option.
    """
    fields = {field.name: field for field in dataclasses.fields(config)}
    file = arguments.get("config") or environment.get(ENVIRONMENT_PREFIX + "CONFIG")
    from_file = _read_file(str(file), fields) if file else {}
    values = {}
    for name, field in fields.items():
        variable = ENVIRONMENT_PREFIX + name.upper()
        if (argument := arguments.get(name)) is not None:
            values[name] = _parse(field, argument, flag_name(name), "command line")
        elif variable in environment:
            values[name] = _parse(field, environment[variable], variable, "environment")
        elif name in from_file:
            values[name] = _parse(field, from_file[name], name.replace("_", "-"), f"file {file}")
    return config(**values)


def _parse(field: dataclasses.Field[object], value: str | list[str], name: str, source: str) -> object:
    many = field.metadata["many"]
    pieces = [value] if isinstance(value, str) else value
    shown = repr(",".join(pieces)) if field.repr else "(secret)"
    try:
        if many:
            items = [item.strip() for piece in pieces for item in piece.split(",") if item.strip()]
            if not items:
                raise ValueError("must not be empty")
            return tuple(field.metadata["parse"](item) for item in items)
        if len(pieces) != 1:
            raise ValueError("must be a single value, not a list")
        return field.metadata["parse"](pieces[0])
    except ValueError as error:
        raise StartError(f"{name} = {shown} ({source}): {error}") from None


def _read_file(file: str, fields: Mapping[str, dataclasses.Field[object]]) -> dict[str, str | list[str]]:
    """The options of a TOML file, as the texts a command line would have."""
    try:
        content = tomllib.loads(Path(file).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise StartError(f"--config {file}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise StartError(f"--config {file}: not valid TOML: {error}") from None
    values = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1)
            hint = f"; did you mean {near[0].replace('_', '-')}?" if near else ""
            raise StartError(f"--config {file}: unknown option {key!r}{hint}")
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, (str, int, float)) for item in items):
            raise StartError(f"--config {file}: {key} must be a text, a number, true or false, or a list of these")
        texts = [str(item).lower() if isinstance(item, bool) else str(item) for item in items]
        values[name] = texts if isinstance(value, list) else texts[0]
    return values
