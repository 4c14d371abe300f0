"""The decoder: one transformer for every family, configured by `ModelConfig`.

It is written as one device runs it: the model is that device's share (`engine.sharding.device_model`), and where the shares meet is
said by `Ways`. Hidden states are whole on every device, of its own rows.

`run_layers` takes the hidden states of some rows through consecutive layers. Rows are the tokens of one prompt chunk in prefill and
one token of each sequence in decode; where keys and values are kept, and what is attended to, is the caller's `Cache`.

Layers may be of several kinds (`LayerKind`). Unrolled, a layer's kind is static: each kind is traced once. Scanned, what differs
between kinds is looked up in small arrays by the layer's number.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from engine.adapters import change
from engine.attention import Scoring
from engine.config import ModelConfig
from engine.layers import gated, linear, rms_norm
from engine.moe import mixture
from engine.quantization import Array, Quantized
from engine.rope import rotary_dim, rotate, rotation
from engine.sharding import TENSOR, Ways
from engine.weights import LayerWeights, Weights

Pool = jax.Array | Quantized
Pools = tuple[Pool, Pool]  # keys and values of one layer group, leading dimension n
CosSin = tuple[jax.Array, jax.Array]
KindAsData = Callable[[jax.Array], tuple[CosSin | None, jax.Array | int | None]]

_EVERYTHING = 2**30  # tokens: the window of layers without one, beside layers with one


class Cache(Protocol):
    """How rows store and attend; made by each program for its own kind of storage."""

    def attend(
        self,
        pools: Pools,
        layer: jax.Array | int,
        q: jax.Array,  # [rows, kv_heads, queries_per_kv, head_dim]
        k: jax.Array,  # [rows, kv_heads, head_dim]
        v: jax.Array,
        scoring: Scoring,
        window: jax.Array | int | None,
        sinks: jax.Array | None,  # [kv_heads, queries_per_kv]
    ) -> tuple[Pools, jax.Array]:
        """Stores k and v in ``layer`` of the pools, then attends: the new pools, and [rows, kv_heads, queries_per_kv, head_dim]."""


def embed(model: ModelConfig, ways: Ways, weights: Weights, tokens: jax.Array) -> jax.Array:
    """Hidden states of tokens, int32 [rows] -> [rows, hidden]."""
    with jax.named_scope("embed"):
        x = _look_up(ways, weights.embed, jnp.clip(tokens, 0, model.vocab_size - 1))
        return x if model.embed_scale == 1.0 else x * jnp.asarray(model.embed_scale, x.dtype)


def _look_up(ways: Ways, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of a table that is split by rows: those of others are zero, and added."""
    if ways.tensor == 1:
        return table.at[tokens].get(mode="promise_in_bounds")
    places = tokens - ways.index(TENSOR) * table.shape[0]
    mine = (places >= 0) & (places < table.shape[0])
    found = table.at[jnp.where(mine, places, 0)].get(mode="promise_in_bounds")
    return ways.sum(jnp.where(mine[:, None], found, jnp.zeros_like(found)), TENSOR)


def rotary(model: ModelConfig, positions: jax.Array, context: jax.Array) -> tuple[CosSin | None, ...]:
    """The rotary embedding of each kind of layer at ``positions`` int32 [rows]. ``context`` int32 [rows]: tokens of the whole
    sequence, for embeddings that follow it."""
    return tuple(
        None if kind.rope is None else rotation(kind.rope, model.head_dim, positions, context) for kind in model.kinds
    )


def run_layers(
    model: ModelConfig,
    ways: Ways,
    pattern: tuple[int, ...],  # the kind of each layer that runs
    layers: tuple[LayerWeights, ...],  # their weights, one group after the other
    x: jax.Array,  # [rows, hidden]
    rotations: tuple[CosSin | None, ...],  # of each kind
    keys: tuple[Pool, ...],  # one array per group
    values: tuple[Pool, ...],
    cache: Cache,
    adapters: jax.Array | None,  # int32 [rows], or [1] where all rows have the same: `engine.adapters`
) -> tuple[jax.Array, tuple[Pool, ...], tuple[Pool, ...]]:
    """Consecutive layers: the hidden states [rows, hidden] behind them, and the new keys and values."""

    # A function of its own is traced once for all unrolled layers of a kind; XLA inlines it, so the donation of the pools holds.
    @functools.partial(jax.jit, static_argnums=0)
    def only_layer(kind: int, group: LayerWeights, x: jax.Array, pools: Pools) -> tuple[jax.Array, Pools]:
        group, experts = _part_experts(model, group)
        one = dataclasses.replace(jax.tree.map(lambda leaf: leaf[0], group), **experts)
        return _layer(model, ways, one, x, rotations[kind], model.kinds[kind].window, pools, 0, cache, adapters)

    def all_layers(
        pattern: tuple[int, ...], group: LayerWeights, x: jax.Array, pools: Pools
    ) -> tuple[jax.Array, Pools]:
        look_up = _kinds_as_data(model, pattern, rotations, x.shape[0])
        group, experts = _part_experts(model, group)

        def step(
            carry: tuple[jax.Array, Pools], layer_and_weights: tuple[jax.Array, LayerWeights]
        ) -> tuple[tuple[jax.Array, Pools], None]:
            (x, pools), (layer, one) = carry, layer_and_weights
            cos_sin, window = look_up(layer)
            one = dataclasses.replace(one, **experts)
            return _layer(model, ways, one, x, cos_sin, window, pools, layer, cache, adapters), None

        done, _ = jax.lax.scan(step, (x, pools), (jnp.arange(len(pattern)), group))
        return done

    new_keys, new_values, first = [], [], 0
    for group, group_keys, group_values in zip(layers, keys, values, strict=True):
        kinds = pattern[first : (first := first + group_keys.shape[0])]
        run = functools.partial(only_layer, kinds[0]) if len(kinds) == 1 else functools.partial(all_layers, kinds)
        x, (group_keys, group_values) = run(group, x, (group_keys, group_values))
        new_keys.append(group_keys)
        new_values.append(group_values)
    return x, tuple(new_keys), tuple(new_values)


def logits(model: ModelConfig, ways: Ways, weights: Weights, x: jax.Array) -> jax.Array:
    """Float32 logits [rows, vocab] of hidden states [rows, hidden] as the last layer leaves them."""
    with jax.named_scope("logits"):
        head = weights.embed if weights.head is None else weights.head
        scores = ways.join(linear(head, _norm(model, x, weights.final_norm)), TENSOR, 1).astype(jnp.float32)
        if model.logit_scale != 1.0:
            scores *= model.logit_scale
        if model.logit_softcap is not None:
            scores = model.logit_softcap * jnp.tanh(scores / model.logit_softcap)
        return scores


def _kinds_as_data(model: ModelConfig, pattern: tuple[int, ...], rotations: tuple[CosSin | None, ...], rows: int) -> KindAsData:
    """A function from the layer's number within its group to its rotation and window; constants where all layers agree."""
    kinds = sorted(set(pattern))
    if len(kinds) == 1:
        return lambda layer: (rotations[kinds[0]], model.kinds[kinds[0]].window)
    widths = {rotary_dim(kind.rope, model.head_dim) for kind in model.kinds if kind.rope is not None}
    if len(widths) > 1:
        raise ValueError(f"layers that rotate {sorted(widths)} dimensions cannot be scanned together")
    still = (jnp.ones((rows, max(widths) // 2)), jnp.zeros((rows, max(widths) // 2)))  # rotates by nothing
    cos, sin = (jnp.stack(parts) for parts in zip(*(still if pair is None else pair for pair in rotations), strict=True))
    windows = np.array([kind.window or _EVERYTHING for kind in model.kinds], np.int32)
    number = jnp.asarray(np.array(pattern, np.int32))

    def look_up(layer: jax.Array) -> tuple[CosSin, jax.Array | None]:
        kind = number[layer]
        return (cos[kind], sin[kind]), jnp.asarray(windows)[kind] if windows.min() < _EVERYTHING else None

    return look_up


def _part_experts(model: ModelConfig, group: LayerWeights) -> tuple[LayerWeights, dict[str, Array | None]]:
    """The weights without those of experts, and these, which are not sliced by layer: `engine.moe.mixture` does so itself."""
    if model.moe is None:
        return group, {}
    experts = {name: getattr(group, name) for name in ("gate_up", "gate_up_bias", "down", "down_bias")}
    return dataclasses.replace(group, **dict.fromkeys(experts)), experts


def _norm(model: ModelConfig, x: jax.Array, weight: jax.Array | None) -> jax.Array:
    """The norm, or x itself where the model has none here."""
    return x if weight is None else rms_norm(x, weight, model.norm_eps, wide=model.wide_norms)


def _norm_heads(model: ModelConfig, ways: Ways, x: jax.Array, weight: jax.Array | None) -> jax.Array:
    """The norm of queries or keys. Over all heads, it is over all devices; copies of KV heads do not change a mean."""
    assert weight is not None
    across = ways if model.qk_norm == "projection" else Ways()

    def mean(mean: jax.Array) -> jax.Array:
        return across.sum(mean, TENSOR) / across.tensor

    return rms_norm(x, weight, model.norm_eps, wide=model.wide_norms, mean=mean)


def _layer(
    model: ModelConfig,
    ways: Ways,
    weights: LayerWeights,  # of this layer: no leading dimension, but for experts
    x: jax.Array,
    cos_sin: CosSin | None,
    window: jax.Array | int | None,
    pools: Pools,
    layer: jax.Array | int,
    cache: Cache,
    adapters: jax.Array | None,
) -> tuple[jax.Array, Pools]:
    rows, low_rank = x.shape[0], weights.adapters
    with jax.named_scope("qkv"):
        normed = _norm(model, x, weights.attention_norm)
        bias = None if weights.qkv_bias is None else weights.qkv_bias.reshape(-1)
        qkv = linear(weights.qkv.reshape(-1, model.hidden_size), normed, bias)
        qkv = qkv.reshape(rows, model.num_kv_heads, model.queries_per_kv + 2, model.head_dim)
        if low_rank is not None and adapters is not None and low_rank.qkv is not None:
            qkv += change(low_rank.qkv, adapters, normed).swapaxes(1, 2)
        queries_and_key = qkv[:, :, :-1]
        if model.qk_norm != "none":
            q, k = qkv[:, :, :-2], qkv[:, :, -2]
            q, k = _norm_heads(model, ways, q, weights.q_norm), _norm_heads(model, ways, k, weights.k_norm)
            queries_and_key = jnp.concatenate([q, k[:, :, None]], axis=2)
    with jax.named_scope("rope"):
        if cos_sin is not None:
            queries_and_key = rotate(queries_and_key, *cos_sin)
        q, k, v = queries_and_key[:, :, :-1], queries_and_key[:, :, -1], qkv[:, :, -1]
    with jax.named_scope("attention"):
        scale = model.head_dim**-0.5 if model.query_scale is None else model.query_scale
        scoring = Scoring(scale, model.attention_softcap)
        pools, attended = cache.attend(pools, layer, q, k, v, scoring, window, weights.sinks)
        attended = attended.reshape(rows, -1)
        out = linear(weights.o, attended)
        if low_rank is not None and adapters is not None and low_rank.o is not None:
            out += change(low_rank.o, adapters, attended)[:, 0]
        out = _add_bias(ways.sum(out, TENSOR), weights.o_bias)
        x = _add(model, x, _norm(model, out, weights.attention_post_norm))
    with jax.named_scope("mlp"):
        normed = _norm(model, x, weights.mlp_norm)
        if model.moe is None:
            out = _mlp(model, ways, weights, normed, adapters)
        else:
            out = mixture(model, ways, weights, layer, normed)
        x = _add(model, x, _norm(model, out, weights.mlp_post_norm))
    return x, pools


def _mlp(model: ModelConfig, ways: Ways, weights: LayerWeights, x: jax.Array, adapters: jax.Array | None) -> jax.Array:
    low_rank = weights.adapters
    bias = None if weights.gate_up_bias is None else weights.gate_up_bias.reshape(-1)
    gate_up = linear(weights.gate_up.reshape(-1, model.hidden_size), x, bias)
    if low_rank is not None and adapters is not None and low_rank.gate_up is not None:
        gate_up += change(low_rank.gate_up, adapters, x).reshape(gate_up.shape)
    gate, up = jnp.split(gate_up, 2, axis=-1)
    inner = gated(model.activation, gate, up)
    out = linear(weights.down, inner)
    if low_rank is not None and adapters is not None and low_rank.down is not None:
        out += change(low_rank.down, adapters, inner)[:, 0]
    return _add_bias(ways.sum(out, TENSOR), weights.down_bias)


def _add_bias(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    return x if bias is None else x + bias[None]


def _add(model: ModelConfig, x: jax.Array, change: jax.Array) -> jax.Array:
    return x + change if model.residual_scale == 1.0 else x + change * jnp.asarray(model.residual_scale, x.dtype)
