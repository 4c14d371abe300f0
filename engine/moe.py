"""Mixture of experts: each token goes through a few of many feed-forward layers.

Tokens are sorted by expert, so that each expert's are consecutive rows, and visited in blocks of rows, each with the
matrices of its expert: only the experts that were chosen are read and multiplied. `jax.lax.ragged_dot` says the same in
one operation, but the compilers carry it out as a product of all rows with all experts, most of it zeros (measured with
jax 0.10 and 0.12 on CPU, and by compiling for v5e: as many times the operations as there are experts).

Where experts are split over devices (``--ep``), every device gets the tokens of all of them, runs those that chose an expert of its own,
and gets back the sums of its own tokens. That moves each token to all devices and not only to those of its experts, but
``per_token`` is rarely much smaller than the number of devices (Qwen3-MoE: 8 of 128), and the sizes of an exchange of
exactly what is needed are not known when the program is compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from engine.config import ModelConfig
from engine.layers import gated, linear
from engine.quantization import Array
from engine.sharding import EXPERT, TENSOR, Ways
from engine.weights import LayerWeights

MAX_BLOCK = 128  # rows multiplied at once


def mixture(model: ModelConfig, ways: Ways, weights: LayerWeights, layer: jax.Array | int, x: jax.Array) -> jax.Array:
    """The feed-forward layer of x [rows, hidden]: [rows, hidden].

    The experts' matrices are those of a whole group of layers, of which this is number ``layer``: a slice of one
    layer's would copy all its experts."""
    moe = model.moe
    assert moe is not None and weights.router is not None
    here = moe.experts // ways.expert  # experts of this device
    with jax.named_scope("route"):
        x = ways.join(x, EXPERT, 0)
        scores = linear(weights.router, x, weights.router_bias).astype(jnp.float32)
        probabilities, chosen = jax.lax.top_k(jax.nn.softmax(scores), moe.per_token)  # [rows, per_token]
        if moe.normalize:
            probabilities /= jnp.sum(probabilities, axis=-1, keepdims=True)
        experts = chosen.reshape(-1) - ways.index(EXPERT) * here
        mine = (experts >= 0) & (experts < here)
        if ways.expert > 1:
            experts = jnp.where(mine, experts, here)  # others' come last
        order = jnp.argsort(experts, stable=True)
        sizes = jnp.zeros(here, jnp.int32).at[experts].add(1, mode="drop")
        tokens = x[order // moe.per_token]  # [rows * per_token, hidden], sorted by expert
    with jax.named_scope("experts"):
        out = _experts(model, ways, weights, layer, tokens, sizes)[jnp.argsort(order)]
        if ways.expert > 1:
            out = jnp.where(mine[:, None], out, jnp.zeros_like(out))
        out = out.reshape(x.shape[0], moe.per_token, -1)
        out = jnp.sum(out.astype(jnp.float32) * probabilities[..., None], axis=1).astype(x.dtype)
        return ways.sum(ways.share(out, EXPERT, 0), TENSOR)


def _experts(
    model: ModelConfig, ways: Ways, weights: LayerWeights, layer: jax.Array | int, tokens: jax.Array, sizes: jax.Array
) -> jax.Array:
    """Each row of ``tokens`` through its expert; the first ``sizes[0]`` rows are expert 0's, and so on. Rows beyond may be anything.

    An expert's last block may reach into the rows of the next, which overwrites them with its own.
    """
    assert model.moe is not None
    rows, hidden = tokens.shape
    experts = sizes.shape[0]
    block = min(MAX_BLOCK, 1 << max(0, (rows // model.moe.experts - 1).bit_length()))
    most = min(rows, rows // block + experts)
    blocks = (sizes + block - 1) // block  # of each expert
    ends, starts = jnp.cumsum(blocks), jnp.cumsum(sizes) - sizes
    index = jnp.arange(most, dtype=jnp.int32)
    expert = jnp.minimum(jnp.searchsorted(ends, index, side="right"), experts - 1).astype(jnp.int32)
    first_row = starts[expert] + (index - (ends - blocks)[expert]) * block
    padded = jnp.concatenate([tokens, jnp.zeros((block - 1, hidden), tokens.dtype)])

    def visit(i: jax.Array, out: jax.Array) -> jax.Array:
        def one(leaf: Array) -> Array:
            return leaf[layer, expert[i]]

        part = jax.lax.dynamic_slice_in_dim(padded, first_row[i], block)
        bias = None if weights.gate_up_bias is None else one(weights.gate_up_bias).reshape(-1)
        gate_up = linear(one(weights.gate_up).reshape(-1, hidden), part, bias)
        gate, up = jnp.split(gate_up, 2, axis=-1)
        part = linear(one(weights.down), gated(model.activation, gate, up))
        if weights.down_bias is not None:
            part += ways.only(one(weights.down_bias), TENSOR)[None]  # sums over devices count it once
        return jax.lax.dynamic_update_slice_in_dim(out, part, first_row[i], axis=0)

    out: jax.Array = jax.lax.fori_loop(0, ends[-1], visit, jnp.zeros_like(padded))
    return out[:rows]
