"""What CPU servers do in C++, on every instruction set, against numpy in float64: attention, linear maps; and who is chosen when."""

import ctypes

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from engine import native
from engine.attention import Scoring
from engine.config import ConfigError, EngineConfig, ModelConfig, attention_choice
from engine.kernels import choose_attention
from engine.layers import linear
from engine.quantization import Quantized, dequantize, quantize

pytestmark = pytest.mark.slow

needs_library = pytest.mark.skipif(native.load() is not None, reason=str(native.load()))

LANES = {"baseline": 4, "avx2": 8, "avx512": 16}


@pytest.fixture(params=LANES)
def lanes(request):
    """Instruction sets this machine does not have fall back to smaller ones."""
    library = native.library()
    library.preheat_limit_lanes(LANES[request.param])
    yield
    library.preheat_limit_lanes(max(LANES.values()))


def plain(q, keys, values, *, scale, softcap=None, sinks=None):
    """q [g, d], the keys and values [s, d] that it sees, sinks [g] -> [g, d]."""
    scores = scale * q.astype(np.float64) @ keys.T.astype(np.float64)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    most = scores.max(-1, keepdims=True)
    weights = np.exp(scores - most)
    nothing = 0 if sinks is None else np.exp(sinks[:, None].astype(np.float64) - most)
    return weights / (weights.sum(-1, keepdims=True) + nothing) @ values


class Paged:
    """Rows of several lengths in a pool whose pages lie in any order; the last token of each is still to be stored."""

    def __init__(self, lengths, *, heads=2, group=3, head_dim=32, page_size=32, layers=2, kind="float32", seed=0):
        rng = np.random.default_rng(seed)
        self.lengths, self.page_size = np.array(lengths, np.int32), page_size
        rows, width = len(lengths), -(-max(lengths) // page_size) + 1
        self.table = (1 + rng.permutation(rows * width)).reshape(rows, width).astype(np.int32)
        shape = (layers, heads, 1 + rows * width, page_size, head_dim)
        self.pools = tuple(self._stored(rng.normal(size=shape), kind) for _ in range(2))
        self.new = tuple(self._stored(rng.normal(size=(rows, heads, head_dim)), kind) for _ in range(2))
        self.q = rng.normal(size=(rows, heads, group, head_dim)).astype(np.float32)
        self.sinks = rng.normal(size=(heads, group)).astype(np.float32)
        last = np.maximum(self.lengths - 1, 0)
        self.pages, self.offsets = self.table[np.arange(rows), last // page_size], last % page_size

    @staticmethod
    def _stored(array, kind):
        if kind == "int8":
            return quantize(jnp.asarray(array, jnp.float32))
        return jnp.asarray(array.astype(ml_dtypes.bfloat16 if kind == "bfloat16" else np.float32))

    def run(self, layer, *, window=None, scoring=Scoring(), sinks=None):
        def attend(pools, layer, *rest):
            options = {"scoring": scoring, "window": window, "sinks": sinks}
            return native.decode(pools, layer, *rest, **options)

        copied = jax.tree.map(lambda pool: pool + 0, self.pools)
        arguments = (np.int32(layer), self.q, self.new, self.table, self.pages, self.offsets.astype(np.int32), self.lengths)
        return jax.jit(attend, donate_argnums=0)(copied, *arguments)

    def want_pool(self, which, layer):
        pool = np.array(dequantize(self.pools[which], jnp.float32), np.float32)
        new = np.array(dequantize(self.new[which], jnp.float32), np.float32)
        for row in np.flatnonzero(self.lengths):
            pool[layer, :, self.pages[row], self.offsets[row]] = new[row]
        return pool

    def check(self, layer, pools, out, *, window=None, scoring=Scoring(), sinks=None):
        keys, values = (self.want_pool(which, layer) for which in range(2))
        for got, want in zip(pools, (keys, values), strict=True):
            np.testing.assert_array_equal(np.asarray(dequantize(got, jnp.float32)), want)
        head_dim = self.q.shape[-1]
        for row, length in enumerate(self.lengths):
            if length == 0:
                assert (np.asarray(out[row]) == 0).all()
                continue
            first = 0 if window is None else max(0, length - int(window))
            for head in range(self.q.shape[1]):
                seen = [pool[layer, head, self.table[row]].reshape(-1, head_dim)[first:length] for pool in (keys, values)]
                want = plain(
                    self.q[row, head], *seen, scale=scoring.scale or head_dim**-0.5, softcap=scoring.softcap,
                    sinks=None if sinks is None else sinks[head],
                )  # fmt: skip
                np.testing.assert_allclose(out[row, head], want, atol=2e-6)


@needs_library
@pytest.mark.parametrize("page_size", [16, 32, 128])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 16), (2, 80), (5, 128)])
def test_decode(page_size, group, head_dim, lanes):
    """Lengths on and beside the borders of pages, of blocks of 64 and of chunks of 512; a padded row; the second of two layers."""
    paged = Paged([1, 0, 16, 17, 64, 65, 512, 513, 1100], group=group, head_dim=head_dim, page_size=page_size)
    paged.check(1, *paged.run(1))


@needs_library
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_decode_of_other_types(kind, lanes):
    paged = Paged([70, 0, 600], kind=kind)
    paged.check(0, *paged.run(0))


@needs_library
@pytest.mark.parametrize("window", [1, 7, 64, 65, 500, 2000])
@pytest.mark.parametrize("traced", [False, True])
def test_decode_with_windows_soft_caps_scales_and_sinks(window, traced):
    paged = Paged([1, 290, 0, 1030])
    options = {"window": window, "scoring": Scoring(scale=0.7, softcap=1.5), "sinks": paged.sinks}
    ran = paged.run(1, **options | {"window": jnp.int32(window) if traced else window})
    paged.check(1, *ran, **options)


@needs_library
def test_scores_of_any_size():
    """Scores far apart, far below zero and equal: no overflow, no division by zero."""
    paged = Paged([200, 200, 200])
    paged.q *= np.array([1e4, -1e4, 0], np.float32)[:, None, None, None]
    paged.check(0, *paged.run(0))


@needs_library
def test_decode_changes_pools_in_place():
    paged = Paged([70, 600])
    attend = jax.jit(
        lambda pools, *rest: native.decode(pools, 0, *rest, scoring=Scoring(), window=None, sinks=None),
        donate_argnums=0,
    )
    arguments = (paged.pools, paged.q, paged.new, paged.table, paged.pages, paged.offsets.astype(np.int32), paged.lengths)
    memory = attend.lower(*arguments).compile().memory_analysis()
    pools = sum(pool.nbytes for pool in paged.pools)
    assert memory.alias_size_in_bytes == pools
    assert memory.temp_size_in_bytes < pools / 100


def prefill(q, pools, layer, start, length, *, window=None, scoring=Scoring(), sinks=None):
    def attend(pools, *rest):
        return native.prefill(pools, *rest, scoring=scoring, window=window, sinks=sinks)

    return np.asarray(jax.jit(attend)(pools, np.int32(layer), q, np.int32(start), np.int32(length)))


def check_prefill(out, q, pools, layer, start, count, *, window=None, scoring=Scoring(), sinks=None):
    keys, values = (np.asarray(dequantize(pool, jnp.float32), np.float32) for pool in pools)
    for i in range(count):
        seen = slice(max(0, start + i + 1 - (window or 2**30)), start + i + 1)
        for head in range(q.shape[1]):
            want = plain(
                q[i, head], keys[layer, head, seen], values[layer, head, seen],
                scale=scoring.scale or q.shape[-1] ** -0.5, softcap=scoring.softcap,
                sinks=None if sinks is None else sinks[head],
            )  # fmt: skip
            np.testing.assert_allclose(out[i, head], want, atol=2e-6)


def prefix(capacity, tokens, *, heads=2, group=2, head_dim=32, seed=0):
    rng = np.random.default_rng(seed)
    pools = tuple(jnp.asarray(rng.normal(size=(2, heads, capacity, head_dim)), jnp.float32) for _ in range(2))
    return rng.normal(size=(tokens, heads, group, head_dim)).astype(np.float32), pools


@needs_library
@pytest.mark.parametrize(("start", "tokens", "capacity"), [(0, 1, 64), (0, 16, 64), (40, 16, 64), (250, 30, 600), (300, 300, 600)])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (2, 16), (3, 80)])
def test_prefill(start, tokens, capacity, group, head_dim, lanes):
    """Blocks of 64 keys, whole and not; one chunk of queries and several."""
    q, pools = prefix(capacity, tokens, group=group, head_dim=head_dim)
    check_prefill(prefill(q, pools, 1, start, start + tokens), q, pools, 1, start, tokens)


@needs_library
def test_padding_sees_no_more_than_is_live():
    """Rows beyond the chunk's length are finite, and what lies beyond the live tokens is not read."""
    q, pools = prefix(128, 64)
    pools = tuple(pool.at[:, :, 75:].set(jnp.nan) for pool in pools)
    out = prefill(q, pools, 0, 60, 75)
    assert np.isfinite(out).all()
    check_prefill(out, q, pools, 0, 60, 15)


@needs_library
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_prefill_of_other_types(kind, lanes):
    q, pools = prefix(128, 40)
    pools = tuple(quantize(pool) if kind == "int8" else pool.astype(jnp.bfloat16) for pool in pools)
    check_prefill(prefill(q, pools, 0, 50, 90), q, pools, 0, 50, 40)


@needs_library
@pytest.mark.parametrize("window", [1, 7, 64, 65, 300])
@pytest.mark.parametrize("traced", [False, True])
def test_prefill_with_windows_soft_caps_scales_and_sinks(window, traced):
    q, pools = prefix(512, 200)
    sinks = np.random.default_rng(5).normal(size=(2, 2)).astype(np.float32)
    options = {"window": window, "scoring": Scoring(scale=0.7, softcap=1.5), "sinks": sinks}
    traced_options = options | {"window": jnp.int32(window) if traced else window}
    out = prefill(q, pools, 0, 250, 450, **traced_options)
    check_prefill(out, q, pools, 0, 250, 200, **options)


@needs_library
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 16), (65, 80), (1000, 768)])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_linear(outputs, inputs, kind, lanes):
    """Tiles of 3, 4 and 6, whole and not; one part and several for the threads."""
    rng = np.random.default_rng(outputs)
    weight = rng.normal(size=(outputs, inputs)).astype(np.float32)
    if kind == "int8":
        stored = quantize(jnp.asarray(weight))
        weight = np.asarray(stored.values, np.float64) * np.asarray(stored.scale, np.float64)[:, None]
    else:
        stored = jnp.asarray(weight.astype(ml_dtypes.bfloat16 if kind == "bfloat16" else np.float32))
        weight = np.asarray(stored, np.float64)
    for rows in (1, 2, 3, 4, 7, 32):
        x = rng.normal(size=(rows, inputs)).astype(np.float32)
        np.testing.assert_allclose(jax.jit(native.linear)(stored, x), x.astype(np.float64) @ weight.T, rtol=1e-5, atol=1e-4)


@needs_library
def test_bfloat16_rows_are_summed_up_in_float32():
    """Of 1 + 2^-8 * 4096 every partial sum in bfloat16 would stay 1."""
    x = jnp.full((2, 4112), 2**-4, jnp.bfloat16).at[:, :16].set(0).at[:, 0].set(1)
    weight = jnp.full((3, 4112), 2**-4, jnp.bfloat16).at[:, 0].set(1)
    out = jax.jit(native.linear)(weight, x)
    assert out.dtype == jnp.bfloat16
    assert (np.asarray(out, np.float32) == 17).all()


@needs_library
def test_which_linear_maps_are_native():
    def calls(kind, rows, inputs=64):
        weight = jax.ShapeDtypeStruct((8, inputs), kind)
        if kind == "int8":
            weight = Quantized(weight, jax.ShapeDtypeStruct((8,), "float32"))
        x = jax.ShapeDtypeStruct((rows, inputs), "bfloat16" if kind == "bfloat16" else "float32")
        lowered = jax.jit(linear).trace(weight, x).lower(lowering_platforms=(platform,))
        return "preheat_linear" in lowered.as_text()

    platform = "cpu"
    assert [rows for rows in (1, 2, 8, 64) if calls("float32", rows)] == [2, 8]
    assert [rows for rows in (1, 2, 8, 64) if calls("int8", rows)] == [1, 2, 8]
    assert not calls("float32", 8, inputs=72)
    platform = "tpu"
    assert not any(calls(kind, 8) for kind in ("float32", "bfloat16", "int8"))


def model(**changes) -> ModelConfig:
    return ModelConfig(
        **{"family": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_layers": 2, "num_heads": 4,
           "num_kv_heads": 2, "head_dim": 16, "max_position": 64} | changes
    )  # fmt: skip


CONFIG = EngineConfig(slots=1, max_len=64, kv_pages=3, prefill_buckets=(16,), batch_sizes=(1,), attention="native")


@needs_library
def test_who_attends():
    assert attention_choice("auto", "cpu") == "native"
    assert choose_attention(model(), CONFIG, "cpu").explain() == "attention in decode: native; in prefill: native"
    odd = choose_attention(model(head_dim=24), CONFIG, "cpu")
    assert not odd.native
    assert "XLA, because head_dim = 24 is no multiple of 16" in odd.explain()
    with pytest.raises(ConfigError, match="--attention native is for CPUs"):
        choose_attention(model(), CONFIG, "tpu")


def test_without_a_library(monkeypatch):
    """Attention falls back to XLA and says why."""
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native, "load", native.load.__wrapped__)
    attention = choose_attention(model(), CONFIG, "cpu")
    assert not attention.native
    assert "XLA, because the native library was not built" in attention.explain()


def test_a_library_that_does_not_load(monkeypatch, tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(native, "library", lambda: ctypes.CDLL(str(broken)))
    monkeypatch.setattr(native, "load", native.load.__wrapped__)
    assert "does not load" in choose_attention(model(), CONFIG, "cpu").explain()
