"""Mixture of experts: each token goes through a few of many feed-forward layers.

Tokens are sorted by expert, so that each expert's are consecutive rows, and only the experts that were chosen are read and
multiplied. `jax.lax.ragged_dot` says just that, but only the TPU compiler carries it out as said: on CPU and GPU it becomes one
product with all experts, most of it zeros (measured on CPU, jax 0.10 and 0.12: 32 times the operations with 32 experts). There the
rows are visited in blocks instead, each block with its expert's matrices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from engine.config import ModelConfig
from engine.layers import gated, linear
from engine.weights import LayerWeights

MAX_BLOCK = 128  # rows multiplied at once


def mixture(model: ModelConfig, weights: LayerWeights, x: jax.Array) -> jax.Array:
    """The feed-forward layer of x [rows, hidden]: [rows, hidden]."""
    moe = model.moe
    with jax.named_scope("route"):
        scores = linear(weights.router, x, weights.router_bias).astype(jnp.float32)
        probabilities, chosen = jax.lax.top_k(jax.nn.softmax(scores), moe.per_token)  # [rows, per_token]
        if moe.normalize:
            probabilities /= jnp.sum(probabilities, axis=-1, keepdims=True)
        experts = chosen.reshape(-1)
        order = jnp.argsort(experts, stable=True)
        sizes = jnp.zeros(moe.experts, jnp.int32).at[experts].add(1)
        tokens = x[order // moe.per_token]  # [rows * per_token, hidden], sorted by expert
    with jax.named_scope("experts"):
        out = jax.lax.platform_dependent(tokens, sizes, weights, tpu=_ragged(model), default=_blocks(model))
        out = out[jnp.argsort(order)].reshape(x.shape[0], moe.per_token, -1)
        return jnp.sum(out.astype(jnp.float32) * probabilities[..., None], axis=1).astype(x.dtype)


def _blocks(model: ModelConfig):
    """Blocks of consecutive rows, each with the matrices of the expert that its first row belongs to.

    An expert's last block may reach into the rows of the next, which overwrites them with its own.
    """

    def run(tokens: jax.Array, sizes: jax.Array, weights: LayerWeights) -> jax.Array:
        rows, hidden = tokens.shape
        experts = sizes.shape[0]
        block = min(MAX_BLOCK, 1 << max(0, (rows // experts - 1).bit_length()))
        most = min(rows, rows // block + experts)
        blocks = (sizes + block - 1) // block  # of each expert
        ends, starts = jnp.cumsum(blocks), jnp.cumsum(sizes) - sizes
        index = jnp.arange(most, dtype=jnp.int32)
        expert = jnp.minimum(jnp.searchsorted(ends, index, side="right"), experts - 1).astype(jnp.int32)
        first_row = starts[expert] + (index - (ends - blocks)[expert]) * block
        padded = jnp.concatenate([tokens, jnp.zeros((block - 1, hidden), tokens.dtype)])

        def visit(i: jax.Array, out: jax.Array) -> jax.Array:
            def one(leaf: jax.Array | None) -> jax.Array | None:
                return None if leaf is None else leaf[expert[i]]

            part = jax.lax.dynamic_slice_in_dim(padded, first_row[i], block)
            bias = one(weights.gate_up_bias)
            gate_up = linear(one(weights.gate_up).reshape(-1, hidden), part, None if bias is None else bias.reshape(-1))
            gate, up = jnp.split(gate_up, 2, axis=-1)
            part = linear(one(weights.down), gated(model.activation, gate, up), one(weights.down_bias))
            return jax.lax.dynamic_update_slice_in_dim(out, part, first_row[i], axis=0)

        return jax.lax.fori_loop(0, ends[-1], visit, jnp.zeros_like(padded))[:rows]

    return run


def _ragged(model: ModelConfig):
    """Two products over all rows, with the matrices of each row's expert."""
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )

    def run(tokens: jax.Array, sizes: jax.Array, weights: LayerWeights) -> jax.Array:
        def product(x: jax.Array, matrices: jax.Array, biases: jax.Array | None) -> jax.Array:
            out = jax.lax.ragged_dot_general(x, matrices, sizes, numbers)
            if biases is None:
                return out
            return out + jnp.repeat(biases, sizes, axis=0, total_repeat_length=x.shape[0])

        experts, _, ffn, hidden = weights.gate_up.shape
        bias = None if weights.gate_up_bias is None else weights.gate_up_bias.reshape(experts, -1)
        gate, up = jnp.split(product(tokens, weights.gate_up.reshape(experts, 2 * ffn, hidden), bias), 2, axis=-1)
        return product(gated(model.activation, gate, up), weights.down, weights.down_bias)

    return run
