"""The decoder: one transformer for every family, configured by `ModelConfig`.

`run_layers` takes the hidden states of some rows through all layers. Rows are the tokens of one prompt chunk in prefill and
one token of each sequence in decode; where keys and values are kept, and what is attended to, is the caller's `Cache`.
"""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp

from engine.config import ModelConfig
from engine.rope import rotate, rotation
from engine.weights import LayerWeights, Weights

Pools = tuple[jax.Array, jax.Array]  # keys and values of one layer group, leading dimension n


class Cache(Protocol):
    """How rows store and attend; made by each program for its own kind of storage."""

    def attend(
        self,
        pools: Pools,
        layer: jax.Array | int,
        q: jax.Array,  # [rows, kv_heads, queries_per_kv, head_dim]
        k: jax.Array,  # [rows, kv_heads, head_dim]
        v: jax.Array,
    ) -> tuple[Pools, jax.Array]:
        """Stores k and v in ``layer`` of the pools, then attends: the new pools, and [rows, kv_heads, queries_per_kv, head_dim]."""


def linear(weight: jax.Array, x: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x [rows, in] times weight [out, in], the weight as left operand: [rows, out]."""
    y = jax.lax.dot_general(weight, x, (((1,), (1,)), ((), ()))).T
    return y if bias is None else y + bias[None]


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root mean square layer normalization (arXiv:1910.07467) in float32."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return weight[None] * normed.astype(x.dtype)


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


def embed(weights: Weights, tokens: jax.Array) -> jax.Array:
    """Hidden states of tokens, int32 [rows] -> [rows, hidden]."""
    with jax.named_scope("embed"):
        return weights.embed.at[tokens].get(mode="clip")


def run_layers(
    model: ModelConfig,
    weights: Weights,
    x: jax.Array,  # [rows, hidden]
    positions: jax.Array,  # int32 [rows]
    keys: tuple[jax.Array, ...],  # one array per layer group
    values: tuple[jax.Array, ...],
    cache: Cache,
) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """All layers: the hidden states [rows, hidden] before the final norm, and the new keys and values."""
    cos_sin = rotation(model.rope, model.head_dim, positions)

    # A function of its own is traced once for all unrolled layers; XLA inlines it, so the donation of the pools holds.
    @jax.jit
    def only_layer(group, x, pools):
        return _layer(model, jax.tree.map(lambda leaf: leaf[0], group), x, cos_sin, pools, 0, cache)

    def all_layers(group, x, pools):
        def step(carry, layer_and_weights):
            layer, one = layer_and_weights
            return _layer(model, one, carry[0], cos_sin, carry[1], layer, cache), None

        return jax.lax.scan(step, (x, pools), (jnp.arange(pools[0].shape[0]), group))[0]

    new_pools = []
    for group, *pools in zip(weights.layers, keys, values, strict=True):
        run = only_layer if pools[0].shape[0] == 1 else all_layers
        x, pools = run(group, x, tuple(pools))
        new_pools.append(pools)
    keys, values = zip(*new_pools, strict=True)
    return x, keys, values


def logits(model: ModelConfig, weights: Weights, x: jax.Array) -> jax.Array:
    """Float32 logits [rows, vocab] of hidden states [rows, hidden] as `run_layers` leaves them."""
    with jax.named_scope("logits"):
        head = weights.embed if weights.head is None else weights.head
        return linear(head, rms_norm(x, weights.final_norm, model.norm_eps)).astype(jnp.float32)


def _layer(
    model: ModelConfig,
    weights: LayerWeights,  # of this layer: no leading dimension
    x: jax.Array,
    cos_sin: tuple[jax.Array, jax.Array],
    pools: Pools,
    layer: jax.Array | int,
    cache: Cache,
) -> tuple[jax.Array, Pools]:
    rows = x.shape[0]
    with jax.named_scope("qkv"):
        normed = rms_norm(x, weights.attention_norm, model.norm_eps)
        bias = None if weights.qkv_bias is None else weights.qkv_bias.reshape(-1)
        qkv = linear(weights.qkv.reshape(-1, model.hidden_size), normed, bias)
        qkv = qkv.reshape(rows, model.num_kv_heads, model.queries_per_kv + 2, model.head_dim)
    with jax.named_scope("rope"):
        queries_and_key = rotate(qkv[:, :, :-1], *cos_sin)
        q, k, v = queries_and_key[:, :, :-1], queries_and_key[:, :, -1], qkv[:, :, -1]
    with jax.named_scope("attention"):
        pools, attended = cache.attend(pools, layer, q, k, v)
        x = x + linear(weights.o, attended.reshape(rows, -1), weights.o_bias)
    with jax.named_scope("mlp"):
        normed = rms_norm(x, weights.mlp_norm, model.norm_eps)
        bias = None if weights.gate_up_bias is None else weights.gate_up_bias.reshape(-1)
        gate_up = linear(weights.gate_up.reshape(-1, model.hidden_size), normed, bias)
        gate, up = jnp.split(gate_up, 2, axis=-1)
        x = x + linear(weights.down, activation(model.activation, gate) * up, weights.down_bias)
    return x, pools
