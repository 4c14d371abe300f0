"""Block-wise attention against one plain softmax in float64."""

import jax
import numpy as np
import pytest

from engine.attention import Scoring, attend_pages, attend_prefix

pytestmark = pytest.mark.slow


def plain(q, keys, values, visible):
    """q [g, d], keys and values [s, d], visible bool [s] -> [g, d]."""
    scores = q.astype(np.float64) @ keys.T.astype(np.float64) / np.sqrt(q.shape[-1])
    scores[:, ~visible] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ values


@pytest.mark.parametrize("page_size", [16, 32, 128, 256])
@pytest.mark.parametrize("layers", [1, 3])
def test_pages(page_size, layers):
    rng = np.random.default_rng(0)
    heads, group, head_dim, pool = 2, 3, 8, 12
    lengths = np.array([1, 0, page_size, page_size + 1, 2 * page_size + 5], np.int32)
    width = -(-4 * page_size // 128) * 128 // page_size if page_size < 128 else 4
    table = np.zeros((5, width), np.int32)
    pages = iter(rng.permutation(np.arange(1, pool)))
    for row, length in enumerate(lengths):
        for column in range(-(-length // page_size)):
            table[row, column] = next(pages)
    k_pages, v_pages = rng.normal(size=(2, layers, heads, pool, page_size, head_dim)).astype(np.float32)
    q = rng.normal(size=(5, heads, group, head_dim)).astype(np.float32)
    layer = layers - 1
    out = np.asarray(jax.jit(attend_pages)(q, k_pages, v_pages, layer, table, lengths))
    for row, length in enumerate(lengths):
        for head in range(heads):
            if length == 0:
                assert (out[row, head] == 0).all()
                continue
            keys, values = (pool_[layer, head, table[row]].reshape(-1, head_dim) for pool_ in (k_pages, v_pages))
            want = plain(q[row, head], keys, values, np.arange(len(keys)) < length)
            np.testing.assert_allclose(out[row, head], want, atol=1e-5)


def test_many_rows_in_groups_of_their_own_length():
    """24 rows make three groups on CPU: one of short rows, one of mixed ones, one of padding alone."""
    rng = np.random.default_rng(1)
    heads, group, head_dim, page_size, pool = 2, 2, 8, 32, 40
    lengths = np.array([*range(1, 9), 250, 0, 33, 128, 129, 0, 0, 200, *[0] * 8], np.int32)
    table = rng.integers(1, pool, (24, 8)).astype(np.int32)
    k_pages, v_pages = rng.normal(size=(2, 1, heads, pool, page_size, head_dim)).astype(np.float32)
    q = rng.normal(size=(24, heads, group, head_dim)).astype(np.float32)
    out = np.asarray(jax.jit(attend_pages)(q, k_pages, v_pages, 0, table, lengths))
    assert (out[lengths == 0] == 0).all()
    for row in np.flatnonzero(lengths):
        for head in range(heads):
            keys, values = (pool_[0, head, table[row]].reshape(-1, head_dim) for pool_ in (k_pages, v_pages))
            want = plain(q[row, head], keys, values, np.arange(len(keys)) < lengths[row])
            np.testing.assert_allclose(out[row, head], want, atol=1e-5)


@pytest.mark.parametrize(("start", "tokens", "capacity"), [(0, 1, 64), (0, 16, 64), (40, 16, 64), (250, 30, 600), (300, 280, 600)])
def test_prefix(start, tokens, capacity):
    rng = np.random.default_rng(1)
    heads, group, head_dim = 2, 2, 8
    keys, values = rng.normal(size=(2, 2, heads, capacity, head_dim)).astype(np.float32)
    q = rng.normal(size=(tokens, heads, group, head_dim)).astype(np.float32)
    positions = np.arange(start, start + tokens, dtype=np.int32)
    out = np.asarray(jax.jit(attend_prefix)(q, keys, values, 1, positions, np.int32(start + tokens)))
    for i, position in enumerate(positions):
        for head in range(heads):
            want = plain(q[i, head], keys[1, head], values[1, head], np.arange(capacity) <= position)
            np.testing.assert_allclose(out[i, head], want, atol=1e-5)


@pytest.mark.parametrize("window", [1, 7, 16, 17, 300])
@pytest.mark.parametrize("traced", [False, True])
def test_windows_soft_caps_scales_and_sinks(window, traced):
    """Both forms, across blocks: each query against one plain softmax over the tokens it sees and its sink."""
    rng = np.random.default_rng(2)
    heads, group, head_dim, length, page_size = 2, 2, 8, 290, 32
    keys, values = rng.normal(size=(2, 1, heads, 320, head_dim)).astype(np.float32)
    q = rng.normal(size=(2, heads, group, head_dim)).astype(np.float32)
    sinks = rng.normal(size=(heads, group)).astype(np.float32)
    scoring = Scoring(scale=0.7, softcap=1.5)
    positions = np.array([length - 2, length - 1], np.int32)

    def prefix(width):
        return attend_prefix(q, keys, values, 0, positions, np.int32(length), scoring=scoring, window=width, sinks=sinks)

    def pages(width):
        pools = (pool.reshape(1, heads, 10, page_size, head_dim) for pool in (keys, values))
        table = np.tile(np.arange(12, dtype=np.int32) % 10, (2, 1))
        return attend_pages(q, *pools, 0, table, positions + 1, scoring=scoring, window=width, sinks=sinks)

    for attend in (prefix, pages):
        out = np.asarray(jax.jit(attend)(np.int32(window)) if traced else jax.jit(lambda attend=attend: attend(window))())
        for row, position in enumerate(positions):
            seen = slice(max(0, position - window + 1), position + 1)
            for head in range(heads):
                scores = 1.5 * np.tanh(0.7 * q[row, head].astype(np.float64) @ keys[0, head, seen].T / 1.5)
                weights = np.exp(scores)
                weights /= weights.sum(-1, keepdims=True) + np.exp(sinks[head].astype(np.float64))[:, None]
                np.testing.assert_allclose(out[row, head], weights @ values[0, head, seen], atol=1e-5)
