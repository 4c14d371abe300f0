"""Rows of several LoRA adapters in one batch, against runs of models with each adapter merged into the weights."""

import pathlib

import numpy as np
import peft_harness
import pytest
from jax_harness import Runner, make_engine

from engine.api import SamplingParams
from engine.checkpoints import open_checkpoint
from engine.loader import load_weights

pytestmark = pytest.mark.slow

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
BASE = GOLDEN / "tiny_llama"
BY_PEFT = GOLDEN / "adapter"
PROMPTS = ([7, 11, 13, 17, 19], list(range(40, 90)), [256, *range(100, 119)], [3] * 9)
STEPS = 6
CHUNK = 16  # the second prompt takes four
TOLERANCE = 1e-4  # nats


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """One on every module with rank 4, one on queries, values and down with rank 9 and another scale, and peft's own."""
    root = tmp_path_factory.mktemp("adapters")
    wide = peft_harness.make_adapter(root / "wide", BASE, rank=4, alpha=8, seed=1)
    few = peft_harness.make_adapter(root / "few", BASE, ("q", "v", "down"), rank=9, alpha=3, seed=2)
    merged = [
        peft_harness.merge(root / "merged_wide", BASE, wide, 8 / 4),
        peft_harness.merge(root / "merged_few", BASE, few, 3 / 9),
    ]
    return [root / "wide", root / "few", BY_PEFT], merged




@pytest.fixture(scope="module")
def expected(adapters):
    """For each prompt and each of base, wide, few: one model after the other, with the same programs."""
    _, merged = adapters
    found = {}
    runner = Runner(make_engine(BASE, slots=1, batch_sizes=(1,), prefill_buckets=(64,)))
    for adapter, path in enumerate((BASE, *merged)):
        engine = runner.engine
        engine.set_weights(load_weights(open_checkpoint(path), engine.model, engine.abstract_weights))
        for index, prompt in enumerate(PROMPTS):
            sequence, scored = runner.start(prompt, 0, prompt_logprobs=True)
            for _ in range(STEPS):
                runner.step([sequence])
            runner.finish(sequence)
            found[index, adapter] = sequence, scored[0]
    return found


SMALL = {"slots": 4, "batch_sizes": (1, 4), "prefill_buckets": (CHUNK,), "kv_pages": 1 + 4 * 8, "max_len": 128}
LAYOUTS = {"unrolled": {}, "segments": {"call_bytes": 1}, "scanned_tp": {"layers": "scanned", "tp": 4}}


@pytest.fixture(scope="module", params=LAYOUTS)
def runner(request, adapters):
    return Runner(make_engine(BASE, adapters=adapters[0], **SMALL, **LAYOUTS[request.param]))


def close(sequence, reference):
    assert sequence.tokens == reference.tokens
    np.testing.assert_allclose(sequence.logprobs, reference.logprobs, atol=TOLERANCE, rtol=0)
    for top, wanted in zip(sequence.top, reference.top, strict=True):
        both = top.keys() & wanted.keys()
        assert len(both) >= 18  # the 20th may tie with the 21st
        np.testing.assert_allclose([top[t] for t in both], [wanted[t] for t in both], atol=TOLERANCE, rtol=0)


def sampling(adapter):
    return SamplingParams(logprobs=True, adapter=adapter)


def test_a_mixed_batch_equals_merged_models(runner, expected):
    """Base, both adapters and one of them again, in one batch; prompts in chunks, with their log-probs."""
    rows = [(0, 1), (1, 2), (2, 0), (3, 1)]  # prompt, adapter
    sequences = []
    for slot, (prompt, adapter) in enumerate(rows):
        sequence, scored = runner.start(
            PROMPTS[prompt], slot, chunk=CHUNK, sampling=sampling(adapter), prompt_logprobs=True
        )
        sequences.append(sequence)
        got = np.concatenate([part.logprobs for part in scored])[:-1]
        np.testing.assert_allclose(got, expected[prompt, adapter][1].logprobs[:-1], atol=TOLERANCE, rtol=0)
    for _ in range(STEPS):
        runner.step(sequences)
    for sequence, row in zip(sequences, rows, strict=True):
        close(sequence, expected[row][0])
        runner.finish(sequence)


@pytest.mark.parametrize("runner", ["unrolled"], indirect=True)
def test_batches_of_one_and_two(runner, expected):
    """A step of one row cuts its adapter out of the stack; a batch without adapters leaves the stack alone."""
    for rows in ([(0, 2)], [(2, 0)], [(2, 0), (0, 0)], [(3, 0), (1, 1)]):
        sequences = [runner.start(PROMPTS[p], slot, sampling=sampling(adapter))[0] for slot, (p, adapter) in enumerate(rows)]
        for _ in range(STEPS):
            runner.step(sequences)
        for sequence, row in zip(sequences, rows, strict=True):
            close(sequence, expected[row][0])
            runner.finish(sequence)


@pytest.mark.parametrize("runner", ["unrolled"], indirect=True)
def test_an_adapter_of_pefts(runner):
    """Rank-stabilized, with ranks and alphas of their own, on some layers: what peft itself computes in float64."""
    golden = np.load(BY_PEFT / "golden.npz")
    prompt, count = golden["prompt"].tolist(), len(golden["tokens"])
    sequence, scored = runner.start(prompt, 1, sampling=sampling(3), prompt_logprobs=True)
    for _ in range(count - 1):
        runner.step([sequence])
    assert sequence.tokens == golden["tokens"].tolist()
    got = [*np.concatenate([part.logprobs for part in scored])[:-1], *sequence.logprobs]
    np.testing.assert_allclose(got, golden["logprobs"], atol=TOLERANCE, rtol=0)
    runner.finish(sequence)


@pytest.mark.parametrize("runner", ["unrolled"], indirect=True)
def test_an_adapter_that_is_not_there(runner):
    prefix = runner.engine.acquire_prefix()
    with pytest.raises(ValueError, match="adapter 4: this engine has 3"):
        runner.engine.prefill(prefix, np.arange(4, dtype=np.int32), 0, sampling(4), last=True)
    runner.engine.release_prefix(prefix)
