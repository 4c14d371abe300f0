"""Int8 with one scale per row: weights per output channel, keys and values per token and head.

Symmetric: a row's largest magnitude becomes 127. Products take the integers in the other operand's type and scale what
comes out, so that on accelerators a quarter (float32) or half (bfloat16) of the bytes is read.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

Array = Any  # jax.Array, numpy.ndarray, or jax.ShapeDtypeStruct in abstract trees

LARGEST = 127


@struct.dataclass
class Quantized:
    """An array whose rows, along the last dimension, are int8 times a scale each. Shape and index are those of the array."""

    values: Array  # int8 [..., row]
    scale: Array  # float32 [...]

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.values.shape
        return shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def reshape(self, *shape: int) -> Quantized:
        """The same rows in another order of dimensions; the last one stays."""
        return Quantized(self.values.reshape(*shape), self.scale.reshape(*shape[:-1]))

    def __getitem__(self, index: Any) -> Quantized:
        """Indexes any dimension but the last."""
        return Quantized(self.values[index], self.scale[index])


def quantize(x: Array, xp: ModuleType = jnp) -> Quantized:
    """Rounds each row to the nearest of 255 levels. ``xp`` is ``jax.numpy`` or ``numpy``; the error is at most half a scale."""
    x = x.astype(xp.float32)
    scale = xp.max(xp.abs(x), axis=-1) / xp.float32(LARGEST)
    divisor = xp.where(scale > 0, scale, xp.float32(1))
    return Quantized(xp.round(x / divisor[..., None]).astype(xp.int8), scale)


def dequantize(x: Quantized | jax.Array, dtype: Any) -> jax.Array:
    """The array itself; what is not quantized stays as it is."""
    if not isinstance(x, Quantized):
        return x
    values: jax.Array = x.values.astype(jnp.float32) * x.scale[..., None]
    return values.astype(dtype)
