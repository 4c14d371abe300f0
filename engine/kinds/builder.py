"""What kinds of programs are described with: the abstract trees of an engine, and how a function becomes a `Program`.

Everything here is abstract: nothing is traced, compiled or allocated.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from engine import functions
from engine.config import EngineConfig, ModelConfig, RopeConfig
from engine.kernels import Attention
from engine.programs import Executable, Jitted, Program, tree_bytes
from engine.rope import rotary_dim
from engine.segments import Segment, segments
from engine.sharding import Ways, describe, replicated, split
from engine.state import DecodeState, Prefix
from engine.weights import Weights


@dataclasses.dataclass(frozen=True)
class Builder:
    """``model`` and ``config`` are one device's share, which the functions are for; trees are of whole arrays, abstract."""

    model: ModelConfig
    config: EngineConfig
    batch_sizes: tuple[int, ...]  # of all devices
    ways: Ways
    mesh: Mesh
    attention: Attention
    weights: Weights
    state: DecodeState
    prefix: Prefix
    chains: dict[str, tuple[Segment, ...]] = dataclasses.field(default_factory=dict)  # what `chain` cut, by its name

    def host(self, *shape: int) -> jax.ShapeDtypeStruct:
        """int32 that every device has."""
        return replicated(self.mesh, shape, "int32")

    def per_row(self, *shape: int, dtype: str | np.dtype = "int32") -> jax.ShapeDtypeStruct:
        """An array whose first dimension, rows of a step or tokens of a chunk, is shared out to the groups."""
        return describe(self.mesh, shape, dtype, ("rows", *[None] * (len(shape) - 1)))

    def program(
        self,
        name: str,
        function: Executable,
        arguments: tuple[object, ...],
        outputs: object,
        *,
        donates: int | None = None,
        takes_state: bool = False,
        loads: bool = False,
        rows: int = 0,
        decodes: bool = False,
    ) -> Program:
        """A row of the table. The function's name is the XLA program's: see `named`. For the rest see `Program`."""
        jitted = jax.jit(
            split(function, self.mesh, arguments, outputs) if arguments else function,
            donate_argnums=() if donates is None else donates,
            in_shardings=jax.tree.map(lambda leaf: leaf.sharding, arguments),
            out_shardings=jax.tree.map(lambda leaf: leaf.sharding, outputs),
        )
        # What JAX calls its type has no clear_cache.
        return Program(name, cast(Jitted, jitted), arguments, donates, takes_state, loads, rows, decodes)

    def chain(
        self,
        name: str,
        functions_of: Callable[[str], Executable],
        *,
        rows: int,
        cache: functions.PrefixCache | functions.PagedCache,
        adapters: jax.ShapeDtypeStruct | None,
        carried: DecodeState | Prefix,
        request: jax.ShapeDtypeStruct,
        outputs: tuple[object, ...],
        end_outputs: tuple[object, ...] | None = None,
        takes_state: bool = False,
        decodes: bool = False,
    ) -> Iterator[Program]:
        """The programs of a verb that runs the layers: one, or those of its segments (``engine/segments.py``).

        Args:
            name: "generate/8".
            functions_of: for ``""``, ``"begin_"`` and ``"end_"`` the whole of it, what is before the layers and what is behind
                them, bound to all but their arrays: the whole takes (carried, weights, request), the others the same without
                pools and layers, ``end_`` the hidden states too.
            rows: that run through the layers.
            cache, adapters: what layers need to know of them, abstract.
            carried: what is donated and comes back first, before ``outputs``.
            end_outputs: the outputs of the last of several programs, where they differ.
        """
        kind, _, size = name.partition("/")
        whole, begin, end = (named(f"{part}{kind}_{size}", functions_of(part)) for part in ("", "begin_", "end_"))
        parts = segments(self.model, self.config, rows // self.ways.groups, tree_bytes(self.weights.layers[0]))
        program = functools.partial(self.program, rows=rows, decodes=decodes)
        donating = functools.partial(program, donates=0, takes_state=takes_state)
        if not parts:
            yield donating(name, whole, (carried, self.weights, request), (carried, *outputs))
            return
        self.chains[name] = parts
        rest, outer = carried.with_pools((), ()), dataclasses.replace(self.weights, layers=())
        x = self.per_row(rows, self.model.hidden_size, dtype=self.config.dtype)
        about = functions.Rows(tuple(self._rotation(layers.rope, rows) for layers in self.model.kinds), cache, adapters)
        yield program(f"{name}/begin", begin, (rest, outer, request), (x, about))
        for segment in {segment.part: segment for segment in reversed(parts)}.values():
            run = functools.partial(functions.run_layers, self.model, self.ways, self.attention, segment.pattern)
            pools = segment.of_pools(carried.pools)
            arguments = (pools, self.weights.layers[segment.layers], x, about)
            yield donating(f"{name}/{segment.part}", named(f"{kind}_{size}_{segment.part}", run), arguments, (pools, x))
        yield donating(f"{name}/end", end, (rest, outer, request, x), (rest, *(end_outputs or outputs)))

    def _rotation(self, rope: RopeConfig | None, rows: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct] | None:
        if rope is None:
            return None
        angles = self.per_row(rows, rotary_dim(rope, self.model.head_dim) // 2, dtype="float32")
        return angles, angles


def named(name: str, function: Executable, *bound: object) -> Executable:
    """The function, its first arguments bound, under a name: jit names the program after it, and profiles and logs then read
    like the table.
    """
    partial = functools.partial(function, *bound)
    partial.__name__ = name  # type: ignore[attr-defined]  # any attribute may be set
    return partial


def zeros(name: str, abstract: object) -> Executable:
    """Makes a tree of whole arrays: XLA makes each device's part."""
    return named(name, lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract))
