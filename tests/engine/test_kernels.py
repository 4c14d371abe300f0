"""The Pallas kernels that come with JAX, in interpret mode, against one plain softmax in float64; and who is chosen when."""

import contextlib
import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax_harness import Runner, make_engine

from engine import jax_engine, kernels
from engine.attention import Scoring
from engine.config import ConfigError, EngineConfig, LayerKind, ModelConfig, attention_choice, vector_lanes
from engine.kernels import Attention, Choice, choose_attention

pytestmark = pytest.mark.slow

PAGE, HEAD_DIM = 32, 128
TOLERANCE = 0.02  # of values of order one; bfloat16 has 8 bits


def plain(q, keys, values, *, scale, softcap=None, sinks=None):
    """q [g, d], the keys and values [s, d] that it sees, sinks [g] -> [g, d]."""
    q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
    scores = scale * q @ keys.T
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    weights = np.exp(scores)
    nothing = 0 if sinks is None else np.exp(np.asarray(sinks, np.float64))[:, None]
    return weights / (weights.sum(-1, keepdims=True) + nothing) @ values


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels for accelerators run here, on one device: on two, the TPU's interpreter may wait for ever. They promote ranks and
    dtypes, which is theirs to do."""
    from jax.experimental.pallas.ops.gpu import paged_attention as gpu

    monkeypatch.setattr(gpu, "paged_attention", functools.partial(gpu.paged_attention, interpret=True))
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield {"tpu": pltpu.force_tpu_interpret_mode(), "gpu": contextlib.nullcontext()}


@pytest.mark.filterwarnings("ignore:jax.experimental.pallas.ops.gpu:DeprecationWarning")
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_decode_kernels(platform, interpreted):
    """Several pages, a page's border, a padded row; the second of two layers."""
    kernel = {"tpu": kernels._tpu_pages, "gpu": kernels._gpu_pages}[platform]
    layer, heads, group = 1, 2, 4
    lengths = np.array([70, 0, 64], np.int32)
    table = np.array([[5, 2, 7, 0], [0, 0, 0, 0], [3, 6, 0, 0]], np.int32)
    k_pages, v_pages = normal(0, 2, heads, 8, PAGE, HEAD_DIM), normal(1, 2, heads, 8, PAGE, HEAD_DIM)
    q = normal(2, 3, heads, group, HEAD_DIM)
    scoring = Scoring(scale=0.1, softcap=2.0)
    attend = Attention(True, decode=Choice(kernel)).pages
    run = jax.jit(functools.partial(attend, scoring=scoring, window=None, sinks=None))
    with interpreted[platform]:
        out = np.asarray(run(q, k_pages, v_pages, np.int32(layer), table, lengths), np.float64)
    for row, length in enumerate(lengths):
        for head in range(heads):
            keys, values = (np.asarray(pool[layer, head])[table[row]].reshape(-1, HEAD_DIM) for pool in (k_pages, v_pages))
            want = plain(q[row, head], keys[:length], values[:length], scale=0.1, softcap=2.0) if length else 0
            np.testing.assert_allclose(out[row, head], want, atol=TOLERANCE)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_the_gpu_kernel_lowers():
    """To Triton, for a GPU that is not here; Triton itself compiles on the GPU's machine."""

    def of(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    pool, integers = of(2, 8, 64, PAGE, HEAD_DIM), functools.partial(of, dtype=jnp.int32)
    attend = Attention(True, decode=Choice(kernels._gpu_pages)).pages
    run = jax.jit(functools.partial(attend, scoring=Scoring(scale=0.1), window=None, sinks=None))
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        traced = run.trace(of(4, 8, 4, HEAD_DIM), pool, pool, integers(), integers(4, 16), integers(4))
        try:
            lowered = traced.lower(lowering_platforms=("cuda",))
        except RuntimeError as error:
            if "No supported GPU devices found" not in str(error):
                raise
            pytest.skip("since 0.12, JAX lowers for GPUs only where there is one")
        assert "triton" in lowered.as_text()


@pytest.mark.parametrize(
    ("start", "tokens", "window", "softcap", "sinks"), [(700, 16, None, None, False), (500, 32, 40, 2.0, True)]
)
def test_prefill_kernel(start, tokens, window, softcap, sinks, interpreted):
    """Queries that begin in the middle of a prefix of several blocks."""
    layer, heads, group, capacity = 1, 2, 2, 1024
    keys, values = normal(0, 2, heads, capacity, HEAD_DIM), normal(1, 2, heads, capacity, HEAD_DIM)
    q = normal(2, tokens, heads, group, HEAD_DIM)
    sink = normal(3, heads, group) if sinks else None
    positions = np.arange(start, start + tokens, dtype=np.int32)
    attend = Attention(True, prefill=Choice(kernels._tpu_prefix)).prefix
    run = jax.jit(functools.partial(attend, scoring=Scoring(scale=0.1, softcap=softcap), window=window, sinks=sink))
    with interpreted["tpu"]:
        out = np.asarray(run(q, keys, values, np.int32(layer), positions, np.int32(start + tokens)), np.float64)
    for row in (0, 1, tokens - 1):
        position = start + row
        seen = slice(0 if window is None else position - window + 1, position + 1)
        for head in range(heads):
            one = None if sink is None else sink[head]
            want = plain(
                q[row, head], keys[layer, head, seen], values[layer, head, seen], scale=0.1, softcap=softcap, sinks=one
            )
            np.testing.assert_allclose(out[row, head], want, atol=TOLERANCE)
    assert np.isfinite(out).all()


def test_an_engine_on_kernels(interpreted, monkeypatch):
    """Prefill, insert and decode beside a padded row: the tokens that transformers gives (`test_golden.py`), in bfloat16.

    The second-best tokens of this prompt are 0.17 behind, which bfloat16's rounding does not close.
    """
    as_on_tpu = lambda model, config, platform: choose_attention(model, config, "tpu")
    monkeypatch.setattr(jax_engine, "choose_attention", as_on_tpu)
    layout = {"slots": 2, "batch_sizes": (2,), "prefill_buckets": (16,), "page_size": 16, "kv_pages": 33}
    accelerator = {"layers": "scanned", "attention": "pallas", "lanes": 128, "dtype": "bfloat16"}
    tiny = pathlib.Path(__file__).parents[1] / "golden" / "tiny_llama"
    golden = np.load(tiny / "golden.npz")
    with interpreted["tpu"]:
        runner = Runner(make_engine(tiny, **layout, **accelerator))
        assert "XLA" not in runner.engine.attention.explain()
        sequence, _ = runner.start(golden["prompt_3"].tolist(), slot=1)
        for _ in range(2):
            runner.step([sequence])
    assert sequence.tokens == golden["greedy_3"][:3].tolist()


def test_xla_over_the_list_of_pages():
    """Scanned layers, where no kernel fits: windows and sinks."""
    layer, heads, group, window = 1, 2, 2, 20
    lengths, table = np.array([70, 33] * 8, np.int32), np.array([[5, 2, 7, 0], [3, 6, 0, 0]] * 8, np.int32)
    k_pages, v_pages = normal(0, 2, heads, 8, PAGE, HEAD_DIM), normal(1, 2, heads, 8, PAGE, HEAD_DIM)
    q, sinks = normal(2, len(lengths), heads, group, HEAD_DIM), normal(3, heads, group)
    run = jax.jit(functools.partial(Attention(True).pages, scoring=Scoring(scale=0.1), sinks=sinks))
    out = np.asarray(run(q, k_pages, v_pages, np.int32(layer), table, lengths, window=np.int32(window)), np.float64)
    for row, length in enumerate(lengths):
        for head in range(heads):
            seen = slice(length - window, length)
            keys, values = (
                np.asarray(pool[layer, head])[table[row]].reshape(-1, HEAD_DIM)[seen] for pool in (k_pages, v_pages)
            )
            want = plain(q[row, head], keys, values, scale=0.1, sinks=sinks[head])
            np.testing.assert_allclose(out[row, head], want, atol=TOLERANCE)


MODEL = ModelConfig("llama", 128, 256, 256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, max_position=4096)
LAYOUT = EngineConfig(
    slots=4, max_len=256, kv_pages=33, prefill_buckets=(16, 128), batch_sizes=(1, 4), dtype="bfloat16", layers="scanned",
    attention="pallas", lanes=128,
)  # fmt: skip


def explained(platform="tpu", model=(), **layout) -> str:
    config = dataclasses.replace(LAYOUT, lanes=vector_lanes(platform), **layout)
    return choose_attention(dataclasses.replace(MODEL, **dict(model)), config, platform).explain()


def test_who_attends():
    """The rules that decide, and the reasons that people read."""
    paged, splash = "Pallas paged_attention", "Pallas splash_attention"
    assert explained() == f"attention in decode: {paged}; in prefill: {splash}"
    assert explained(attention="xla") == "attention in decode: XLA; in prefill: XLA"
    windowed = {"layer_kinds": (LayerKind(window=64),), "layer_pattern": (0, 0)}
    assert explained(model=windowed) == f"attention in decode: XLA, because layers have windows; in prefill: {splash}"
    mixed = {"layer_kinds": (LayerKind(window=64), LayerKind()), "layer_pattern": (0, 1)}
    assert explained(model=mixed).endswith("in prefill: XLA, because windows differ between layers")
    assert explained(model={"sinks": True}) == f"attention in decode: XLA, because heads have sinks; in prefill: {splash}"
    assert explained(model={"attention_softcap": 50.0}) == explained()
    assert "the kernel would round float32 keys to bfloat16" in explained(dtype="float32")
    assert "prefill buckets [24] are no multiples of 16" in explained(prefill_buckets=(16, 24, 128))
    assert "prefill buckets [16] are no multiples of 16 for each of 2 groups" in explained(prefill_buckets=(16, 32, 128), dp=2)
    assert "too large for scalar memory" in explained(slots=4096, batch_sizes=(4096,), max_len=4096)
    assert "pages of 8 x 128 are no whole tiles" in explained(page_size=8)
    assert explained("gpu").startswith("attention in decode: Pallas paged_attention; in prefill: XLA, because")
    assert "pages of 32 x 96 are no powers of two" in explained("gpu", model={"head_dim": 96})
    assert "the pool has 2^31 elements or more" in explained("gpu", kv_pages=2**18)


def test_kernels_are_for_accelerators():
    with pytest.raises(ConfigError, match="--attention pallas: there are no kernels for cpu"):
        explained("cpu")
    assert [attention_choice("auto", platform) for platform in ("cpu", "gpu", "tpu")] == ["native", "xla", "pallas"]
    assert attention_choice("xla", "tpu") == "xla" and attention_choice("pallas", "gpu") == "pallas"
