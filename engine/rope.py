"""Rotary position embedding (RoFormer, arXiv:2104.09864), in the half-split form of Hugging Face checkpoints."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from engine.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position of each rotated pair: float32 [head_dim / 2].

    ``llama3`` leaves wavelengths below ``original / high_freq_factor`` alone, divides those above ``original /
    low_freq_factor`` by ``factor``, and blends linearly between (the reference code of Llama 3.1).
    """
    frequencies = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        turns = rope.original_max_position * frequencies / (2 * math.pi)  # over the trained length
        keep = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
        frequencies = frequencies * (keep + (1 - keep) / rope.factor)
    return frequencies.astype(np.float32)


def rotation(rope: RopeConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines at ``positions`` int32 [rows]: two float32 arrays [rows, head_dim / 2]."""
    angles = positions.astype(jnp.float32)[:, None] * inverse_frequencies(rope, head_dim)[None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates x [rows, ..., head_dim] by the angles of its row, in float32; the result has x's dtype."""
    broadcast = (slice(None), *([None] * (x.ndim - 2)), slice(None))
    cos, sin = cos[broadcast], sin[broadcast]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
