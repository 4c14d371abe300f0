"""Attention over stored keys and values: over the pages of many rows (decode) and over one contiguous prefix (prefill).

Both visit the stored tokens in blocks and stop at the longest live context, so a step costs what is in use and not what is
allocated. The softmax is accumulated block by block (the online softmax of FlashAttention, arXiv:2205.14135), in float32.

Heads are grouped: ``g`` query heads share one of ``k`` key/value heads.

What models do differently is a `Scoring`, the same for all layers, and two arguments that may differ between layers: ``window``, how
many tokens a query sees, itself included (an int, or an int32 scalar where layers are scanned), and ``sinks`` [k, g], scores of
attending to nothing at all. Blocks that no query's window reaches are not visited.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from engine.quantization import Quantized, dequantize

PAGES_BLOCK = 128  # tokens of each row visited at once in decode
CPU_ROWS = 8  # rows visited at once in decode on CPU: what is gathered for them stays in its caches
PREFIX_BLOCK = 256  # tokens visited at once in prefill

_MASKED = -1e30  # finite, so that a row whose first block is wholly masked stays free of NaN


@dataclasses.dataclass(frozen=True)
class Scoring:
    """What becomes of the product of a query and a key.

    ``scale`` multiplies it (None: 1 / sqrt(head_dim)); ``softcap`` bounds it, as cap * tanh(score / cap).
    """

    scale: float | None = None
    softcap: float | None = None


def attend_pages(
    q: jax.Array,  # [b, k, g, head_dim]
    k_pages: jax.Array | Quantized,  # [n, k, kv_pages, page_size, head_dim]
    v_pages: jax.Array | Quantized,
    layer: jax.Array | int,  # which of the n
    page_table: jax.Array,  # int32 [b, table width]
    lengths: jax.Array,  # int32 [b]: live tokens of each row, the current one included; 0 for padded rows
    *,
    scoring: Scoring = Scoring(),
    window: jax.Array | int | None = None,
    sinks: jax.Array | None = None,  # [k, g]
) -> jax.Array:  # [b, k, g, head_dim]
    """Each row's queries attend to the first ``lengths`` tokens of its pages, or to the last ``window`` of these."""

    def attend(q: jax.Array, page_table: jax.Array, lengths: jax.Array) -> jax.Array:
        return attend_rows(q, k_pages, v_pages, layer, page_table, lengths, scoring=scoring, window=window, sinks=sinks)

    def attend_by_groups(*rows: jax.Array) -> jax.Array:
        groups = tuple(array.reshape(-1, CPU_ROWS, *array.shape[1:]) for array in rows)
        attended: jax.Array = jax.lax.map(lambda group: attend(*group), groups)
        return attended.reshape(q.shape)

    if q.shape[0] <= CPU_ROWS or q.shape[0] % CPU_ROWS:
        return attend(q, page_table, lengths)
    out: jax.Array = jax.lax.platform_dependent(q, page_table, lengths, cpu=attend_by_groups, default=attend)
    return out


def attend_rows(
    q: jax.Array,
    k_pages: jax.Array | Quantized,
    v_pages: jax.Array | Quantized,
    layer: jax.Array | int,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    scoring: Scoring,
    window: jax.Array | int | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """`attend_pages` for all rows at once: their longest context is the bound of all. Sinks may differ between rows: [b, k, g]."""
    batch = q.shape[0]
    page_size = k_pages.shape[3]
    block_pages = max(1, PAGES_BLOCK // page_size)
    block = block_pages * page_size

    def gather(pages: jax.Array, table: jax.Array) -> jax.Array:  # -> [b, k, block, ...]
        # One gather per head, so that a split over heads stays local to its device.
        take = jax.vmap(lambda head: head.at[layer, table].get(mode="promise_in_bounds"), in_axes=1, out_axes=1)
        taken: jax.Array = take(pages)
        return taken.reshape(batch, -1, block, *pages.shape[4:])

    def visit(i: jax.Array, carry: _Softmax) -> _Softmax:
        table = jax.lax.dynamic_slice_in_dim(page_table, i * block_pages, block_pages, axis=1)
        keys, values = jax.tree.map(lambda pages: gather(pages, table), (k_pages, v_pages))
        at = i * block + jnp.arange(block)
        live = at[None, :] < lengths[:, None]  # [b, block]
        if window is not None:
            live &= at[None, :] >= lengths[:, None] - window
        return _accumulate(scoring, carry, q, keys, values, live[:, None, None, :])

    first: jax.Array | int = 0
    if window is not None:
        shortest = jnp.min(jnp.where(lengths > 0, lengths, jnp.iinfo(jnp.int32).max))
        first = jnp.maximum(shortest - window, 0) // block
    blocks = (jnp.max(lengths) + block - 1) // block
    start = _start(q, sinks)
    return _finish(jax.lax.fori_loop(first, blocks, visit, start), q.dtype)


def attend_prefix(
    q: jax.Array,  # [t, k, g, head_dim]
    keys: jax.Array | Quantized,  # [n, k, capacity, head_dim]
    values: jax.Array | Quantized,
    layer: jax.Array | int,  # which of the n
    positions: jax.Array,  # int32 [t]: of the queries; each attends to itself and to what came before
    length: jax.Array,  # int32: live tokens of the prefix, this chunk's included
    *,
    scoring: Scoring = Scoring(),
    window: jax.Array | int | None = None,
    sinks: jax.Array | None = None,  # [k, g]
) -> jax.Array:  # [t, k, g, head_dim]
    """The queries of one chunk attend causally to a prefix that holds their own keys and values already."""
    _, heads, capacity, _ = keys.shape
    block = min(PREFIX_BLOCK, capacity)
    tokens = q.shape[0]
    q = q.transpose(1, 2, 0, 3)  # [k, g, t, head_dim]

    def slice_block(buffer: jax.Array, start: jax.Array) -> jax.Array:  # -> [k, block, ...]
        rest = buffer.shape[3:]
        return jax.lax.dynamic_slice(buffer, (layer, 0, start, *[0] * len(rest)), (1, heads, block, *rest))[0]

    def visit(i: jax.Array, carry: _Softmax) -> _Softmax:
        # The last block of a capacity that is no multiple of it starts early; its first tokens were visited before.
        start = jnp.minimum(i * block, capacity - block)
        at = start + jnp.arange(block)
        live = (at[None, :] <= positions[:, None]) & (at[None, :] >= i * block)  # [t, block]
        if window is not None:
            live &= at[None, :] > positions[:, None] - window
        of_keys, of_values = jax.tree.map(lambda buffer: slice_block(buffer, start), (keys, values))
        return _accumulate(scoring, carry, q, of_keys, of_values, live[None, None])

    first = 0 if window is None else jnp.maximum(positions[0] + 1 - window, 0) // block  # the first query sees furthest back
    blocks = (length + block - 1) // block
    start = _start(q, None if sinks is None else sinks[:, :, None])
    out = _finish(jax.lax.fori_loop(first, blocks, visit, start), q.dtype)  # [k, g, t, head_dim]
    return out.transpose(2, 0, 1, 3).reshape(tokens, heads, -1, out.shape[-1])


_Softmax = tuple[jax.Array, jax.Array, jax.Array]  # running maximum [...], sum [...], and weighted values [..., head_dim]


def _start(q: jax.Array, sinks: jax.Array | None) -> _Softmax:
    """Nothing seen yet; or, with sinks that broadcast to q's rows, one score whose value is zero."""
    rows, nothing = q.shape[:-1], jnp.zeros(q.shape, jnp.float32)
    if sinks is not None:
        return jnp.broadcast_to(sinks.astype(jnp.float32), rows), jnp.ones(rows, jnp.float32), nothing
    return jnp.full(rows, _MASKED, jnp.float32), jnp.zeros(rows, jnp.float32), nothing


def _accumulate(
    scoring: Scoring,
    carry: _Softmax,
    q: jax.Array,
    keys: jax.Array | Quantized,
    values: jax.Array | Quantized,
    live: jax.Array,
) -> _Softmax:
    """Takes in one block. q [*batch, rows..., d] and keys, values [*batch, s, d] share their leading batch dimensions."""
    maximum, total, weighted = carry
    keys, values = dequantize(keys, q.dtype), dequantize(values, q.dtype)
    batch = "bk" if keys.ndim == 4 else "k"
    rows = "g" if keys.ndim == 4 else "gt"
    scores = jnp.einsum(f"{batch}{rows}d,{batch}sd->{batch}{rows}s", q, keys, preferred_element_type=jnp.float32)
    scores *= q.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * jnp.tanh(scores / scoring.softcap)
    scores = jnp.where(live, scores, _MASKED)
    new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=-1))
    probabilities = jnp.where(live, jnp.exp(scores - new_maximum[..., None]), 0.0)
    rescale = jnp.exp(maximum - new_maximum)
    update = jnp.einsum(
        f"{batch}{rows}s,{batch}sd->{batch}{rows}d",
        probabilities.astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
    )
    return new_maximum, total * rescale + jnp.sum(probabilities, axis=-1), weighted * rescale[..., None] + update


def _finish(carry: _Softmax, dtype: jnp.dtype) -> jax.Array:
    _, total, weighted = carry
    return (weighted / jnp.maximum(total, 1e-30)[..., None]).astype(dtype)
