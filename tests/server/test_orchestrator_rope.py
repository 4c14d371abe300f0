"""The orchestrator with models whose rotary embedding follows the length of the whole sequence: the golden answers of
transformers, in chunks, past the original length, twice over, so that the second ones may take pages of the first."""

import pathlib
import shutil
import sys

import numpy as np
import pytest
from orchestrator_harness import serving

from engine.api import SamplingParams

sys.path.append(str(pathlib.Path(__file__).parents[1] / "engine"))
from jax_harness import make_engine

pytestmark = pytest.mark.slow

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_golden_answers(kind, tmp_path):
    folder = tmp_path / kind
    shutil.copytree(GOLDEN / "families" / f"rope_{kind}", folder)
    shutil.copy(GOLDEN / "tiny_llama" / "model.safetensors", folder)
    golden = dict(np.load(folder / "golden.npz"))
    count = sum(name.startswith("prompt_top_l") for name in golden)
    engine = make_engine(folder, prefill_buckets=(32,), batch_sizes=(4,))
    with serving(engine=engine) as server:
        for turn in range(2):
            asked = []
            for index in range(count):
                prompt = golden[f"prompt_{index}"].tolist()
                options = SamplingParams(logprobs=True)
                asked.append(server.submit(prompt, 64, sampling=options, ignore_eos=True, detokenize=False)[1])
            for index, recorder in enumerate(asked):
                assert recorder.done.wait(120)
                assert recorder.ok().tokens() == golden[f"greedy_{index}"].tolist()
                scores = [entry.logprob for delta in recorder.deltas for entry in delta.logprobs]
                np.testing.assert_allclose(scores, golden[f"greedy_top_logprobs_{index}"][:, 0], atol=1e-4)
                if turn:  # a longer prompt's own pages, or those of a short one's original length
                    assert recorder.usage.cached_tokens > 0 or len(golden[f"prompt_{index}"]) <= 16
        outgrown = sum(sequence.put_back for sequence in server.sequences)
        assert outgrown == (2 * 2 if kind == "longrope" else 0)  # the prompts of 7 and 40 tokens, both times
        assert server.gauges() == (0, 0, 0, 0)
