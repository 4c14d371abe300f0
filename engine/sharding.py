"""Logical axes and the one table that maps them to the mesh.

Every array that lives on the device is described by logical axis names; its sharding follows from the table. The mesh has one
axis, ``tp``: key/value heads (with the query heads that share them), the feed-forward width and the vocabulary are split
over it, everything else is replicated.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

RULES: dict[str | None, str | None] = {
    "kv_heads": "tp",
    "heads": "tp",
    "ffn": "tp",
    "vocab": "tp",
    None: None,
}


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """A mesh over the devices in the order given, which is also the order in which executables are loaded."""
    return Mesh(np.array(devices), ("tp",))


def sharding(mesh: Mesh, axes: Sequence[str | None]) -> NamedSharding:
    """The sharding of an array whose dimensions have these logical names (`None`: replicated)."""
    return NamedSharding(mesh, PartitionSpec(*(RULES[axis] for axis in axes)))


def describe(mesh: Mesh, shape: Sequence[int], dtype: str | np.dtype, axes: Sequence[str | None]) -> jax.ShapeDtypeStruct:
    """The abstract array that creation, loading, lowering and memory planning all start from."""
    if len(shape) != len(axes):
        raise ValueError(f"shape {tuple(shape)} has {len(shape)} dimensions, axes {tuple(axes)} name {len(axes)}")
    return jax.ShapeDtypeStruct(tuple(shape), jax.dtypes.canonicalize_dtype(dtype), sharding=sharding(mesh, axes))


def replicated(mesh: Mesh, shape: Sequence[int], dtype: str | np.dtype) -> jax.ShapeDtypeStruct:
    """An abstract array that every device holds whole."""
    return describe(mesh, shape, dtype, [None] * len(shape))
