"""The functions behind the programs, on arrays only: what `engine/jax_engine.py` jits, donating, into the table.

Each takes at most one packed int32 array from the host, so a call costs one small transfer:

    prefill    start, length, last, want prompt log-probs, next token, masked, prompt length | sampling | mask | generated | tokens
    insert     group, slot, length, first page to write, pages used | sampling | generated | pages
    fetch      group, pages used | pages | tokens
    set_mask   group, slot, masked | mask
    generate   per row: slot, page of the position written

They are written as one device runs them, like ``engine/model.py``: model and config are its share, slots and pages are those of its
group (``engine/sharding.py``), and so are the rows of a step. A chunk's tokens are shared out to the groups; all of them keep
the whole prefix.

`prefill` and `generate` are three functions, one after the other: `begin_...` embeds, `run_layers` runs layers, `end_...` chooses
tokens and makes the new state. They are one program, or several where a model runs in segments (`engine/segments.py`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from engine import model as decoder
from engine import native
from engine.attention import Scoring
from engine.config import EngineConfig, ModelConfig
from engine.kernels import Attention
from engine.model import Pool, Pools
from engine.quantization import Array, Quantized, quantize
from engine.sampling import NO_TOKEN, SamplingContext, choose, pack_results, result_width, sampling_width, unpack
from engine.sharding import GROUPS, Ways
from engine.state import DecodeState, Prefix, mask_words
from engine.state import Pools as GroupPools
from engine.weights import LayerWeights, Weights

PREFILL_HEADER = 7
INSERT_HEADER = 5
FETCH_HEADER = 2
MASK_HEADER = 3
PROMPT_LOGPROB_ROWS = 32  # positions whose logits exist at once while a prompt is scored
_NO_SLOT = np.int32(2**30)  # beyond every slot: what is written there is dropped


@struct.dataclass
class PrefixCache:
    """Rows are consecutive tokens of one prompt, stored in a prefix from position ``start``."""

    start: Array  # int32
    positions: Array  # int32 [rows]
    length: Array  # int32: live tokens, these included
    attention: Attention = struct.field(pytree_node=False, default=Attention())  # who attends: `run_layers` knows
    ways: Ways = struct.field(pytree_node=False, default=Ways())  # likewise

    def attend(
        self,
        pools: Pools,
        layer: jax.Array | int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        scoring: Scoring,
        window: jax.Array | int | None,
        sinks: jax.Array | None,
    ) -> tuple[Pools, jax.Array]:
        if self.ways.groups > 1:  # each stores all, and attends for its own rows
            k, v = jnp.unstack(self.ways.join(jnp.stack([k, v], axis=1), GROUPS, 0), axis=1)
        head_dim, (q, k, v) = q.shape[-1], _widen(pools, q, k, v)
        keys, values = self._store(pools[0], layer, k), self._store(pools[1], layer, v)
        out = self.attention.prefix(
            q, keys, values, layer, self.positions, self.length, scoring=scoring, window=window, sinks=sinks
        )
        return (keys, values), _narrow(out, head_dim)

    def _store(self, pool: Pool, layer: jax.Array | int, rows: jax.Array) -> Pool:
        def store(pool: jax.Array, rows: jax.Array) -> jax.Array:  # [rows, kv_heads, ...]
            update = rows.astype(pool.dtype).swapaxes(0, 1)[None]
            return jax.lax.dynamic_update_slice(pool, update, _at(pool, layer, 0, self.start))

        new: Pool = jax.tree.map(store, pool, _as_stored(pool, rows))
        return new


@struct.dataclass
class PagedCache:
    """Rows are one token of each sequence, stored in the sequence's page that holds its position."""

    page_table: Array  # int32 [rows, table width]
    pages: Array  # int32 [rows]: of the token stored
    offsets: Array  # int32 [rows]: within the page
    lengths: Array  # int32 [rows]: live tokens, this one included; 0 for padded rows
    attention: Attention = struct.field(pytree_node=False, default=Attention())  # who attends: `run_layers` knows
    ways: Ways = struct.field(pytree_node=False, default=Ways())

    def attend(
        self,
        pools: Pools,
        layer: jax.Array | int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        scoring: Scoring,
        window: jax.Array | int | None,
        sinks: jax.Array | None,
    ) -> tuple[Pools, jax.Array]:
        if self.attention.native:
            stored = _as_stored(pools[0], k), _as_stored(pools[1], v)
            where = (self.page_table, self.pages, self.offsets, self.lengths)
            return native.decode(pools, layer, q, stored, *where, scoring=scoring, window=window, sinks=sinks)
        head_dim, (q, k, v) = q.shape[-1], _widen(pools, q, k, v)
        keys, values = self._store(pools[0], layer, k), self._store(pools[1], layer, v)
        out = self.attention.pages(
            q, keys, values, layer, self.page_table, self.lengths, scoring=scoring, window=window, sinks=sinks
        )
        return (keys, values), _narrow(out, head_dim)

    def _store(self, pool: Pool, layer: jax.Array | int, rows: jax.Array) -> Pool:
        stored = _as_stored(pool, rows)

        def store_row(i: jax.Array, pool: Pool) -> Pool:
            def store(pool: jax.Array, rows: jax.Array) -> jax.Array:  # [rows, kv_heads, ...]
                update = rows[i].astype(pool.dtype)[None, :, None, None]
                pool = jax.lax.dynamic_update_slice(pool, update, _at(pool, layer, 0, self.pages[i], self.offsets[i]))
                return self.attention.pin(pool)

            new: Pool = jax.tree.map(store, pool, stored)
            return new

        new: Pool = jax.lax.fori_loop(0, rows.shape[0], store_row, pool)
        return new


def _as_stored(pool: Pool, rows: jax.Array) -> Pool:
    """Rows as the pool stores them."""
    return quantize(rows) if isinstance(pool, Quantized) else rows.astype(pool.dtype)


def _at(array: jax.Array, *index: jax.Array | int) -> tuple[jax.Array | int, ...]:
    """An index of the first dimensions, and the beginning of the others."""
    return (*index, *[0] * (array.ndim - len(index)))


def _widen(pools: Pools, *rows: jax.Array) -> tuple[jax.Array, ...]:
    """Rows with as many dimensions as the pools store of a head; those added are zero, and change no product of query and key."""
    missing = pools[0].shape[-1] - rows[0].shape[-1]
    return tuple(jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) for x in rows) if missing else rows


def _narrow(out: jax.Array, head_dim: int) -> jax.Array:
    return out if out.shape[-1] == head_dim else out[..., :head_dim]


@struct.dataclass
class Rows:
    """What layers need to know of the rows that run."""

    rotations: tuple[tuple[Array, Array] | None, ...]  # of each kind of layer: cosines and sines [rows, rotary_dim / 2]
    cache: PrefixCache | PagedCache
    adapters: Array | None = None  # int32 [rows], or [1] where all rows have the same; None where the server has none


def run_layers(
    model: ModelConfig,
    ways: Ways,
    attention: Attention,
    pattern: tuple[int, ...],
    pools: GroupPools,
    layers: tuple[LayerWeights, ...],
    x: jax.Array,
    rows: Rows,
) -> tuple[GroupPools, jax.Array]:
    """Consecutive layers, of the kinds ``pattern``: their pools, and the hidden states behind them."""
    cache = dataclasses.replace(rows.cache, attention=attention, ways=ways)
    x, keys, values = decoder.run_layers(model, ways, pattern, layers, x, rows.rotations, *pools, cache, rows.adapters)
    return (keys, values), x


def prefill(
    model: ModelConfig,
    ways: Ways,
    config: EngineConfig,
    attention: Attention,
    bucket: int,
    prefix: Prefix,
    weights: Weights,
    request: jax.Array,
) -> tuple[Prefix, jax.Array, jax.Array]:
    """One chunk of a prompt, padded to ``bucket`` tokens.

    Returns the prefix; the packed first token [1, result_width()], zeros unless this is the last chunk; and packed prompt
    log-probs [rows, result_width()] of the group's rows, zeros unless wanted.
    """
    x, rows = begin_prefill(model, ways, config, bucket, prefix, weights, request)
    pools, x = run_layers(model, ways, attention, model.pattern, prefix.pools, weights.layers, x, rows)
    prefix, prompt, row, head = end_prefill(model, ways, config, bucket, prefix, weights, request, x)
    nothing = jnp.zeros((1, result_width()), jnp.int32)
    first = jax.lax.cond(head[2] > 0, lambda: first_token(model, ways, config, prefix, weights, head, row), lambda: nothing)
    return prefix.with_pools(*pools), first, prompt


def begin_prefill(
    model: ModelConfig, ways: Ways, config: EngineConfig, bucket: int, prefix: Prefix, weights: Weights, request: jax.Array
) -> tuple[jax.Array, Rows]:
    """The hidden states of a chunk's tokens, and its `Rows`."""
    (start, length, _, _, _, _, total), sampling, *_, tokens = _split(request, *_prefill_sizes(model, config, bucket))
    positions = start + _of_group(ways, jnp.arange(bucket, dtype=jnp.int32))
    rotations = decoder.rotary(model, positions, jnp.broadcast_to(total, positions.shape))
    adapters = None if config.adapters is None else unpack(sampling[None]).adapter
    cache = PrefixCache(start, positions, start + length)
    return decoder.embed(model, ways, weights, _of_group(ways, tokens)), Rows(rotations, cache, adapters)


def end_prefill(
    model: ModelConfig,
    ways: Ways,
    config: EngineConfig,
    bucket: int,
    prefix: Prefix,
    weights: Weights,
    request: jax.Array,
    x: jax.Array,
) -> tuple[Prefix, jax.Array, jax.Array, jax.Array]:
    """What follows the layers of a chunk.

    Returns the prefix; packed prompt log-probs; and what `first_token` takes: the hidden state [1, hidden] of the last token, and
    the request without its tokens.
    """
    header, *_, tokens = _split(request, *_prefill_sizes(model, config, bucket))
    start, length, _, want_prompt, next_token, _, _ = header
    live = jnp.arange(bucket) < length
    seen = prefix.in_prompt & (start > 0)
    seen = seen.at[jnp.where(live, tokens, NO_TOKEN)].set(True, mode="drop")

    following = _of_group(ways, jnp.where(jnp.arange(bucket) == length - 1, next_token, jnp.roll(tokens, -1)))
    prompt = jax.lax.cond(
        want_prompt > 0,
        lambda: _prompt_logprobs(model, ways, weights, x, following),
        lambda: jnp.zeros((x.shape[0], result_width()), jnp.int32),
    )
    row = jax.lax.dynamic_slice_in_dim(x, (length - 1) % x.shape[0], 1)
    row = ways.sum(ways.only(row, GROUPS, (length - 1) // x.shape[0]), GROUPS)
    return dataclasses.replace(prefix, in_prompt=seen), prompt, row, request[: -tokens.shape[0]]


def first_token(
    model: ModelConfig, ways: Ways, config: EngineConfig, prefix: Prefix, weights: Weights, head: jax.Array, row: jax.Array
) -> jax.Array:
    """The packed first token [1, result_width()] of a prompt, from what `end_prefill` returned for its last chunk."""
    (start, length, _, _, _, masked, _), sampling, mask, generated = _split(head, *_prefill_sizes(model, config, 0)[:-1])
    scores = decoder.logits(model, ways, weights, row)
    rows = unpack(sampling[None])
    context = SamplingContext(
        position=(start + length)[None],
        generated=jnp.zeros(1, jnp.int32),
        masked=masked[None] > 0,
        slots=jnp.zeros(1, jnp.int32),
        counts=_count(model, generated)[None],
        in_prompt=prefix.in_prompt[None],
        masks=jax.lax.bitcast_convert_type(mask, jnp.uint32)[None],
    )
    return pack_results(choose(scores, rows, context), scores, rows.logprobs[0] > 0)


def _prefill_sizes(model: ModelConfig, config: EngineConfig, bucket: int) -> tuple[int, ...]:
    return PREFILL_HEADER, sampling_width(), mask_words(model.vocab_size), config.max_len, bucket


def _of_group(ways: Ways, tokens: jax.Array) -> jax.Array:
    """The group's share of a chunk's tokens."""
    if ways.groups == 1:
        return tokens
    share = tokens.shape[0] // ways.groups
    return jax.lax.dynamic_slice_in_dim(tokens, ways.index(GROUPS) * share, share)


def _prompt_logprobs(model: ModelConfig, ways: Ways, weights: Weights, x: jax.Array, following: jax.Array) -> jax.Array:
    """Packed results of what follows each position, some rows at a time: logits of a whole chunk would not fit beside the rest."""
    rows = min(PROMPT_LOGPROB_ROWS, x.shape[0])

    def score(start: jax.Array) -> jax.Array:
        scores = decoder.logits(model, ways, weights, jax.lax.dynamic_slice_in_dim(x, start, rows))
        return pack_results(jax.lax.dynamic_slice_in_dim(following, start, rows), scores, jnp.bool_(True))

    # A bucket that is no multiple of `rows` scores some rows twice, to the same result.
    starts = np.minimum(np.arange(0, x.shape[0], rows), x.shape[0] - rows).astype(np.int32)
    scored = jax.lax.map(score, jnp.asarray(starts))
    out = jnp.zeros((x.shape[0], result_width()), jnp.int32)
    for i, start in enumerate(starts.tolist()):
        out = jax.lax.dynamic_update_slice_in_dim(out, scored[i], start, axis=0)
    return out


def insert(
    model: ModelConfig,
    ways: Ways,
    config: EngineConfig,
    state: DecodeState,
    prefix: Prefix,
    first: jax.Array,
    request: jax.Array,
) -> DecodeState:
    """Copies a prefix into its pages and makes the slot's row, in the group that has the slot; the others change nothing."""
    sizes = (sampling_width(), config.max_len, state.page_table.shape[1])
    header, sampling, generated, pages = _split(request, INSERT_HEADER, *sizes)
    group, slot, length, first_page, used = header
    mine = ways.index(GROUPS) == group
    slot, used = jnp.where(mine, slot, _NO_SLOT), jnp.where(mine, used, 0)
    size = config.page_size

    def copy_page(i: jax.Array, pools: GroupPools) -> GroupPools:
        def copy(pool: jax.Array, buffer: jax.Array) -> jax.Array:
            n, heads, _, *rest = buffer.shape
            page = jax.lax.dynamic_slice(buffer, _at(buffer, 0, 0, i * size), (n, heads, size, *rest))
            return jax.lax.dynamic_update_slice(pool, page[:, :, None], _at(pool, 0, 0, pages[i]))

        new: GroupPools = jax.tree.map(copy, pools, (prefix.k, prefix.v))
        return new

    k_pages, v_pages = jax.lax.fori_loop(first_page, used, copy_page, (state.k_pages, state.v_pages))
    token = first[0, 0]
    counts = _count(model, generated).at[token].add(1)
    return DecodeState(
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=state.page_table.at[slot].set(pages),
        lengths=state.lengths.at[slot].set(length),
        tokens=state.tokens.at[slot].set(token),
        generated=state.generated.at[slot].set(1),
        counts=state.counts.at[slot].set(counts),
        in_prompt=state.in_prompt.at[slot].set(prefix.in_prompt),
        sampling=state.sampling.at[slot].set(sampling),
        masked=state.masked.at[slot].set(False),
        masks=state.masks,
    )


def fetch(ways: Ways, config: EngineConfig, prefix: Prefix, state: DecodeState, request: jax.Array) -> Prefix:
    """Copies pages of a group's pool to the beginning of a prefix."""
    width = state.page_table.shape[1]
    (group, used), pages, tokens = _split(request, FETCH_HEADER, width, width * config.page_size)
    size = config.page_size

    def copy_page(i: jax.Array, buffers: GroupPools) -> GroupPools:
        def copy(buffer: jax.Array, pool: jax.Array) -> jax.Array:
            n, heads, _, *rest = buffer.shape
            page = jax.lax.dynamic_slice(pool, _at(pool, 0, 0, pages[i]), (n, heads, 1, size, *rest))
            page = ways.sum(ways.only(page, GROUPS, group), GROUPS)
            return jax.lax.dynamic_update_slice(buffer, page[:, :, 0], _at(buffer, 0, 0, i * size))

        new: GroupPools = jax.tree.map(copy, buffers, (state.k_pages, state.v_pages))
        return new

    keys, values = jax.lax.fori_loop(0, used, copy_page, (prefix.k, prefix.v))
    live = jnp.arange(tokens.shape[0]) < used * size
    seen = prefix.in_prompt & (used == 0)
    seen = seen.at[jnp.where(live, tokens, NO_TOKEN)].set(True, mode="drop")
    return Prefix(k=keys, v=values, in_prompt=seen)


def set_mask(model: ModelConfig, ways: Ways, state: DecodeState, request: jax.Array) -> DecodeState:
    """Restricts the next tokens of a slot, or lifts the restriction."""
    (group, slot, masked), mask = _split(request, MASK_HEADER, mask_words(model.vocab_size))
    slot = jnp.where(ways.index(GROUPS) == group, slot, _NO_SLOT)
    return dataclasses.replace(
        state,
        masked=state.masked.at[slot].set(masked > 0),
        masks=state.masks.at[slot].set(jax.lax.bitcast_convert_type(mask, jnp.uint32)),
    )


def generate(
    model: ModelConfig,
    ways: Ways,
    config: EngineConfig,
    attention: Attention,
    state: DecodeState,
    weights: Weights,
    request: jax.Array,
) -> tuple[DecodeState, jax.Array]:
    """One step of the rows int32 [batch, 2] (slot, page): the state, and packed results [batch, result_width()]."""
    x, rows = begin_generate(model, ways, config, state, weights, request)
    pools, x = run_layers(model, ways, attention, model.pattern, state.pools, weights.layers, x, rows)
    state, results = end_generate(model, ways, config, state, weights, request, x)
    return state.with_pools(*pools), results


def begin_generate(
    model: ModelConfig, ways: Ways, config: EngineConfig, state: DecodeState, weights: Weights, request: jax.Array
) -> tuple[jax.Array, Rows]:
    """The hidden states of the rows' last tokens, and their `Rows`."""
    slots, active, positions, page_table = _rows(config, state, request)
    cache = PagedCache(
        page_table=page_table[slots],
        pages=request[:, 1],
        offsets=positions % config.page_size,
        lengths=jnp.where(active, positions + 1, 0),
    )
    rotations = decoder.rotary(model, positions, positions + 1)
    adapters = None if config.adapters is None else unpack(state.sampling[slots]).adapter
    return decoder.embed(model, ways, weights, state.tokens[slots]), Rows(rotations, cache, adapters)


def end_generate(
    model: ModelConfig,
    ways: Ways,
    config: EngineConfig,
    state: DecodeState,
    weights: Weights,
    request: jax.Array,
    x: jax.Array,
) -> tuple[DecodeState, jax.Array]:
    """The rest of `generate`, behind the layers."""
    slots, active, positions, page_table = _rows(config, state, request)
    scores = decoder.logits(model, ways, weights, x)
    options = unpack(state.sampling[slots])
    generated = state.generated[slots]
    context = SamplingContext(
        position=positions + 1,
        generated=generated,
        masked=state.masked[slots],
        slots=slots,
        counts=state.counts,
        in_prompt=state.in_prompt,
        masks=state.masks,
    )
    chosen = choose(scores, options, context)
    new_state = dataclasses.replace(
        state,
        page_table=page_table,
        lengths=state.lengths.at[slots].set(jnp.where(active, positions + 1, 0)),
        tokens=state.tokens.at[slots].set(chosen),
        generated=state.generated.at[slots].set(generated + 1),
        counts=state.counts.at[slots, chosen].add(1),
    )
    return new_state, pack_results(chosen, scores, jnp.any(options.logprobs > 0))


def place_layer(stack: jax.Array | Quantized, part: jax.Array | Quantized, layer: jax.Array) -> jax.Array | Quantized:
    """Weights [n, ...] with those of one layer in their place."""

    def place(stack: jax.Array, part: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(stack, part[None], _at(stack, layer))

    placed: Pool = jax.tree.map(place, stack, part)
    return placed


def _rows(
    config: EngineConfig, state: DecodeState, request: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The slot of each row, whether it is more than padding, the position it writes, and the page table with its page."""
    slots, pages = request[:, 0], request[:, 1]
    active = slots < config.slots
    positions = jnp.where(active, state.lengths[slots], 0)
    return slots, active, positions, state.page_table.at[slots, positions // config.page_size].set(pages)


def _count(model: ModelConfig, tokens: jax.Array) -> jax.Array:
    """How often each id is among ``tokens`` int32 [n], padded with NO_TOKEN: int32 [vocab]."""
    return jnp.zeros(model.vocab_size, jnp.int32).at[tokens].add(1, mode="drop")


def _split(request: jax.Array, header: int, *sizes: int) -> list[Any]:
    """The scalars of the header as one list, then each part of a packed request."""
    parts = jnp.split(request, np.cumsum([header, *sizes])[:-1].tolist())
    if request.shape[0] != header + sum(sizes):
        raise ValueError(f"a request of {request.shape[0]} words does not hold {header} + {sizes}")
    return [[parts[0][i] for i in range(header)], *parts[1:]]
