"""Rotary position embedding (RoFormer, arXiv:2104.09864), in the half-split form of Hugging Face checkpoints.

The frequencies of most kinds are constants of the program. Those of ``dynamic`` and ``longrope`` follow the length of
the whole sequence, which a row brings along as its ``context``: as transformers does it, a prompt is rotated by the
frequencies of its own length, and each token decoded after it by those of the length it makes."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from engine.config import RopeConfig


def rotary_dim(rope: RopeConfig, head_dim: int) -> int:
    """How many dimensions of a head are rotated."""
    return head_dim if rope.rotary_dim is None else rope.rotary_dim


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position of each rotated pair, in a sequence not longer than the original: float32 [rotary_dim / 2].

    ``linear`` divides all by ``factor``. ``llama3`` leaves wavelengths below ``original / high_freq_factor`` alone,
    divides those above ``original / low_freq_factor`` by ``factor``, and blends linearly between (the reference code of
    Llama 3.1). ``yarn`` (arXiv:2309.00071) blends by the pair's index between the pairs that turn ``beta_fast`` and
    ``beta_slow`` times over the original length. ``longrope`` (arXiv:2402.13753) divides each pair by a factor of its
    own."""
    dim = rotary_dim(rope, head_dim)
    frequencies = rope.theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    match rope.kind:
        case "linear":
            frequencies = frequencies / rope.factor
        case "llama3":
            turns = rope.original_max_position * frequencies / (2 * math.pi)  # over the trained length
            keep = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
            frequencies = frequencies * (keep + (1 - keep) / rope.factor)
        case "yarn":
            keep = _yarn_keep(rope, dim)
            frequencies = frequencies * (keep + (1 - keep) / rope.factor)
        case "longrope":
            frequencies = frequencies / np.array(rope.short_factor)
    return frequencies.astype(np.float32)


def _yarn_keep(rope: RopeConfig, dim: int) -> np.ndarray:
    """How much of each pair's own frequency stays: 1 for fast pairs, 0 for slow ones."""

    def pair_turning(turns: float) -> float:
        return dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    moved: np.ndarray = np.clip((np.arange(dim // 2) - low) / width, 0.0, 1.0)
    return 1 - moved


def rotation(rope: RopeConfig, head_dim: int, positions: jax.Array, context: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines at ``positions`` int32 [rows], in sequences of ``context`` int32 [rows] tokens: two float32
    arrays [rows, rotary_dim / 2]."""
    frequencies = jnp.asarray(inverse_frequencies(rope, head_dim))[None, :]
    dim = rotary_dim(rope, head_dim)
    if rope.kind == "longrope":
        ratio = np.array(rope.short_factor) / np.array(rope.long_factor)
        longer = frequencies * jnp.asarray(ratio.astype(np.float32))[None, :]
        frequencies = jnp.where((context > rope.original_max_position)[:, None], longer, frequencies)
    elif rope.kind == "dynamic":
        # The base grows with the length by stretch ** (dim / (dim - 2)), hence pair i slows down by stretch ** (2 i / (dim - 2)).
        length = jnp.maximum(context, rope.original_max_position).astype(jnp.float32)
        stretch = rope.factor * length / rope.original_max_position - (rope.factor - 1)
        power = (np.arange(0, dim, 2) / (dim - 2)).astype(np.float32)
        frequencies = frequencies * jnp.exp(-jnp.log(stretch)[:, None] * power[None, :])
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if rope.attention_factor != 1.0:
        cos, sin = cos * rope.attention_factor, sin * rope.attention_factor
    return cos, sin


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first dimensions of x [rows, ..., head_dim] by the angles of its row, in float32; the result has x's
    dtype."""
    broadcast = (slice(None), *([None] * (x.ndim - 2)), slice(None))
    dim = 2 * cos.shape[-1]
    cos, sin = cos[broadcast], sin[broadcast]
    first, second = jnp.split(x[..., :dim].astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    if dim == x.shape[-1]:
        return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
    return jnp.concatenate([*(part.astype(x.dtype) for part in rotated), x[..., dim:]], axis=-1)
