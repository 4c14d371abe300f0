"""The engine against Hugging Face transformers (`tests/golden/make.py` made the data): a tiny Llama with grouped queries, llama3 RoPE
scaling and an untied head, through prefill and decode, in every bucket, chunk, slot and batch size."""

import functools
import pathlib

import numpy as np
import pytest
from jax_harness import Runner, RunSequence, make_engine

from engine.api import SamplingParams

pytestmark = pytest.mark.slow

TINY = pathlib.Path(__file__).parents[1] / "golden" / "tiny_llama"
GOLDEN = dict(np.load(TINY / "golden.npz"))
PROMPTS = range(4)


LAYOUTS = {
    "unrolled": {},
    "segments": {"call_bytes": 1, "attention": "native"},
    "scanned": {"layers": "scanned"},
    "two devices": {"tp": 2, "layers": "scanned", "page_size": 32},
    "two devices, native": {"tp": 2, "layers": "scanned", "attention": "native"},
}
OPTIMIZED = ("unrolled", "segments")  # compiled as a server on CPU does


@functools.cache
def runner_of(layout):
    return Runner(make_engine(TINY, optimized=layout in OPTIMIZED, **LAYOUTS[layout]))


@pytest.fixture(params=LAYOUTS)
def runner(request):
    return runner_of(request.param)


@pytest.fixture
def plain_runner():
    return runner_of("unrolled")


def check(sequence, index, steps):
    assert sequence.tokens == GOLDEN[f"greedy_{index}"][:steps].tolist()
    for step in range(steps):
        want = dict(zip(GOLDEN[f"greedy_top_{index}"][step].tolist(), GOLDEN[f"greedy_top_logprobs_{index}"][step], strict=True))
        assert sequence.logprobs[step] == pytest.approx(want[sequence.tokens[step]], abs=1e-4)
        shared = want.keys() & sequence.top[step].keys()
        assert len(shared) >= 19  # the last of the twenty may tie with the next
        for token in shared:
            assert sequence.top[step][token] == pytest.approx(want[token], abs=1e-4)


@pytest.mark.parametrize("index", PROMPTS)
def test_64_greedy_tokens(runner, index):
    sequence, _ = runner.start(GOLDEN[f"prompt_{index}"].tolist(), slot=index)
    for _ in range(63):
        runner.step([sequence])
    check(sequence, index, 64)
    runner.finish(sequence)


def test_batches_of_every_size_in_any_slot(runner):
    """All four at once, joining and leaving, in reversed slots: batch sizes 1, 2, 3 (padded to 4) and 4."""
    running, done = [], []
    for index in PROMPTS:
        sequence, _ = runner.start(GOLDEN[f"prompt_{index}"].tolist(), slot=3 - index)
        running.append((index, sequence))
        for _ in range(5):
            runner.step([sequence for _, sequence in running])
    while running:
        runner.step([sequence for _, sequence in running])
        done += [(index, sequence) for index, sequence in running if len(sequence.tokens) == 64]
        running = [(index, sequence) for index, sequence in running if len(sequence.tokens) < 64]
    for index, sequence in done:
        check(sequence, index, 64)
        runner.finish(sequence)


@pytest.mark.parametrize("chunk", [1, 7, 16, 31, 64])
def test_chunks_of_any_length(plain_runner, chunk):
    sequence, _ = plain_runner.start(GOLDEN["prompt_3"].tolist(), slot=1, chunk=chunk)
    for _ in range(15):
        plain_runner.step([sequence])
    check(sequence, 3, 16)
    plain_runner.finish(sequence)


@pytest.mark.parametrize("chunk", [7, 32, 64])
@pytest.mark.parametrize("index", PROMPTS)
def test_prompt_logprobs_at_every_position(plain_runner, index, chunk):
    prompt = GOLDEN[f"prompt_{index}"].tolist()
    want = GOLDEN[f"logprobs_{index}"]  # [len, vocab]: of what follows each position
    sequence, pieces = plain_runner.start(prompt, slot=0, chunk=chunk, prompt_logprobs=True)
    plain_runner.finish(sequence)
    found = np.concatenate([piece.logprobs for piece in pieces])
    tokens = np.concatenate([piece.tokens for piece in pieces])
    top_tokens = np.concatenate([piece.top_tokens for piece in pieces])
    top_logprobs = np.concatenate([piece.top_logprobs for piece in pieces])
    assert tokens.tolist() == [*prompt[1:], -1]
    for position, token in enumerate(prompt[1:]):
        assert found[position] == pytest.approx(want[position, token], abs=1e-4)
    np.testing.assert_allclose(top_logprobs, np.take_along_axis(want, top_tokens, axis=1), atol=1e-4)
    np.testing.assert_allclose(top_logprobs, -np.sort(-want, axis=1)[:, :20], atol=1e-4)


def test_fetched_pages_continue_like_computed_ones(plain_runner):
    """A prefix-cache hit: the first four pages of a prompt come from another slot's pages, the rest is computed."""
    engine, prompt = plain_runner.engine, GOLDEN["prompt_3"].tolist()
    first, _ = plain_runner.start(prompt, slot=0)
    shared = 4 * engine.config.page_size
    prefix = engine.acquire_prefix()
    engine.fetch(prefix, np.array(first.pages[:4], np.int32), np.array(prompt[:shared], np.int32), slot=0)
    options = SamplingParams(logprobs=True)
    step = engine.prefill(prefix, np.array(prompt[shared:], np.int32), shared, options, last=True)
    own = plain_runner.free_pages.pop()
    pages = np.array([*first.pages[:4], own], np.int32)
    engine.insert(prefix, step, 2, pages, len(prompt), options, shared_pages=4)
    engine.release_prefix(prefix)
    second = RunSequence(2, pages.tolist(), len(prompt))
    second.take(engine.read(step), 0)
    for _ in range(20):
        plain_runner.step([first, second])
    check(first, 3, 21)
    check(second, 3, 21)
