"""What layers are made of: linear maps, norms, activations."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from engine import native
from engine.quantization import Quantized

SWIGLU_GAIN, SWIGLU_LIMIT = 1.702, 7.0  # of ``clamped_swiglu``: GPT-OSS's

FEW_ROWS = 32  # up to so many rows, XLA on CPU takes the weight as left operand


def linear(weight: jax.Array | Quantized, x: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x [rows, in] times weight [out, in]: [rows, out]."""
    y: jax.Array
    if native.takes(weight, x.shape[0]):
        y = jax.lax.platform_dependent(weight, x, cpu=native.linear, default=_on_xla)
    else:
        y = _on_xla(weight, x)
    return y if bias is None else y + bias[None]


def _on_xla(weight: jax.Array | Quantized, x: jax.Array) -> jax.Array:
    if isinstance(weight, Quantized):
        scaled: jax.Array = _on_xla(weight.values.astype(x.dtype), x).astype(jnp.float32) * weight.scale[None]
        return scaled.astype(x.dtype)
    if 1 < x.shape[0] <= FEW_ROWS:
        y: jax.Array = jax.lax.platform_dependent(weight, x, cpu=_few_rows_on_cpu, default=_product)
        return y
    return _product(weight, x)


def _product(weight: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.dot_general(weight, x, (((1,), (1,)), ((), ()))).T


def _few_rows_on_cpu(weight: jax.Array, x: jax.Array) -> jax.Array:
    """The weight stays the left operand. XLA would swap the two, and its CPU library then transposes the whole weight at every
    call; the barriers keep it from seeing that it could (docs/decisions.md has the figures)."""
    barrier: Callable[[jax.Array], jax.Array] = jax.lax.optimization_barrier
    return barrier(jax.lax.dot_general(weight, barrier(x.T), (((1,), (0,)), ((), ())))).T


def rms_norm(
    x: jax.Array, weight: jax.Array, eps: float, *, wide: bool = False, mean: Callable[[jax.Array], jax.Array] = lambda mean: mean
) -> jax.Array:
    """Root mean square layer normalization (arXiv:1910.07467) in float32, over as many last dimensions as the weight has.

    With ``wide`` the weight, float32, multiplies before the result is rounded to x's dtype; without it, after. ``mean`` makes the mean
    over all devices of this one's.
    """
    axes = tuple(range(-weight.ndim, 0))
    values = x.astype(jnp.float32)
    normed = values * jax.lax.rsqrt(mean(jnp.mean(jnp.square(values), axis=axes, keepdims=True)) + eps)
    weight = weight[(None,) * (x.ndim - weight.ndim)]
    return (weight * normed).astype(x.dtype) if wide else weight * normed.astype(x.dtype)


def activation(name: str, x: jax.Array) -> jax.Array:
    """The feed-forward activation by its name in `ModelConfig`."""
    match name:
        case "silu":
            return jax.nn.silu(x)
        case "gelu":
            return jax.nn.gelu(x, approximate=False)
        case "gelu_tanh":
            return jax.nn.gelu(x, approximate=True)
    raise ValueError(f"unknown activation {name!r}")


def gated(name: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """The gated linear unit of a feed-forward layer (arXiv:2002.05202)."""
    if name == "clamped_swiglu":
        gate = jnp.minimum(gate, SWIGLU_LIMIT)
        up = jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gate * jax.nn.sigmoid(gate * SWIGLU_GAIN) * (up + 1)
    return activation(name, gate) * up
