"""What lives on the device beside the weights: the decode state and the prefixes, each one donated pytree.

A program that takes one of them replaces it: the caller keeps what comes back and forgets what it passed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh

from engine.config import EngineConfig, ModelConfig
from engine.quantization import Array, Quantized
from engine.sampling import sampling_width
from engine.sharding import describe, replicated, stored_model
from engine.weights import layer_groups

Pools = tuple[tuple[Array, ...], tuple[Array, ...]]  # keys and values, one array per layer group


@struct.dataclass
class DecodeState:
    """The state of all slots. Shapes are those of one group of devices (``engine/sharding.py``): slots and pages of several groups
    follow one another. Row ``slots`` of every per-slot array is scratch: padded rows of a batch read and write it.

    ``k_pages`` and ``v_pages`` have one array per layer group (``engine/weights.py``), of n layers each, or one `Quantized`. Page 0 is
    scratch.
    Beyond the model's head_dim they are zero (`EngineConfig.stored_head_dim`).
    """

    k_pages: tuple[Array, ...]  # [n, kv_heads, kv_pages, page_size, head_dim] each
    v_pages: tuple[Array, ...]
    page_table: Array  # int32 [slots + 1, table_width]: pages of each sequence, in order; 0 beyond
    lengths: Array  # int32 [slots + 1]: tokens whose keys and values are stored; the position of the next input
    tokens: Array  # int32 [slots + 1]: the last token chosen, the next input
    generated: Array  # int32 [slots + 1]: tokens generated, the first one (from prefill) included
    counts: Array  # int32 [slots + 1, vocab]: how often each token was generated
    in_prompt: Array  # bool [slots + 1, vocab]: tokens of the prompt
    sampling: Array  # int32 [slots + 1, sampling width]: `engine.sampling.pack`
    masked: Array  # bool [slots + 1]: the row's mask applies
    masks: Array  # uint32 [slots + 1, mask words]: tokens allowed, little end first

    @property
    def pools(self) -> Pools:
        """Keys and values."""
        return self.k_pages, self.v_pages

    def with_pools(self, keys: tuple[Array, ...], values: tuple[Array, ...]) -> DecodeState:
        """The same, with these keys and values; with none, what is left beside them."""
        return dataclasses.replace(self, k_pages=keys, v_pages=values)


@struct.dataclass
class Prefix:
    """The keys and values of a prompt between prefill and insert, contiguous. One array per layer group."""

    k: tuple[Array, ...]  # [n, kv_heads, prefix_capacity, head_dim] each
    v: tuple[Array, ...]
    in_prompt: Array  # bool [vocab]: tokens seen so far

    @property
    def pools(self) -> Pools:
        """Keys and values."""
        return self.k, self.v

    def with_pools(self, keys: tuple[Array, ...], values: tuple[Array, ...]) -> Prefix:
        """The same, with these keys and values; with none, what is left beside them."""
        return dataclasses.replace(self, k=keys, v=values)


@dataclasses.dataclass(eq=False)
class PrefixBuffer:
    """One prefix, by reference: its arrays are replaced at each call that changes them."""

    arrays: Prefix


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """What a program chose, still on the device."""

    results: jax.Array  # int32 [batch, result_width()]
    rows: np.ndarray  # where the real rows are, in their order, among the padding
    prompt: jax.Array | None = None  # int32 [bucket, result_width()]
    prompt_rows: int = 0


def mask_words(vocab_size: int) -> int:
    """32-bit words of a token mask."""
    return -(-vocab_size // 32)


def table_width(config: EngineConfig, block_pages: int) -> int:
    """Columns of the page table: a whole number of attention blocks."""
    return -(-config.pages_per_slot // block_pages) * block_pages


def abstract_state(model: ModelConfig, config: EngineConfig, mesh: Mesh, block_pages: int) -> DecodeState:
    """Shapes, dtypes and shardings of the decode state."""
    rows = config.groups * (config.group_slots + 1)
    heads, pages = stored_model(model, config).num_kv_heads, config.groups * config.kv_pages

    def pool(layers: int) -> jax.ShapeDtypeStruct | Quantized:
        shape = (layers, heads, pages, config.page_size, config.stored_head_dim(model.head_dim))
        return _stored(mesh, config, shape, (None, "kv_heads", "pages", None, None))

    def per_slot(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return describe(mesh, (rows, *shape), dtype, ("slots", *[None] * len(shape)))

    pools = tuple(pool(layers) for layers in layer_groups(model, config))
    return DecodeState(
        k_pages=pools,
        v_pages=pools,
        page_table=per_slot(jnp.int32, table_width(config, block_pages)),
        lengths=per_slot(jnp.int32),
        tokens=per_slot(jnp.int32),
        generated=per_slot(jnp.int32),
        counts=per_slot(jnp.int32, model.vocab_size),
        in_prompt=per_slot(jnp.bool_, model.vocab_size),
        sampling=per_slot(jnp.int32, sampling_width()),
        masked=per_slot(jnp.bool_),
        masks=per_slot(jnp.uint32, mask_words(model.vocab_size)),
    )


def abstract_prefix(model: ModelConfig, config: EngineConfig, mesh: Mesh) -> Prefix:
    """Shapes, dtypes and shardings of one prefix buffer."""

    def buffer(layers: int) -> jax.ShapeDtypeStruct | Quantized:
        heads = stored_model(model, config).num_kv_heads
        shape = (layers, heads, config.prefix_capacity, config.stored_head_dim(model.head_dim))
        return _stored(mesh, config, shape, (None, "kv_heads", None, None))

    buffers = tuple(buffer(layers) for layers in layer_groups(model, config))
    return Prefix(k=buffers, v=buffers, in_prompt=replicated(mesh, (model.vocab_size,), "bool"))


def _stored(mesh: Mesh, config: EngineConfig, shape: Sequence[int], axes: Sequence[str | None]) -> jax.ShapeDtypeStruct | Quantized:
    """Keys or values as they are stored: [..., head_dim]."""
    if config.kv_dtype == "auto":
        return describe(mesh, shape, config.dtype, axes)
    return Quantized(describe(mesh, shape, "int8", axes), describe(mesh, shape[:-1], "float32", axes[:-1]))
