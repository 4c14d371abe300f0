"""The weights of the decoder, as one abstract description.

`abstract_weights` feeds the loader, the sharding, the memory plan and every lowering. Layers come in groups of consecutive
layers that run as one scan: unrolled, each group holds one layer; scanned, one group holds them all. The arrays of a group have
its number of layers, ``n``, as leading dimension.

Matrices keep the [out, in] layout of Hugging Face checkpoints: on CPU a product with the weight as left operand is 2-7 times
as fast as ``x @ w`` for the few rows of a decode step, and other backends do not mind.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import struct
from jax.sharding import Mesh

from engine.config import EngineConfig, ModelConfig
from engine.sharding import describe

Array = Any  # jax.Array, or jax.ShapeDtypeStruct in abstract trees


@struct.dataclass
class LayerWeights:
    """One group of ``n`` layers. Biases are `None` where the model has none."""

    attention_norm: Array  # [n, hidden]
    qkv: Array  # [n, kv_heads, queries_per_kv + 2, head_dim, hidden]: each kv head's queries, then its key, then its value
    qkv_bias: Array | None  # [n, kv_heads, queries_per_kv + 2, head_dim]
    o: Array  # [n, hidden, heads * head_dim]
    o_bias: Array | None  # [n, hidden]
    mlp_norm: Array  # [n, hidden]
    gate_up: Array  # [n, 2, ffn, hidden]: gate, then up
    gate_up_bias: Array | None  # [n, 2, ffn]
    down: Array  # [n, hidden, ffn]
    down_bias: Array | None  # [n, hidden]


@struct.dataclass
class Weights:
    """All weights of a model."""

    embed: Array  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Array  # [hidden]
    head: Array | None  # [vocab, hidden]; None: tied to embed


def layer_groups(model: ModelConfig, config: EngineConfig) -> tuple[int, ...]:
    """How many layers each group holds, in order."""
    return (model.num_layers,) if config.layers == "scanned" else (1,) * model.num_layers


def abstract_weights(model: ModelConfig, config: EngineConfig, mesh: Mesh) -> Weights:
    """Shapes, dtypes and shardings of all weights."""

    def array(*dimensions: tuple[int, str | None]) -> jax.ShapeDtypeStruct:
        shape, axes = zip(*dimensions, strict=True)
        return describe(mesh, shape, config.dtype, axes)

    vocab, hidden = (model.vocab_size, "vocab"), (model.hidden_size, None)
    kv_heads, head_dim = (model.num_kv_heads, "kv_heads"), (model.head_dim, None)
    per_kv_head, ffn, two = (model.queries_per_kv + 2, None), (model.intermediate_size, "ffn"), (2, None)

    def group(layers: int) -> LayerWeights:
        n = (layers, None)
        return LayerWeights(
            attention_norm=array(n, hidden),
            qkv=array(n, kv_heads, per_kv_head, head_dim, hidden),
            qkv_bias=array(n, kv_heads, per_kv_head, head_dim) if model.qkv_bias else None,
            o=array(n, hidden, (model.num_heads * model.head_dim, "heads")),
            o_bias=array(n, hidden) if model.o_bias else None,
            mlp_norm=array(n, hidden),
            gate_up=array(n, two, ffn, hidden),
            gate_up_bias=array(n, two, ffn) if model.mlp_bias else None,
            down=array(n, hidden, ffn),
            down_bias=array(n, hidden) if model.mlp_bias else None,
        )

    return Weights(
        embed=array(vocab, hidden),
        layers=tuple(group(layers) for layers in layer_groups(model, config)),
        final_norm=array(hidden),
        head=None if model.tie_embeddings else array(vocab, hidden),
    )
