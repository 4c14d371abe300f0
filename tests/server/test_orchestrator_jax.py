"""The orchestrator on the real engine: the golden answers of transformers, alone and under page pressure, with and
without the prefix cache. One engine for all: 16 pages are less than a third of what four sequences need."""

import dataclasses
import functools
import pathlib
import sys

import numpy as np
import pytest
from orchestrator_harness import Recorder, Server, serving

from engine.api import SamplingParams

sys.path.append(str(pathlib.Path(__file__).parents[1] / "engine"))
from jax_harness import make_engine

pytestmark = pytest.mark.slow

TINY = pathlib.Path(__file__).parents[1] / "golden" / "tiny_llama"
GOLDEN = dict(np.load(TINY / "golden.npz"))
PROMPTS = range(4)
PLAIN = SamplingParams(logprobs=True)
STEPS = 64


@functools.cache
def engine():
    return make_engine(TINY, kv_pages=1 + 16, prefill_buckets=(64,), batch_sizes=(4,))


def ask(server: Server, index: int, *, sampling: SamplingParams = PLAIN) -> Recorder:
    prompt = GOLDEN[f"prompt_{index}"].tolist()
    return server.submit(prompt, STEPS, sampling=sampling, ignore_eos=True, detokenize=False)[1]


def answer(recorder: Recorder) -> list[int]:
    """The first answer waits for compiling."""
    assert recorder.done.wait(120)
    return recorder.ok().tokens()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_golden_answers_under_pressure(prefix_cache):
    with serving(engine=engine(), prefix_cache=prefix_cache) as server:
        recorders = [(index, ask(server, index)) for index in (*PROMPTS, *PROMPTS)]
        for index, recorder in recorders:
            assert answer(recorder) == GOLDEN[f"greedy_{index}"].tolist()
            scores = [entry.logprob for delta in recorder.deltas for entry in delta.logprobs]
            for step, (token, score) in enumerate(zip(recorder.tokens(), scores, strict=True)):
                want = GOLDEN[f"greedy_top_logprobs_{index}"][step][GOLDEN[f"greedy_top_{index}"][step] == token]
                assert score == pytest.approx(want.item(), abs=1e-4)
        assert sum(sequence.put_back for sequence in server.sequences) > 0
        assert server.gauges() == (0, 0, 0, 0)


def test_golden_answers_of_two_groups():
    """Each group has its slots, its pages and its cache; requests are more than slots, and each comes twice."""
    split = make_engine(TINY, kv_pages=1 + 16, prefill_buckets=(64,), batch_sizes=(4,), dp=2, tp=2, layers="scanned")
    with serving(engine=split) as server:
        recorders = [(index, ask(server, index)) for index in (*PROMPTS, *PROMPTS)]
        for index, recorder in recorders:
            assert answer(recorder) == GOLDEN[f"greedy_{index}"].tolist()
        longest = max(PROMPTS, key=lambda index: len(GOLDEN[f"prompt_{index}"]))
        again = ask(server, longest)
        assert answer(again) == GOLDEN[f"greedy_{longest}"].tolist()
        assert again.usage.cached_tokens == (len(GOLDEN[f"prompt_{longest}"]) - 1) // 16 * 16
        assert server.gauges() == (0, 0, 0, 0)


def test_a_repeated_prompt_is_cached():
    with serving(engine=engine()) as server:
        longest = max(PROMPTS, key=lambda index: len(GOLDEN[f"prompt_{index}"]))
        for cached in (0, (len(GOLDEN[f"prompt_{longest}"]) - 1) // 16 * 16):
            recorder = ask(server, longest)
            assert answer(recorder) == GOLDEN[f"greedy_{longest}"].tolist()
            assert recorder.usage.cached_tokens == cached


def test_penalties_and_seeds_survive_a_put_back():
    sampling = dataclasses.replace(
        PLAIN,
        temperature=0.8,
        seed=11,
        presence_penalty=0.7,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        min_tokens=60,
    )
    with serving(engine=engine(), prefix_cache=False) as server:
        alone = [answer(ask(server, index, sampling=sampling)) for index in PROMPTS]
        assert sum(sequence.put_back for sequence in server.sequences) == 0
        recorders = [ask(server, index, sampling=sampling) for index in PROMPTS]
        assert [answer(recorder) for recorder in recorders] == alone
        assert sum(sequence.put_back for sequence in server.sequences) > 0
