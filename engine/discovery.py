"""Registries that nobody has to list anything in: what a package's modules declare is found.

Model families, quantized formats, kinds of programs, forms of tool calls and endpoints are packages whose modules each
declare one of them; adding one is adding a file (``docs/contributing.md``). Modules are read in the order of their names,
so every process finds the same things in the same order.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import TypeVar

Declared = TypeVar("Declared")


def modules(package: str) -> Iterator[ModuleType]:
    """The modules right in a package, imported, by their names. The package may be the one that is being imported."""
    path = importlib.import_module(package).__path__
    for name in sorted(module.name for module in pkgutil.iter_modules(path)):
        yield importlib.import_module(f"{package}.{name}")


def declared(package: str, kind: type[Declared]) -> tuple[Declared, ...]:
    """Every ``kind`` that stands at the top of a module of a package, in the order of modules and lines; each once, however many
    modules name it.
    """
    found = {id(value): value for module in modules(package) for value in vars(module).values() if isinstance(value, kind)}
    return tuple(found.values())


def unique(values: tuple[Declared, ...], *attributes: str) -> tuple[Declared, ...]:
    """The same values. Raises `ValueError` where two of them have an attribute in common, by which they are found: one of the two
    would never be.
    """
    for attribute in attributes:
        known: dict[object, Declared] = {}
        for value in values:
            other = known.setdefault(getattr(value, attribute), value)
            if other is not value:
                raise ValueError(f"two things have the {attribute} {getattr(value, attribute)!r}: {other} and {value}")
    return values
