"""Int8 weights and keys: the rounding by hand, models against the same model rounded in numpy, attention against a plain softmax
over rounded keys."""

import functools
import pathlib
import shutil

import jax
import numpy as np
import pytest
from jax_harness import Runner, make_engine
from safetensors.numpy import load_file, save_file

from engine.api import SamplingParams
from engine.attention import attend_pages, attend_prefix
from engine.layers import linear
from engine.programs import tree_bytes
from engine.quantization import Quantized, dequantize, quantize

pytestmark = pytest.mark.slow

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
PROMPT = np.random.default_rng(3).integers(0, 256, 70).tolist()
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def rounded(x):
    """Symmetric int8 by hand: the largest magnitude of a row is 127 steps."""
    step = np.abs(x).max(-1, keepdims=True).astype(np.float32) / np.float32(127)
    return np.rint(x / np.where(step > 0, step, 1)) * step


def test_rows_by_hand():
    x = np.array([[127.0, -63.4, 0.6, 0.0], [0, 0, 0, 0], [-2.0, 1.0, 0.5, 2.0]], np.float32)
    for xp in (np, jax.numpy):
        q = quantize(x, xp)
        np.testing.assert_array_equal(q.values, [[127, -63, 1, 0], [0, 0, 0, 0], [-127, 64, 32, 127]])  # 63.5 to even
        np.testing.assert_allclose(q.scale, [1, 0, 2 / 127], rtol=1e-6)


def test_the_error_is_half_a_step():
    x = np.random.default_rng(0).normal(size=(50, 33)).astype(np.float32)
    q = quantize(x, np)
    assert q.values.dtype == np.int8 and q.scale.dtype == np.float32
    back = np.asarray(dequantize(q, np.float32))
    assert (np.abs(back - x) <= q.scale[:, None] * 0.5001).all() and np.abs(back - x).max() > 0
    np.testing.assert_allclose(back, rounded(x), atol=1e-6)


def test_an_index_and_a_shape_are_those_of_the_array():
    x = np.random.default_rng(0).normal(size=(4, 6, 8)).astype(np.float32)
    q = quantize(x, np)
    assert q.shape == (4, 6, 8) and q.ndim == 3
    np.testing.assert_array_equal(dequantize(q[2, 1:3], np.float32), np.asarray(dequantize(q, np.float32))[2, 1:3])
    np.testing.assert_array_equal(q.reshape(-1, 8).scale, q.scale.reshape(-1))


@pytest.mark.parametrize("rows", [1, 2, 8, 40])
def test_a_product(rows):
    rng = np.random.default_rng(1)
    w, x = rng.normal(size=(24, 16)).astype(np.float32), rng.normal(size=(rows, 16)).astype(np.float32)
    np.testing.assert_allclose(jax.jit(linear)(quantize(w), x), x @ rounded(w).T, atol=1e-4)


@functools.cache
def log_probs(path, **layout):
    """Log-probs of every prompt token, in chunks of 32, and of 12 greedy tokens."""
    runner = Runner(make_engine(path, **layout))
    sequence, results = runner.start(PROMPT, 0, chunk=32, sampling=SamplingParams(logprobs=True), prompt_logprobs=True)
    for _ in range(11):
        runner.step([sequence])
    prompt = np.concatenate([result.logprobs for result in results])[:-1]
    return prompt, np.array(sequence.logprobs), sequence.tokens


@pytest.fixture(scope="module")
def rounded_model(tmp_path_factory):
    """The tiny Llama with its matrices rounded."""
    folder = shutil.copytree(GOLDEN / "tiny_llama", tmp_path_factory.mktemp("model") / "rounded")
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    changed = {name: rounded(x).astype(np.float32) if name.split(".")[-2] in MATRICES else x for name, x in tensors.items()}
    assert sum((changed[name] != x).any() for name, x in tensors.items()) == 7 * 3
    save_file(changed, file)
    return folder


@pytest.mark.parametrize("layout", [{"layers": "scanned"}, {"tp": 2, "page_size": 32, "call_bytes": 1, "attention": "native"}], ids=str)
def test_int8_weights_are_the_rounded_model(layout, rounded_model):
    want_prompt, want, tokens = log_probs(rounded_model)
    prompt, found, found_tokens = log_probs(GOLDEN / "tiny_llama", quantize="int8", **layout)
    np.testing.assert_allclose(prompt, want_prompt, atol=1e-4)
    np.testing.assert_allclose(found, want, atol=1e-4)
    assert found_tokens == tokens
    assert np.abs(prompt - log_probs(GOLDEN / "tiny_llama")[0]).max() > 1e-4  # rounding is not nothing


def test_a_mixture_of_experts_is_quantized_too():
    folder = next(path for path in sorted((GOLDEN / "families").iterdir()) if "mixtral" in path.name)
    plain, quantized = log_probs(folder)[0], log_probs(folder, quantize="int8")[0]
    assert 1e-5 < np.abs(plain - quantized).max() < 0.2


def test_a_quarter_of_the_bytes():
    plain, quantized = (
        tree_bytes(make_engine(GOLDEN / "tiny_llama", quantize=kind).abstract_weights.layers) for kind in ("none", "int8")
    )
    assert 0.25 < quantized / plain < 0.36  # scales and norms stay float32


def test_pages_of_int8():
    rng = np.random.default_rng(0)
    heads, group, head_dim, page_size, pool = 2, 3, 8, 32, 12
    lengths = np.array([1, 40, 150], np.int32)
    table = rng.permutation(np.arange(1, pool))[: 3 * 3].reshape(3, 3)
    table = np.concatenate([table, np.zeros((3, 5), table.dtype)], axis=1).astype(np.int32)
    lengths = np.minimum(lengths, 96)
    k, v = rng.normal(size=(2, 1, heads, pool, page_size, head_dim)).astype(np.float32)
    q = rng.normal(size=(3, heads, group, head_dim)).astype(np.float32)
    out = np.asarray(jax.jit(attend_pages)(q, quantize(k), quantize(v), 0, table, lengths))
    for row, length in enumerate(lengths):
        for head in range(heads):
            keys, values = (rounded(x[0, head, table[row]].reshape(-1, head_dim))[:length] for x in (k, v))
            scores = q[row, head] @ keys.T / np.sqrt(head_dim)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            np.testing.assert_allclose(out[row, head], weights / weights.sum(-1, keepdims=True) @ values, atol=1e-5)


def test_a_prefix_of_int8():
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, 1, 1, 64, 8)).astype(np.float32)
    q = rng.normal(size=(4, 1, 1, 8)).astype(np.float32)
    positions = np.arange(20, 24, dtype=np.int32)
    out = np.asarray(jax.jit(attend_prefix)(q, quantize(k), quantize(v), 0, positions, np.int32(24)))
    for row, position in enumerate(positions):
        keys, values = rounded(k[0, 0])[: position + 1], rounded(v[0, 0])[: position + 1]
        weights = np.exp(q[row, 0] @ keys.T / np.sqrt(8))
        np.testing.assert_allclose(out[row, 0], weights / weights.sum() @ values, atol=1e-5)


@pytest.mark.parametrize("layout", [{"layers": "scanned"}, {"tp": 2, "page_size": 32, "call_bytes": 1, "attention": "native"}], ids=str)
def test_int8_keys_stay_close(layout):
    """Rounding moves the log-probs a little, on average; less than layouts could by storing at the wrong place."""
    plain, close = log_probs(GOLDEN / "tiny_llama"), log_probs(GOLDEN / "tiny_llama", kv_dtype="int8", **layout)
    assert 1e-4 < np.abs(plain[0] - close[0]).mean() < 0.06
    assert close[2][0] == plain[2][0]


def test_a_prefix_that_was_fetched_gives_the_same(tmp_path):
    """Pages hold what the prefix held, so a hit of the prefix cache changes nothing."""
    engine = make_engine(GOLDEN / "tiny_llama", kv_dtype="int8", page_size=16)
    runner = Runner(engine)
    first, _ = runner.start(PROMPT, 0)
    prefix = engine.acquire_prefix()
    engine.fetch(prefix, np.array(first.pages[:4], np.int32), np.array(PROMPT[:64], np.int32), slot=0)
    step = engine.prefill(prefix, np.array(PROMPT[64:], np.int32), 64, SamplingParams(logprobs=True), last=True)
    assert engine.read(step).logprobs[0] == pytest.approx(first.logprobs[0], abs=1e-5)
    assert isinstance(engine.abstract_state.k_pages[0], Quantized)
