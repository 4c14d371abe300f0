"""Every family and RoPE kind against Hugging Face transformers (`tests/golden/families.py` made the data): log-probs at
each position of prompts in chunks, and 64 greedy steps, past windows and original lengths."""

import pathlib
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from jax_harness import Runner, make_engine

from engine import families, functions

pytestmark = pytest.mark.slow

FAMILIES = pathlib.Path(__file__).parents[1] / "golden" / "families"
WEIGHTS = pathlib.Path(__file__).parents[1] / "golden" / "tiny_llama" / "model.safetensors"
EXAMPLE = "seed_oss"
CASES = sorted({folder.name for folder in FAMILIES.iterdir()} - {EXAMPLE})
DOCS = pathlib.Path(__file__).parents[2] / "docs" / "models.md"
MIXED_LAYERS = ("gemma2", "gemma3", "gpt_oss", "qwen2", "smollm3")  # layers of several kinds
LAYOUT = {
    "slots": 2, "max_len": 192, "kv_pages": 1 + 2 * 12, "prefill_buckets": (32,), "batch_sizes": (2,), "attention": "native",
}  # fmt: skip


def check(golden, name, index, position, tokens, logprobs):
    """The best tokens and their log-probs at one position."""
    want = golden[f"{name}_top_logprobs_{index}"][position]
    np.testing.assert_allclose(logprobs, want, atol=1e-4)
    known = dict(zip(golden[f"{name}_top_{index}"][position].tolist(), want.tolist(), strict=True))
    shared = [token for token in tokens if token in known]
    assert len(shared) >= 19  # the last of the twenty may tie with the next
    for token, logprob in zip(tokens, logprobs, strict=True):
        if token in known:
            assert logprob == pytest.approx(known[token], abs=1e-4)


def run(folder, restart_at=None, **layout):
    """Prompts and greedy steps of one case, two sequences side by side.

    A sequence that grows to ``restart_at`` tokens is put back there: prefilled anew with what it had generated.
    """
    golden = dict(np.load(folder / "golden.npz"))
    prompts = [
        golden[f"prompt_{index}"].tolist() for index in range(sum(name.startswith("prompt_top_l") for name in golden))
    ]
    runner = Runner(make_engine(folder, **{**LAYOUT, **layout}))
    for index, prompt in enumerate(prompts):
        sequence, pieces = runner.start(prompt, index % 2, chunk=29, prompt_logprobs=True)
        tokens, logprobs, top, top_logprobs = (
            np.concatenate([getattr(piece, field) for piece in pieces])
            for field in ("tokens", "logprobs", "top_tokens", "top_logprobs")
        )
        assert tokens.tolist() == [*prompt[1:], -1]
        np.testing.assert_allclose(logprobs[:-1], golden[f"next_{index}"], atol=1e-4)
        for position in range(len(prompt)):
            check(golden, "prompt", index, position, top[position].tolist(), top_logprobs[position])
        generated, best = [], []
        for step in range(64):
            if len(prompt) + step == restart_at:
                runner.finish(sequence)
                sequence, _ = runner.start(prompt + generated, index % 2, chunk=29)
            elif step:
                runner.step([sequence])
            generated.append(sequence.tokens[-1])
            best.append(sequence.top[-1])
        assert generated == golden[f"greedy_{index}"].tolist()
        for step, one in enumerate(best):
            check(golden, "greedy", index, step, list(one), list(one.values()))
        runner.finish(sequence)


@pytest.fixture(autouse=True)
def greedy(monkeypatch):
    """The sampler is tested elsewhere, and makes half of what there is to compile."""
    monkeypatch.setattr(
        functions, "choose", lambda scores, rows, context: jnp.argmax(scores, axis=-1).astype(jnp.int32)
    )


@pytest.fixture
def folder(request, tmp_path):
    """The model's folder; RoPE kinds borrow the weights of the tiny Llama."""
    source = FAMILIES / request.param
    if (source / "model.safetensors").exists():
        return source
    shutil.copytree(source, tmp_path / "model")
    shutil.copy(WEIGHTS, tmp_path / "model")
    return tmp_path / "model"


# Longrope changes its frequencies past the original length: transformers then computes all keys anew, and so does the server.
RESTART = {"phi3": 65, "rope_longrope": 65}


@pytest.mark.parametrize("folder", CASES, indirect=True)
def test_each(folder, request):
    """Layers of families are unrolled; those of RoPE kinds scanned, which compiles faster."""
    name = request.node.callspec.params["folder"]
    run(folder, RESTART.get(name), layers="scanned" if name.startswith("rope_") else "unrolled")


@pytest.mark.parametrize("folder", MIXED_LAYERS, indirect=True)
def test_layers_of_several_kinds_in_one_scan(folder):
    run(folder, layers="scanned")


@pytest.mark.parametrize("folder", ["olmo2", "mixtral", "gemma3"], indirect=True)
def test_four_devices(folder):
    """Twice as many as KV heads."""
    run(folder, layers="scanned", tp=4, page_size=32, kv_pages=1 + 2 * 6)


@pytest.mark.parametrize("folder", ["gemma3", "gpt_oss", "olmo2"], indirect=True)
def test_bfloat16(folder):
    """Types fit together, and the log-probs are about right."""
    golden = dict(np.load(folder / "golden.npz"))
    runner = Runner(make_engine(folder, **{**LAYOUT, "dtype": "bfloat16", "layers": "scanned"}))
    sequence, pieces = runner.start(golden["prompt_1"].tolist(), 0, chunk=29, prompt_logprobs=True)
    runner.step([sequence])
    errors = np.abs(np.concatenate([piece.logprobs for piece in pieces])[:-1] - golden["next_1"])
    assert np.median(errors) < 0.1


def test_the_documentation_s_example_of_a_new_family(monkeypatch):
    code = re.search(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)[1]
    assert len(code.splitlines()) < 60
    names: dict[str, object] = {}
    exec(code, names)
    assert names["SEED_OSS"] not in families.FAMILIES
    monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, names["SEED_OSS"]))
    run(FAMILIES / EXAMPLE)
