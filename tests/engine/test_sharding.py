"""One model over several devices: the same tokens as on one, whatever is split; and what moves between devices."""

import functools
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from jax_harness import Runner, describe_engine, make_engine
from random_llama import greedy_tokens, random_llama

from engine import functions
from engine.api import Row, SamplingParams
from engine.config import ConfigError
from warmup.collectives import collectives

pytestmark = pytest.mark.slow

FAMILIES = pathlib.Path(__file__).parents[1] / "golden" / "families"
LAYOUT = {
    "slots": 8, "max_len": 64, "kv_pages": 17, "page_size": 16, "prefill_buckets": (16,), "batch_sizes": (8,),
}  # fmt: skip
PROMPTS = ([3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33, 83, 27, 95, 28, 8], [7, 77, 17, 71])
STEPS = 6


@pytest.fixture(autouse=True, scope="module")
def greedy():
    """The sampler is tested elsewhere, and makes half of what there is to compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "choose", lambda scores, rows, context: jnp.argmax(scores, axis=-1).astype(jnp.int32))
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders, and the tokens that are right."""
    root = tmp_path_factory.mktemp("models")

    @functools.cache
    def make(heads, kv_heads):
        folder = random_llama(root / f"{heads}-{kv_heads}", heads, kv_heads)
        answers, leads = zip(*(greedy_tokens(folder, prompt, STEPS + 1) for prompt in PROMPTS), strict=True)
        assert min(leads) > 0.004, f"a near tie, {min(leads)}: choose another seed"
        return folder, list(answers)

    return make


def run(engine):
    """Greedy tokens of the prompts, in chunks, decoded together."""
    runner = Runner(engine)
    sequences = [runner.start(prompt, slot, sampling=SamplingParams())[0] for slot, prompt in enumerate(PROMPTS)]
    for _ in range(STEPS):
        runner.step(sequences)
    return [sequence.tokens for sequence in sequences]


@pytest.mark.parametrize(("kv_heads", "tp"), [(1, 8), (2, 4), (2, 8), (3, 2), (3, 4), (4, 8), (8, 8)])
def test_any_number_of_kv_heads(models, kv_heads, tp):
    """24 query heads; KV heads as many as devices, more, fewer, and of which they are no multiple."""
    folder, answers = models(24, kv_heads)
    assert run(make_engine(folder, tp=tp, **LAYOUT)) == answers


def test_sizes_that_cannot_be_split_name_those_that_can(models):
    folder, _ = models(24, 3)
    with pytest.raises(ConfigError, match=r"--tp 3 does not divide the model's intermediate_size = 64: .* are 1, 2, 4, 8"):
        make_engine(folder, tp=3, **LAYOUT)
    with pytest.raises(ConfigError, match="--ep 2: the model has no experts"):
        make_engine(folder, ep=2, **LAYOUT)
    with pytest.raises(ConfigError, match=r"--dp 3 does not divide the layout's --slots = 8: .* are 1, 2, 4, 8"):
        make_engine(folder, dp=3, **LAYOUT)
    with pytest.raises(ConfigError, match=r"--batch-sizes 1 cannot be shared by the 2 groups of --dp"):
        make_engine(folder, dp=2, **{**LAYOUT, "batch_sizes": (1, 8)})
    with pytest.raises(ConfigError, match=r"--ep 4 does not divide the model's number of experts = 6: .* are 1, 2, 3, 6"):
        make_engine(FAMILIES / "qwen3_moe", ep=4, **LAYOUT)


def test_what_is_said_of_the_split(models):
    said = describe_engine(models(24, 3)[0], **LAYOUT, dp=2, tp=4).explain()
    assert said.splitlines()[1] == "8 devices: --dp 2 x --tp 4; each of the 3 KV heads is stored 4 times"
    assert len(describe_engine(models(24, 3)[0], **LAYOUT).explain().splitlines()) == 1


@pytest.mark.parametrize("layout", [{"dp": 2, "tp": 4}, {"dp": 8, "layers": "scanned"}], ids=str)
def test_groups_have_slots_and_pages_of_their_own(models, layout):
    """Prompts in the slots of two groups; then one of them once more, its first page taken from the cache of its group."""
    folder, answers = models(24, 2)
    engine = make_engine(folder, **{**LAYOUT, **layout})
    assert run(engine) == answers
    prompt, prefix, page = np.array(PROMPTS[0], np.int32), engine.acquire_prefix(), np.array([1], np.int32)
    engine.fetch(prefix, page, prompt[:16], slot=0)  # the first page that `Runner` gave away
    step = engine.prefill(prefix, prompt[16:], 16, SamplingParams(), last=True)
    assert engine.read(step).tokens.tolist() == answers[0][:1]
    engine.insert(prefix, step, 1, np.array([7, 8], np.int32), len(prompt), SamplingParams())  # into the other group
    results = engine.read(engine.generate([Row(1, 8)]))
    assert results.tokens.tolist() == answers[0][1:2]


@pytest.mark.parametrize(
    ("name", "layout"), [("qwen3_moe", {"ep": 2}), ("qwen3_moe", {"ep": 2, "tp": 2}), ("gpt_oss", {"dp": 2, "ep": 2, "tp": 2})], ids=str
)
def test_experts_on_several_devices(name, layout):
    """The tokens that transformers gives (`test_golden_families.py`). GPT-OSS: biases, sinks, windows."""
    golden = np.load(FAMILIES / name / "golden.npz")
    runner = Runner(make_engine(FAMILIES / name, **{**LAYOUT, **layout}))
    sequences = [runner.start(golden[f"prompt_{i}"].tolist()[:48], slot, sampling=SamplingParams())[0] for i, slot in ((0, 1),)]
    for _ in range(STEPS):
        runner.step(sequences)
    assert sequences[0].tokens == golden["greedy_0"][: STEPS + 1].tolist()


DECODE = {
    # Partial sums: of the embedding, and of attention and feed-forward in two layers. Logits: 160 for each row.
    "tp": ({"tp": 4}, {"5 x all-reduce of f32[8,32] over tensor", "1 x all-gather of f32[8,160] over tensor"}),
    "dp": ({"dp": 8}, set()),
}


@pytest.mark.parametrize("case", DECODE)
def test_what_moves_in_a_decode_step(models, case):
    """No weights, no keys and values: nothing but hidden states and logits."""
    layout, expected = DECODE[case]
    assert moved(models(24, 2)[0], layout) == expected


def test_what_moves_in_a_decode_step_with_experts():
    """Each layer's tokens to all devices of their group, and the sums back: 4 rows of 32, of 2 groups of data each."""
    layout = {"dp": 2, "ep": 2, "tp": 2}
    assert moved(FAMILIES / "qwen3_moe", layout) == {
        "2 x all-gather of f32[4,32] over expert",
        "2 x reduce-scatter of f32[2,32] over expert",
        "5 x all-reduce of f32[2,32] over tensor",
        "1 x all-gather of f32[2,320] over tensor",
    }


def moved(folder, layout):
    engine = describe_engine(folder, **{**LAYOUT, **layout})
    (program,) = (program for program in engine.programs() if program.name == "generate/8")
    return {str(one) for one in collectives(program.trace().lower().compile().as_text(), engine.mesh.shape)}
