"""The weights of the decoder, as one abstract description.

`abstract_weights` feeds the loader, the sharding, the memory plan and every lowering. Layers come in groups of consecutive
layers that run as one scan: unrolled, each group holds one layer; scanned, one group holds them all. The arrays of a group have
its number of layers, ``n``, as leading dimension.

The matrices of layers may be int8 with a scale per output channel (`EngineConfig.quantize`); embedding, head, router, norms and
biases are not quantized.

Matrices keep the [out, in] layout of Hugging Face checkpoints: on CPU a product with the weight as left operand is 2-7 times
as fast as ``x @ w`` for the few rows of a decode step, and other backends do not mind.
"""

from __future__ import annotations

import jax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from engine.adapters import Adapters, abstract_adapters
from engine.config import EngineConfig, ModelConfig
from engine.programs import tree_bytes
from engine.quantization import Array, Quantized
from engine.sharding import describe, stored_model


@struct.dataclass
class LayerWeights:
    """One group of ``n`` layers. `None` where the model has no such weight. KV heads are those of `engine.sharding.stored_model`.

    In a mixture of experts the feed-forward matrices and their biases have a dimension ``experts`` after ``n``.
    """

    qkv: Array  # [n, kv_heads, queries_per_kv + 2, head_dim, hidden]: each kv head's queries, then its key, then its value
    o: Array  # [n, hidden, heads * head_dim]
    gate_up: Array  # [n, 2, ffn, hidden]: gate, then up
    down: Array  # [n, hidden, ffn]
    attention_norm: Array | None = None  # [n, hidden]
    attention_post_norm: Array | None = None  # [n, hidden]
    mlp_norm: Array | None = None  # [n, hidden]
    mlp_post_norm: Array | None = None  # [n, hidden]
    q_norm: Array | None = None  # [n, head_dim], or of the whole projection: [n, kv_heads, queries_per_kv, head_dim]
    k_norm: Array | None = None  # [n, head_dim], or of the whole projection: [n, kv_heads, head_dim]
    sinks: Array | None = None  # [n, kv_heads, queries_per_kv]
    qkv_bias: Array | None = None  # [n, kv_heads, queries_per_kv + 2, head_dim]
    o_bias: Array | None = None  # [n, hidden]
    gate_up_bias: Array | None = None  # [n, 2, ffn]
    down_bias: Array | None = None  # [n, hidden]
    router: Array | None = None  # [n, experts, hidden]
    router_bias: Array | None = None  # [n, experts]
    adapters: Adapters | None = None


@struct.dataclass
class Weights:
    """All weights of a model."""

    embed: Array  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Array  # [hidden]
    head: Array | None  # [vocab, hidden]; None: tied to embed


STACKED_BYTES = 64 * 2**20  # of an array on one device: of a larger one that holds several layers, each is sent there by itself


def stacked_fields(weights: Weights) -> dict[str, Array]:
    """The arrays, abstract, that are put together on the devices, layer by layer, by the name of the field; where layers are
    scanned."""
    if len(weights.layers) > 1 or weights.layers[0].qkv.shape[0] == 1:
        return {}
    fields = {field: node for field, node in vars(weights.layers[0]).items() if node is not None and field != "adapters"}
    return {field: node for field, node in fields.items() if tree_bytes(node) >= STACKED_BYTES}


def one_layer(node: Array) -> Array:
    """What one layer has of an abstract array of several."""

    def of(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(*leaf.sharding.spec[1:]))
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=sharding)

    described: Array = jax.tree.map(of, node)
    return described


def layer_groups(model: ModelConfig, config: EngineConfig) -> tuple[int, ...]:
    """How many layers each group holds, in order."""
    return (model.num_layers,) if config.layers == "scanned" else (1,) * model.num_layers


def abstract_weights(model: ModelConfig, config: EngineConfig, mesh: Mesh) -> Weights:
    """Shapes, dtypes and shardings of all weights."""
    model = stored_model(model, config)

    def array(*dimensions: tuple[int, str | None], dtype: str = config.dtype) -> jax.ShapeDtypeStruct:
        shape, axes = zip(*dimensions, strict=True)
        return describe(mesh, shape, dtype, axes)

    def matrix(*dimensions: tuple[int, str | None]) -> jax.ShapeDtypeStruct | Quantized:
        if config.quantize == "none":
            return array(*dimensions)
        return Quantized(array(*dimensions, dtype="int8"), array(*dimensions[:-1], dtype="float32"))

    def norm(*dimensions: tuple[int, str | None]) -> jax.ShapeDtypeStruct:
        return array(*dimensions, dtype="float32" if model.wide_norms else config.dtype)

    vocab, hidden = (model.vocab_size, "vocab"), (model.hidden_size, None)
    kv_heads, head_dim = (model.num_kv_heads, "kv_heads"), (model.head_dim, None)
    queries, per_kv_head = (model.queries_per_kv, None), (model.queries_per_kv + 2, None)
    ffn, two = (model.intermediate_size, "ffn"), (2, None)
    moe = model.moe
    experts = () if moe is None else ((moe.experts, "experts"),)
    before, after = model.norms in ("pre", "both"), model.norms in ("post", "both")

    def group(layers: int) -> LayerWeights:
        n = (layers, None)
        q_norm = {"none": None, "head": (n, head_dim), "projection": (n, kv_heads, queries, head_dim)}[model.qk_norm]
        k_norm = {"none": None, "head": (n, head_dim), "projection": (n, kv_heads, head_dim)}[model.qk_norm]
        return LayerWeights(
            qkv=matrix(n, kv_heads, per_kv_head, head_dim, hidden),
            o=matrix(n, hidden, (model.num_heads * model.head_dim, "heads")),
            gate_up=matrix(n, *experts, two, ffn, hidden),
            down=matrix(n, *experts, hidden, ffn),
            attention_norm=norm(n, hidden) if before else None,
            attention_post_norm=norm(n, hidden) if after else None,
            mlp_norm=norm(n, hidden) if before else None,
            mlp_post_norm=norm(n, hidden) if after else None,
            q_norm=None if q_norm is None else norm(*q_norm),
            k_norm=None if k_norm is None else norm(*k_norm),
            sinks=array(n, kv_heads, queries) if model.sinks else None,
            qkv_bias=array(n, kv_heads, per_kv_head, head_dim) if model.qkv_bias else None,
            o_bias=array(n, hidden) if model.o_bias else None,
            gate_up_bias=array(n, *experts, two, ffn) if model.mlp_bias else None,
            down_bias=array(n, *experts, hidden) if model.mlp_bias else None,
            router=None if moe is None else array(n, (moe.experts, None), hidden),
            router_bias=array(n, (moe.experts, None)) if moe is not None and moe.bias else None,
            adapters=abstract_adapters(model, config, mesh, layers),
        )

    return Weights(
        embed=array(vocab, hidden),
        layers=tuple(group(layers) for layers in layer_groups(model, config)),
        final_norm=norm(hidden),
        head=None if model.tie_embeddings else array(vocab, hidden),
    )
