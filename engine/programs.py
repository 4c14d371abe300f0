"""The table of programs: every XLA program that serving can ever call.

Everything about compiling derives from this table. Manual warmup runs each row, ahead-of-time warmup loads or compiles each
row, the memory plan sums each row, the report shows each row, and a cross-target build lowers each row for another machine.
Serving calls programs by their name in the table and in no other way, so nothing can compile after the table is warm.

Here is what a row is; each kind of row is a module of ``engine/kinds``, and ``engine/table.py`` puts the table together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax

Executable = Callable[..., Any]  # a program, compiled or jitted: pytrees of arrays in, pytrees out


class Jitted(Protocol):
    """What `jax.jit` makes, as far as it is used here."""

    def __call__(self, *arguments: Any) -> Any: ...

    def trace(self, *arguments: Any) -> jax.stages.Traced: ...

    def clear_cache(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Program:
    """One XLA program.

    ``function`` is jitted with its donations declared, and is what both warmup modes compile. It must be lowered directly: jit
    around it would lose the donation, and with it half of the memory (docs/why-aot-was-slow.md).
    """

    name: str  # "prefill/256", "insert", "generate/8", "generate/8/layers"
    function: Jitted  # donating; positional arguments only
    arguments: tuple[object, ...]  # pytrees of jax.ShapeDtypeStruct with shardings, one per positional argument
    donates: int | None = None  # index of the donated argument (decode state or prefix), whose bytes must all be aliased
    takes_state: bool = False  # the donated argument is the decode state
    loads: bool = False  # puts weights together, before there are any: whoever loads them runs it
    rows: int = 0  # that run through layers, or are embedded or scored on the way; of all groups
    decodes: bool = False  # each row is a sequence of its own; else they follow one another in one

    @property
    def chain(self) -> str:
        """The verb and size it belongs to: "generate/8" of "generate/8/layers". Programs of a chain run one after the other."""
        return "/".join(self.name.split("/")[:2])

    def trace(self) -> jax.stages.Traced:
        """The traced function: ``.lower()`` and ``.compile()`` follow."""
        return self.function.trace(*self.arguments)

    @property
    def donated_bytes(self) -> int:
        """Bytes of the donated argument on one device; 0 where none is donated."""
        if self.donates is None:
            return 0
        return tree_bytes(self.arguments[self.donates])


def bytes_per_device(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes that an array of this description takes on each device."""
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    size: int = leaf.dtype.itemsize
    for extent in shape:
        size *= extent
    return size


def tree_bytes(tree: object) -> int:
    """Bytes of abstract arrays on each device."""
    return sum(bytes_per_device(leaf) for leaf in jax.tree.leaves(tree))
