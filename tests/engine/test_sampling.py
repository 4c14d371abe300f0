"""The sampler against plain numpy definitions of each option, and its distribution against the one asked for."""

import jax
import numpy as np
import pytest

from engine.api import TOP_LOGPROBS, SamplingParams
from engine.sampling import SamplingContext, _argmax, _keep_top_k, _keep_top_p, choose, pack, pack_results, unpack

pytestmark = pytest.mark.slow

VOCAB = 50


@jax.jit
def _choose(logits, packed, context):
    return choose(logits, unpack(packed), context)


def context(rows: int, *, position=0, generated=0, counts=None, in_prompt=None, mask=None) -> SamplingContext:
    words = -(-VOCAB // 32)
    masks = np.zeros((rows, words), np.uint32) if mask is None else np.tile(mask, (rows, 1))
    return SamplingContext(
        position=np.broadcast_to(np.asarray(position, np.int32), (rows,)),
        generated=np.full(rows, generated, np.int32),
        masked=np.full(rows, mask is not None),
        slots=np.arange(rows, dtype=np.int32),
        counts=np.zeros((rows, VOCAB), np.int32) if counts is None else counts,
        in_prompt=np.zeros((rows, VOCAB), bool) if in_prompt is None else in_prompt,
        masks=masks,
    )


def run(logits, params, ctx=None) -> np.ndarray:
    rows = len(params)
    packed = np.stack([pack(p) for p in params])
    return np.asarray(_choose(np.asarray(logits, np.float32), packed, ctx or context(rows)))


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


@pytest.fixture
def logits():
    return np.random.default_rng(3).normal(size=VOCAB).astype(np.float32) * 2


def test_greedy_takes_the_largest(logits):
    assert run([logits, -logits], [SamplingParams(), SamplingParams()]).tolist() == [logits.argmax(), logits.argmin()]


@pytest.mark.parametrize("vocab", [1, 127, 128, 129, 1000])
def test_greedy_takes_the_first_of_the_largest(vocab):
    """Wherever it stands, within blocks and at their borders; of equals the first, as numpy does."""
    rng = np.random.default_rng(vocab)
    rows = [np.zeros(vocab), np.full(vocab, -np.inf), -np.arange(vocab), np.arange(vocab), *rng.integers(0, 3, (20, vocab))]
    rows = np.array(rows, np.float32)
    assert jax.jit(_argmax)(rows).tolist() == rows.argmax(-1).tolist()


def draws(logits, count=4000, **options) -> np.ndarray:
    """Frequencies of ``count`` draws, each at a position of its own (512 rows at a time)."""
    found = []
    for start in range(0, count, 500):
        rows = 500
        params = [SamplingParams(seed=11, **options)] * rows
        found.append(run(np.tile(logits, (rows, 1)), params, context(rows, position=start + np.arange(rows))))
    return np.bincount(np.concatenate(found), minlength=VOCAB) / count


def expected(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """The filters by their definitions, on a sorted vocabulary in float64."""
    p = softmax(logits.astype(np.float64) / temperature)
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]  # mass of what is more probable
    p[order[before >= top_p]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


@pytest.mark.parametrize("options", [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 1.0, "top_k": 10, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 1000},
])  # fmt: skip
def test_draws_follow_the_filtered_distribution(logits, options):
    want, found = expected(logits, **options), draws(logits, **options)
    assert set(np.flatnonzero(found)) <= set(np.flatnonzero(want))  # nothing filtered is ever drawn
    # 4000 draws: the standard error of a frequency is at most 0.008.
    np.testing.assert_allclose(found, want, atol=0.03)


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-30}])
def test_filters_that_leave_one_token_are_greedy(logits, options):
    options = {"temperature": 1.0, "seed": 5} | options
    assert run([logits] * 8, [SamplingParams(**options)] * 8, context(8, position=np.arange(8))).tolist() == [logits.argmax()] * 8


def test_the_key_is_seed_sample_and_position_only(logits):
    flat = np.zeros(VOCAB, np.float32)
    params = [SamplingParams(temperature=1.0, seed=seed, sample=sample) for seed in (1, 2, 2**63 - 1) for sample in (0, 1)]
    batch = run([flat] * 6, params, context(6, position=7))
    alone = [run([flat], [p], context(1, position=7))[0] for p in params]
    assert batch.tolist() == [int(token) for token in alone]
    assert len(set(batch.tolist())) > 2  # seeds and samples differ
    # The upper half of a seed counts too.
    low, high = SamplingParams(temperature=1.0, seed=9), SamplingParams(temperature=1.0, seed=9 + (1 << 40))
    streams = [[int(run([flat], [p], context(1, position=i))[0]) for i in range(8)] for p in (low, high)]
    assert streams[0] != streams[1]


def test_greedy_and_drawn_rows_share_a_batch(logits):
    params = [SamplingParams(), SamplingParams(temperature=1.0, seed=1), SamplingParams(temperature=0.7, top_k=2, seed=3)]
    tokens = run([logits] * 3, params)
    assert tokens[0] == logits.argmax()
    assert tokens[2] in np.argsort(-logits)[:2]


def test_bias_moves_and_bans(logits):
    best, second = np.argsort(-logits)[:2]
    ban = SamplingParams(logit_bias=((int(best), -100.0),))
    force = SamplingParams(logit_bias=((int(logits.argmin()), 100.0),))
    assert run([logits] * 3, [ban, force, SamplingParams()]).tolist() == [second, logits.argmin(), best]


def test_suppressed_ids_wait_for_min_tokens(logits):
    best, second = (int(i) for i in np.argsort(-logits)[:2])
    params = [SamplingParams(min_tokens=3, suppressed=(best,))]
    assert run([logits], params, context(1, generated=2)).tolist() == [second]
    assert run([logits], params, context(1, generated=3)).tolist() == [best]


def test_mask_allows_what_its_bits_say(logits):
    allowed = [int(i) for i in np.argsort(-logits)[[7, 30]]]
    mask = np.zeros(-(-VOCAB // 32), np.uint32)
    for token in allowed:
        mask[token // 32] |= np.uint32(1 << (token % 32))
    assert run([logits], [SamplingParams()], context(1, mask=mask)).tolist() == [allowed[0]]


def test_penalties_by_hand():
    logits = np.full(VOCAB, -10.0, np.float32)
    logits[:4] = [2.0, 1.8, 1.0, -0.5]
    counts = np.zeros((1, VOCAB), np.int32)
    counts[0, 0] = 2  # token 0 was generated twice
    prompt = np.zeros((1, VOCAB), bool)
    prompt[0, 1] = True  # token 1 is in the prompt
    ctx = context(1, counts=counts, in_prompt=prompt)

    def best(**options):
        return int(run([logits], [SamplingParams(**options)], ctx)[0])

    assert best(presence_penalty=0.1) == 0  # 2.0 - 0.1 = 1.9 > 1.8
    assert best(presence_penalty=0.3) == 1  # 1.7 < 1.8; the prompt is not penalized
    assert best(frequency_penalty=0.05) == 0  # 2.0 - 2 x 0.05 = 1.9
    assert best(frequency_penalty=0.15) == 1  # 2.0 - 2 x 0.15 = 1.7
    assert best(repetition_penalty=1.5) == 0  # both divided: 1.33, 1.2, 1.0
    assert best(repetition_penalty=2.5) == 2  # 0.8, 0.72, 1.0: prompt and generated are penalized
    assert best(presence_penalty=-2.0, frequency_penalty=-1.0) == 0


def test_negative_logits_are_multiplied_by_the_repetition_penalty():
    logits = np.full(VOCAB, -10.0, np.float32)
    logits[:2] = [-1.0, -1.5]
    prompt = np.zeros((1, VOCAB), bool)
    prompt[0, 0] = True
    assert run([logits], [SamplingParams(repetition_penalty=2.0)], context(1, in_prompt=prompt)).tolist() == [1]  # -2 < -1.5


def test_top_p_keeps_the_token_that_crosses():
    logits = np.log(np.array([0.5, 0.3, 0.2] + [1e-9] * (VOCAB - 3), np.float32))
    assert set(np.flatnonzero(draws(logits, temperature=1.0, top_p=0.6))) == {0, 1}


TIED = np.full(VOCAB, -np.inf)
TIED[40], TIED[[3, 7, 8, 20, 31, 49]] = np.log(0.4), np.log(0.1)


@pytest.mark.parametrize(
    "options, kept",
    [
        ({}, {3, 7, 8, 20, 31, 40, 49}),
        ({"top_k": 1}, {40}),
        ({"top_k": 3}, {3, 7, 40}),
        ({"top_k": 7}, {3, 7, 8, 20, 31, 40, 49}),
        ({"top_p": 0.65}, {3, 7, 8, 40}),  # 0.4 + 0.1 + 0.1 are too few
        ({"top_p": 0.3}, {40}),
        ({"top_k": 5, "top_p": 0.7}, {3, 7, 40}),  # of 0.8: 0.5, then 0.125 each
        ({"min_p": 0.2}, {3, 7, 8, 20, 31, 40, 49}),
        ({"min_p": 0.3}, {40}),
        ({"top_k": 3, "logit_bias": ((40, -100.0), (49, 1.0))}, {3, 7, 49}),
    ],
)
def test_of_equal_tokens_those_of_the_lowest_ids_are_kept(options, kept):
    assert set(np.flatnonzero(draws(TIED, 500, temperature=1.0, **options))) == kept


@pytest.mark.parametrize("options, tied", [({"top_k": 1}, 1), ({"top_p": 1e-6}, 1), ({"top_k": 4}, 4), ({"min_p": 1.0}, 50)])
def test_where_all_tokens_are_equal(options, tied):
    """``top_k`` 1 is greedy whatever the seed; ``min_p`` keeps all that are as probable as the best."""
    rows = [SamplingParams(temperature=1.0, seed=seed, **options) for seed in range(500)]
    assert set(run(np.zeros((500, VOCAB)), rows).tolist()) == set(range(tied))


@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize(
    ("n", "mask", "kept"),
    [
        (0.0, None, {0, 1, 2, 3}),
        (-1.0, None, {0, 1, 2, 3}),
        # Of 0, -1, -2, -3 the mean is -1.5 and the deviation sqrt((2.25 + 0.25 + 0.25 + 2.25) / 4) = 1.118.
        (0.8, None, {0}),
        (1.0, None, {0, 1}),
        (1.7, None, {0, 1}),
        (1.8, None, {0, 1, 2}),
        (2.7, None, {0, 1, 2, 3}),
        # Without the first it is sqrt(2 / 3) = 0.816, of the others only.
        (1.2, 0b1110, {1}),
        (1.3, 0b1110, {1, 2}),
        (1.0, 0b0100, {2}),
    ],
)
def test_top_n_sigma_keeps_what_is_near_the_largest_logit(temperature, n, mask, kept):
    """By hand. What cannot be chosen does not count; the temperature does not matter."""
    logits = np.full(VOCAB, -np.inf)
    logits[:4] = 5 - np.arange(4)
    params = [SamplingParams(temperature=temperature, top_n_sigma=n, seed=seed) for seed in range(500)]
    words = None if mask is None else np.array([mask, 0], np.uint32)
    assert set(run(np.tile(logits, (500, 1)), params, context(500, mask=words)).tolist()) == kept


def test_top_n_sigma_keeps_what_is_exactly_at_the_limit():
    """Of 0 and -2 the mean is -1 and the deviation 1: as in llama.cpp only what is below is taken away. A row beside it has its own."""
    logits = np.full(VOCAB, -np.inf)
    logits[[7, 9]] = [0, -2]

    def kept(n: float) -> set[int]:
        params = [SamplingParams(temperature=2.0, top_n_sigma=one, seed=seed) for seed in range(250) for one in (n, 0.0)]
        return set(run(np.tile(logits, (500, 1)), params)[::2].tolist())

    assert [kept(1.99), kept(2.0)] == [{7}, {7, 9}]


def test_what_filters_keep_is_exact():
    """Rows of few values, each with a filter of its own, against a stable sort."""
    rng = np.random.default_rng(4)
    logits = rng.integers(-4, 1, (60, 300)).astype(np.float32)
    logits[:, 0] = 0
    logits[20:40, 5:250] = -np.inf
    top_k, top_p = rng.integers(0, 320, 60).astype(np.int32), rng.uniform(0.01, 1, 60).astype(np.float32)
    by_k, by_p = jax.jit(_keep_top_k)(logits, top_k), jax.jit(_keep_top_p)(logits, top_p)
    for row, k, p, k_kept, p_kept in zip(logits, top_k, top_p, np.asarray(by_k), np.asarray(by_p), strict=True):
        order = np.argsort(-row, kind="stable")
        mass = np.cumsum(softmax(row.astype(np.float64))[order])
        for kept, count in ((k_kept, k or 300), (p_kept, np.searchsorted(mass, p) + 1)):
            want = np.full_like(row, -np.inf)
            want[order[:count]] = row[order[:count]]
            np.testing.assert_array_equal(kept, want)


def test_results_are_the_models_own_log_softmax(logits):
    tokens = np.array([4, 9], np.int32)
    scores = np.stack([logits, -logits])
    packed = np.asarray(jax.jit(pack_results)(tokens, scores, np.bool_(True)))
    for row in range(2):
        logprobs = np.log(softmax(scores[row].astype(np.float64)))
        assert packed[row, 0] == tokens[row]
        np.testing.assert_allclose(packed[row, 1:2].view(np.float32), logprobs[tokens[row]], atol=1e-5)
        order = np.argsort(-logprobs)[:TOP_LOGPROBS]
        assert packed[row, 2 : 2 + TOP_LOGPROBS].tolist() == order.tolist()
        np.testing.assert_allclose(packed[row, 2 + TOP_LOGPROBS :].view(np.float32), logprobs[order], atol=1e-5)


def test_pack_keeps_every_option():
    params = SamplingParams(
        temperature=0.7, top_k=2**31 - 1, top_p=0.9, min_p=0.1, presence_penalty=-1.5, frequency_penalty=2.0,
        repetition_penalty=1.1, seed=2**63 - 1, sample=3, logit_bias=((5, -100.0), (7, 1.5)), min_tokens=4,
        suppressed=(2, 257), logprobs=True,
    )  # fmt: skip
    rows = jax.device_get(jax.jit(unpack)(pack(params)[None]))
    assert rows.temperature[0] == np.float32(0.7)
    assert rows.repetition_penalty[0] == np.float32(1.1)
    assert rows.top_k[0] == 2**31 - 1
    assert (rows.seed_low.view(np.uint32)[0], rows.seed_high.view(np.uint32)[0]) == (0xFFFFFFFF, 0x7FFFFFFF)
    assert rows.suppressed[0, :3].tolist() == [2, 257, 2**31 - 1]
    assert rows.bias_tokens[0, :2].tolist() == [5, 7]
    assert rows.bias_values[0, :2].tolist() == [-100.0, 1.5]
