"""LoRA adapters (arXiv:2106.09685) beside the weights: low-rank changes of linear maps, another one for each row.

A map ``W x`` becomes ``W x + B A x`` with the A [rank, in] and B [out, rank] of the row's adapter; what scales an adapter is in
its B. The arrays of all adapters are stacked, padded to one rank, so that the adapter of a row is data: an index, 0 for the
model itself, i for the adapter ``i - 1`` of the stack. Rows of different adapters go through the same two products: the first
makes every adapter's part of every row, those of other adapters are set to zero, the second adds them up. Nothing is
gathered or copied, and the cost is that of reading the stack. Where all rows have one adapter (a chunk of a prompt, a step of
one row) only that one is cut out of the stack, and where no row has any, nothing is done at all.

Maps that the model has fused (q, k and v; gate and up) have an A for each part.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from engine.config import ConfigError, EngineConfig, ModelConfig
from engine.layers import linear
from engine.quantization import Array
from engine.sharding import describe


@struct.dataclass
class LowRank:
    """The adapters of one map of ``n`` layers. The map's output comes in ``groups`` of features, each made from one part of A."""

    a: Array  # [n, adapters, parts, rank, in]
    b: Array  # [n, groups, ..., adapters, rank]: with ``...`` the features of a group


@struct.dataclass
class Adapters:
    """The adapters of one group of ``n`` layers. `None` where no adapter changes the map."""

    qkv: LowRank | None  # parts q, k, v; b: [n, queries_per_kv + 2, kv_heads, head_dim, adapters, rank]
    o: LowRank | None  # one part; b: [n, 1, hidden, adapters, rank]
    gate_up: LowRank | None  # parts gate, up; b: [n, 2, ffn, adapters, rank]
    down: LowRank | None  # one part; b: [n, 1, hidden, adapters, rank]


def abstract_adapters(model: ModelConfig, config: EngineConfig, mesh: Mesh, layers: int) -> Adapters | None:
    """Shapes, dtypes and shardings of the adapters of a group of layers; `None` where the server has none."""
    layout = config.adapters
    if layout is None:
        return None
    if model.moe is not None and {"gate_up", "down"} & set(layout.maps):
        raise ConfigError("adapters of the experts of a mixture are not served")

    def low_rank(name: str, parts: int, inputs: tuple[int, str | None], *outputs: tuple[int, str | None]) -> LowRank | None:
        if name not in layout.maps:
            return None
        n, adapters, rank = (layers, None), (layout.count, None), (layout.rank, None)

        def array(*dimensions: tuple[int, str | None]) -> jax.ShapeDtypeStruct:
            shape, axes = zip(*dimensions, strict=True)
            return describe(mesh, shape, config.dtype, axes)

        return LowRank(a=array(n, adapters, (parts, None), rank, inputs), b=array(n, *outputs, adapters, rank))

    hidden, ffn = (model.hidden_size, None), (model.intermediate_size, "ffn")
    heads, one = (model.num_heads * model.head_dim, "heads"), (1, None)
    per_kv_head = ((model.queries_per_kv + 2, None), (model.num_kv_heads, "kv_heads"), (model.head_dim, None))
    return Adapters(
        qkv=low_rank("qkv", 3, hidden, *per_kv_head),
        o=low_rank("o", 1, heads, one, hidden),
        gate_up=low_rank("gate_up", 2, hidden, (2, None), ffn),
        down=low_rank("down", 1, ffn, one, hidden),
    )


def change(low_rank: LowRank, index: jax.Array, x: jax.Array) -> jax.Array:
    """What the rows' adapters add to a map of one layer.

    Args:
      low_rank: of this layer: no leading dimension.
      index: int32 [rows], or [1] where all rows have the same.
      x: [rows, in], the map's input.

    Returns:
      [rows, groups, ...], in the layout of ``low_rank.b``.
    """
    with jax.named_scope("adapters"):
        shape = (x.shape[0], *low_rank.b.shape[:-2])
        changed: jax.Array = jax.lax.cond(
            jnp.any(index > 0),
            lambda: _change(low_rank, index, x).reshape(shape),
            lambda: jnp.zeros(shape, x.dtype),
        )
        return changed


def _change(low_rank: LowRank, index: jax.Array, x: jax.Array) -> jax.Array:
    a, b = low_rank.a, low_rank.b
    if index.shape[0] == 1:
        a = jax.lax.dynamic_slice_in_dim(a, index[0] - 1, 1, axis=0)
        b = jax.lax.dynamic_slice_in_dim(b, index[0] - 1, 1, axis=b.ndim - 2)
    adapters, parts, rank, inputs = a.shape
    groups, rows = b.shape[0], x.shape[0]
    inner = linear(a.reshape(-1, inputs), x).reshape(rows, adapters, parts, rank)
    if index.shape[0] > 1:
        mine = index[:, None] == 1 + jnp.arange(adapters, dtype=index.dtype)[None]  # [rows, adapters]
        inner = jnp.where(mine[:, :, None, None], inner, jnp.zeros((), x.dtype))
    if groups > parts:  # the first ones, a KV head's queries, share the first part
        inner = jnp.concatenate([jnp.repeat(inner[:, :, :1], groups - parts, axis=2), inner], axis=2)
    inner = inner.transpose(2, 1, 3, 0).reshape(groups, adapters * rank, rows)
    out = jax.lax.dot_general(b.reshape(groups, -1, adapters * rank), inner, (((2,), (1,)), ((0,), (0,))))
    return out.transpose(2, 0, 1)  # [rows, groups, features of a group]
