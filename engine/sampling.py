"""One sampler for every request: all options are per-row arrays, so no mix of options makes a new program.

What costs something sits behind a `jax.lax.cond` on "any row needs it": log-probs, bias, penalties, drawing, filters. Filters find
their threshold by bisection over the float's bits, 31 masked sums, instead of sorting the vocabulary. Of tokens that tie at the
threshold those of the lowest ids are kept, as many as the filter's definition needs.

`SamplingParams` says in which order options are applied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from engine.api import MAX_LOGIT_BIAS, MAX_SUPPRESSED, TOP_LOGPROBS, SamplingParams

NO_TOKEN = np.int32(2**31 - 1)  # pads lists of ids: outside every vocabulary, so that scatters drop it
NEVER = -jnp.inf
LEAST = int(np.float32(-np.inf).view(np.int32)) ^ 0x7FFFFFFF  # `_ordered_bits` of -infinity
GATHERED_ROWS = 32
ARGMAX_BLOCK = 128

# The numbers of `SamplingParams`, in the order in which they are packed; the seed is two of 32 bits.
_FLOATS = tuple(field.name for field in dataclasses.fields(SamplingParams) if isinstance(field.default, float))
_INTS = tuple(field.name for field in dataclasses.fields(SamplingParams) if isinstance(field.default, int) and field.name != "seed")
_SEED = ("seed_low", "seed_high")


@struct.dataclass
class SamplingRows:
    """`SamplingParams` of several rows, unpacked on the device. Every field is [rows] unless stated; numbers have the same names there."""

    temperature: jax.Array
    top_n_sigma: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    repetition_penalty: jax.Array
    top_k: jax.Array
    min_tokens: jax.Array
    logprobs: jax.Array
    seed_low: jax.Array
    seed_high: jax.Array
    sample: jax.Array
    adapter: jax.Array
    suppressed: jax.Array  # int32 [rows, MAX_SUPPRESSED]
    bias_tokens: jax.Array  # int32 [rows, MAX_LOGIT_BIAS]
    bias_values: jax.Array  # float32 [rows, MAX_LOGIT_BIAS]


@struct.dataclass
class SamplingContext:
    """What the choice depends on beside the logits and the options.

    The wide arrays hold one row per slot and are gathered only where a row needs them.
    """

    position: jax.Array  # int32 [rows]: of the token to be chosen
    generated: jax.Array  # int32 [rows]: tokens generated before it
    masked: jax.Array  # bool [rows]: the row's mask applies
    slots: jax.Array  # int32 [rows]: the row's index in the arrays below
    counts: jax.Array  # int32 [slots, vocab]: how often each token was generated
    in_prompt: jax.Array  # bool [slots, vocab]
    masks: jax.Array  # uint32 [slots, mask words]


def sampling_width() -> int:
    """int32 words of one packed `SamplingParams`."""
    return len(_FLOATS + _INTS + _SEED) + MAX_SUPPRESSED + 2 * MAX_LOGIT_BIAS


def pack(params: SamplingParams) -> np.ndarray:
    """One request's options as int32 [sampling_width()], floats by their bits: one transfer."""
    floats = np.array([getattr(params, name) for name in _FLOATS], np.float32)
    seed = params.seed & (2**64 - 1)
    ints = np.array([*(getattr(params, name) for name in _INTS), seed & 0xFFFFFFFF, seed >> 32], np.int64)
    suppressed = np.full(MAX_SUPPRESSED, NO_TOKEN, np.int32)
    suppressed[: len(params.suppressed)] = params.suppressed
    bias_tokens = np.full(MAX_LOGIT_BIAS, NO_TOKEN, np.int32)
    bias_values = np.zeros(MAX_LOGIT_BIAS, np.float32)
    if params.logit_bias:
        tokens, values = zip(*params.logit_bias, strict=True)
        bias_tokens[: len(tokens)] = tokens
        bias_values[: len(values)] = values
    parts = (floats.view(np.int32), ints.astype(np.uint32).view(np.int32), suppressed, bias_tokens, bias_values.view(np.int32))
    return np.concatenate(parts)


def unpack(rows: jax.Array) -> SamplingRows:
    """The named options of packed rows, int32 [rows, sampling_width()]."""
    names = _FLOATS + _INTS + _SEED
    sizes = [1] * len(names) + [MAX_SUPPRESSED, MAX_LOGIT_BIAS, MAX_LOGIT_BIAS]
    *scalars, suppressed, bias_tokens, bias_values = jnp.split(rows, np.cumsum(sizes)[:-1].tolist(), axis=1)

    def as_float(x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(x, jnp.float32)

    named = dict(zip(names, (scalar[:, 0] for scalar in scalars), strict=True))
    named |= {name: as_float(named[name]) for name in _FLOATS}
    return SamplingRows(**named, suppressed=suppressed, bias_tokens=bias_tokens, bias_values=as_float(bias_values))


def result_width() -> int:
    """int32 words of one packed result: token, log-prob, TOP_LOGPROBS tokens and their log-probs."""
    return 2 + 2 * TOP_LOGPROBS


def pack_results(tokens: jax.Array, logits: jax.Array, wanted: jax.Array) -> jax.Array:
    """Tokens [rows] and their log-probs under ``logits`` [rows, vocab] as int32 [rows, result_width()].

    Log-probs are the model's own log-softmax; zeros unless ``wanted`` (a scalar).
    """

    def with_logprobs() -> jax.Array:
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        chosen = jnp.take_along_axis(logprobs, jnp.maximum(tokens, 0)[:, None], axis=1)  # [rows, 1]
        values, indices = jax.lax.top_k(logprobs, min(TOP_LOGPROBS, logits.shape[-1]))
        pad = ((0, 0), (0, TOP_LOGPROBS - values.shape[1]))
        values, indices = jnp.pad(values, pad, constant_values=NEVER), jnp.pad(indices, pad, constant_values=-1)
        bits = jax.lax.bitcast_convert_type(jnp.concatenate([chosen, values], axis=1), jnp.int32)
        return jnp.concatenate([bits[:, :1], indices.astype(jnp.int32), bits[:, 1:]], axis=1)

    rest = jax.lax.cond(wanted, with_logprobs, lambda: jnp.zeros((tokens.shape[0], result_width() - 1), jnp.int32))
    return jnp.concatenate([tokens[:, None], rest], axis=1)


def choose(logits: jax.Array, rows: SamplingRows, context: SamplingContext) -> jax.Array:
    """The next token of each row, int32 [rows], from float32 logits [rows, vocab]."""
    with jax.named_scope("sample"):
        logits = _when(jnp.any(rows.bias_tokens[:, 0] != NO_TOKEN), lambda x: _add_bias(x, rows), logits)
        held_back = context.generated < rows.min_tokens
        logits = _when(jnp.any(held_back), lambda x: _suppress(x, rows, held_back), logits)
        logits = _when(jnp.any(context.masked), lambda x: _apply_masks(x, context), logits)
        penalized = (rows.presence_penalty != 0) | (rows.frequency_penalty != 0) | (rows.repetition_penalty != 1)
        logits = _when(jnp.any(penalized), lambda x: _penalize(x, rows, context), logits)
        drawn = rows.temperature > 0
        chosen: jax.Array = jax.lax.cond(
            jnp.any(drawn),
            lambda: jnp.where(drawn, _draw(logits, rows, context.position), _argmax(logits)),
            lambda: _argmax(logits),
        )
        return chosen


def _when(condition: jax.Array, apply: Callable[[jax.Array], jax.Array], logits: jax.Array) -> jax.Array:
    changed: jax.Array = jax.lax.cond(condition, apply, lambda x: x, logits)
    return changed


def _argmax(logits: jax.Array) -> jax.Array:
    largest: jax.Array = jax.lax.platform_dependent(logits, cpu=_argmax_by_blocks, default=_argmax_at_once)
    return largest


def _argmax_at_once(logits: jax.Array) -> jax.Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _argmax_by_blocks(logits: jax.Array) -> jax.Array:
    """The first of the largest, like `jnp.argmax`, which XLA's CPU code finds number by number. Maxima alone it finds by vectors: so
    first the block with the largest number, then the number in that block."""
    rows, vocab = logits.shape
    padded = jnp.pad(logits, ((0, 0), (0, -vocab % ARGMAX_BLOCK)), constant_values=NEVER)
    blocks = padded.reshape(rows, -1, ARGMAX_BLOCK)
    block = _argmax_at_once(jnp.max(blocks, axis=-1))
    of_block = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * ARGMAX_BLOCK + _argmax_at_once(of_block)


def _add_bias(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    row = jnp.arange(logits.shape[0])[:, None]
    return logits.at[row, rows.bias_tokens].add(rows.bias_values, mode="drop")


def _suppress(logits: jax.Array, rows: SamplingRows, held_back: jax.Array) -> jax.Array:
    row = jnp.arange(logits.shape[0])[:, None]
    tokens = jnp.where(held_back[:, None], rows.suppressed, NO_TOKEN)
    return logits.at[row, tokens].set(NEVER, mode="drop")


def _apply_masks(logits: jax.Array, context: SamplingContext) -> jax.Array:
    bits = (context.masks[context.slots][:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & 1  # [rows, words, 32]
    allowed = bits.reshape(bits.shape[0], -1)[:, : logits.shape[1]] == 1
    return jnp.where(allowed | ~context.masked[:, None], logits, NEVER)


def _penalize(logits: jax.Array, rows: SamplingRows, context: SamplingContext) -> jax.Array:
    """Presence and frequency as OpenAI defines them, over generated tokens; repetition as in CTRL (arXiv:1909.05858), over
    prompt and generated tokens: positive logits are divided by it, negative ones multiplied."""
    counts = _of_slots(context.counts, context.slots)
    generated = counts > 0
    seen = generated | _of_slots(context.in_prompt, context.slots)
    repetition = rows.repetition_penalty[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - rows.frequency_penalty[:, None] * counts.astype(jnp.float32)
    return logits - jnp.where(generated, rows.presence_penalty[:, None], 0.0)


def _of_slots(wide: jax.Array, slots: jax.Array) -> jax.Array:
    """The slots' rows. A TPU gathers them in its vector memory, which holds no more at once of a large vocabulary."""
    parts = [wide[slots[first : first + GATHERED_ROWS]] for first in range(0, slots.shape[0], GATHERED_ROWS)]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _draw(logits: jax.Array, rows: SamplingRows, position: jax.Array) -> jax.Array:
    """Draws from the filtered distribution by adding Gumbel noise to the logits; greedy rows give anything."""
    # Subtracting the maximum first keeps the smallest temperatures finite.
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    drawn = rows.temperature > 0
    # One condition around all: each moves the logits, so that those that nobody asks for cost nothing together.
    filters = (
        (rows.top_n_sigma > 0, lambda x: _keep_top_n_sigma(x, rows.top_n_sigma)),
        (rows.top_k > 0, lambda x: _keep_top_k(x, rows.top_k)),
        (rows.top_p < 1, lambda x: _keep_top_p(x, rows.top_p)),
    )
    asked = [jnp.any(drawn & wanted) for wanted, _ in filters]

    def filter_all(logits: jax.Array) -> jax.Array:
        for condition, (_, keep) in zip(asked, filters, strict=True):
            logits = _when(condition, keep, logits)
        return logits

    logits = _when(jnp.any(jnp.stack(asked)), filter_all, logits)
    # min-p compares with the most probable token, whose logit is 0 here. log(0) = -inf keeps everything.
    logits = jnp.where(logits >= jnp.log(rows.min_p)[:, None], logits, NEVER)

    def noise(seed_low: jax.Array, seed_high: jax.Array, sample: jax.Array, position: jax.Array) -> jax.Array:
        words = jax.lax.bitcast_convert_type(jnp.stack([seed_high, seed_low]), jnp.uint32)
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, sample), position)
        return jax.random.gumbel(key, (logits.shape[1],), jnp.float32)

    return _argmax(logits + jax.vmap(noise)(rows.seed_low, rows.seed_high, rows.sample, position))


def _keep_top_n_sigma(logits: jax.Array, n: jax.Array) -> jax.Array:
    """Keeps the logits of each row that are at most ``n`` [rows] standard deviations below the largest, which is 0 here
    (arXiv:2411.07641); 0 and less keep all. Temperature moves neither side, as both scale by it. As in llama.cpp the deviation is that
    of all tokens that can be chosen: those that a mask or a suppressed id took away do not count."""
    possible = logits > NEVER
    count = _count(possible)[:, None].astype(jnp.float32)

    def mean(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(possible, x, 0.0), axis=-1, keepdims=True) / count

    deviation = jnp.sqrt(mean(jnp.square(logits - mean(logits))))
    threshold = jnp.where(n[:, None] > 0, -n[:, None] * deviation, NEVER)
    return jnp.where(logits >= threshold, logits, NEVER)


def _keep_top_k(logits: jax.Array, top_k: jax.Array) -> jax.Array:
    """Keeps the ``top_k`` largest logits of each row, of equal ones those of the lowest ids; 0 keeps all."""
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, logits.shape[1]), logits.shape[1])
    order = _ordered_bits(logits)
    threshold = _largest_threshold(order, lambda kept: _count(kept) >= wanted)[:, None]
    surplus = _count(order >= threshold) > wanted
    return _keep_from(logits, threshold, surplus, lambda: wanted - _count(order > threshold))


def _keep_top_p(logits: jax.Array, top_p: jax.Array) -> jax.Array:
    """Keeps the most probable tokens whose probabilities first reach ``top_p`` (nucleus sampling, arXiv:1904.09751), of equal
    ones those of the lowest ids; 1 keeps all."""
    weights = jnp.exp(logits)  # logits are at most 0: the maximum was subtracted
    order = _ordered_bits(logits)

    def mass(kept: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(kept, weights, 0.0), axis=-1)

    wanted = top_p * jnp.sum(weights, axis=-1)
    threshold = _largest_threshold(order, lambda kept: mass(kept) >= wanted)[:, None]

    def ties() -> jax.Array:
        weight = jnp.max(jnp.where(order == threshold, weights, 0.0), axis=-1)
        lacking = (wanted - mass(order > threshold)) / jnp.maximum(weight, jnp.finfo(jnp.float32).tiny)
        return jnp.clip(jnp.ceil(lacking), 1, logits.shape[1]).astype(jnp.int32)

    kept = _keep_from(logits, threshold, (top_p < 1) & (_count(order == threshold) > 1), ties)
    return jnp.where((top_p >= 1)[:, None], logits, kept)


def _keep_from(logits: jax.Array, threshold: jax.Array, surplus: jax.Array, ties: Callable[[], jax.Array]) -> jax.Array:
    """Keeps what is above the threshold [rows, 1] (ordered bits), and of what equals it the first ``ties()`` [rows], at least 1.

    ``ties`` is only asked where there may be a ``surplus`` [rows]: then all rows are cut.
    """
    order = _ordered_bits(logits)
    equal = order == threshold
    first = jax.lax.cond(jnp.any(surplus), lambda: _first_of(equal, ties()), lambda: equal)
    return jnp.where((order > threshold) | first, logits, NEVER)


def _first_of(marked: jax.Array, wanted: jax.Array) -> jax.Array:
    """The first ``wanted`` [rows] of what is marked, bool [rows, vocab]: by bisection for the id that they end before."""
    ids = jnp.arange(marked.shape[1], dtype=jnp.int32)[None]

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) >> 1
        enough = _count(marked & (ids < middle[:, None])) >= wanted
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    bounds = jnp.zeros_like(wanted), jnp.full_like(wanted, marked.shape[1])  # too few, enough
    end: jax.Array = jax.lax.fori_loop(0, marked.shape[1].bit_length(), halve, bounds)[1]
    return marked & (ids < end[:, None])


def _count(marked: jax.Array) -> jax.Array:
    """int32 [rows] of bool [rows, vocab]."""
    return jnp.sum(marked, axis=-1, dtype=jnp.int32)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """The int32 whose order is the order of the floats."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _largest_threshold(order: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest int32 threshold per row for which ``enough(order >= threshold)`` holds, by bisection.

    ``order`` are the ordered bits of logits [rows, vocab] whose largest is 0: less than 2^31 values from that of -infinity on.
    ``enough`` maps bool [rows, vocab] to bool [rows], and holds when everything is kept.
    """
    low = jnp.full(order.shape[0], LEAST, jnp.int32)  # enough
    high = jnp.max(order, axis=-1) + 1  # keeps nothing: not enough

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + (low & high & 1)  # no overflow
        fits = enough(order >= middle[:, None])
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle)

    threshold: jax.Array = jax.lax.fori_loop(0, 31, halve, (low, high))[0]
    return threshold
