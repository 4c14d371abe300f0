"""The loaded weights, fed to a decoder written in plain numpy here, give transformers' log-probs; broken checkpoints
are named.
"""

import json
import pathlib
import shutil
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.checkpoints import CheckpointError, open_checkpoint
from engine.fills import BLOCK, Read
from server.start.model_files import DEFAULT_MODEL, resolve_model
from tests.engine.loader_harness import TINY, changed, load, log_probs
from tests.golden import known
from warmup.guard import Counts, Guard

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"


@pytest.mark.parametrize("layers", ["unrolled", "scanned"])
@pytest.mark.parametrize("prompt", [2, 3])
def test_tiny_llama_has_transformers_log_probs(layers, prompt):
    golden = np.load(TINY / "golden.npz")
    model, weights = load(TINY, layers=layers)
    assert len(weights.layers) == (3 if layers == "unrolled" else 1)
    np.testing.assert_allclose(
        log_probs(model, weights, golden[f"prompt_{prompt}"]), golden[f"logprobs_{prompt}"], atol=2e-5
    )


def test_smollm2_gguf_gives_transformers_tokens():
    """The whole of the default model: quantized, tied, and with permuted rows in its file."""
    answer = json.loads((GOLDEN / "smollm2.json").read_text())["languages"]
    model, weights = load(resolve_model(DEFAULT_MODEL))
    ids = np.array(answer["prompt"] + answer["tokens"][:31])
    found = log_probs(model, weights, ids, np.float32)[len(answer["prompt"]) - 1 :]
    assert found.argmax(-1).tolist() == answer["tokens"][:32]
    np.testing.assert_allclose(found.max(-1), answer["logprobs"][:32], atol=1e-3)


def test_known_distribution(tmp_path):
    probabilities = known.spread(1)
    model, weights = load(known.make(tmp_path, probabilities))
    ids = np.array([known.BOS, 5, 263, 5])
    np.testing.assert_allclose(log_probs(model, weights, ids), np.log(probabilities[ids]), atol=1e-5)


def test_leaves_have_the_dtype_and_sharding_asked_for():
    _, weights = load(TINY, dtype="bfloat16", tp=2, layers="scanned")
    for leaf in jax.tree.leaves(weights):
        assert leaf.dtype == jax.numpy.bfloat16 and len(leaf.sharding.device_set) == 2
    group = weights.layers[0]
    assert group.qkv.sharding.shard_shape(group.qkv.shape) == (3, 1, 4, 32, 64)
    stored = load_file(TINY / "model.safetensors")  # bfloat16 in the file: nothing may be lost
    q = stored["model.layers.1.self_attn.q_proj.weight"].reshape(2, 2, 32, 64)
    v = stored["model.layers.1.self_attn.v_proj.weight"].reshape(2, 32, 64)
    np.testing.assert_array_equal(np.asarray(group.qkv)[1, :, :2], q)
    np.testing.assert_array_equal(np.asarray(group.qkv)[1, :, 3], v)


def test_biases(tmp_path):
    make_qwen2(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    _, weights = load(tmp_path)
    bias = np.asarray(weights.layers[1].qkv_bias)[0]
    np.testing.assert_array_equal(bias[:, :2].reshape(-1), stored["model.layers.1.self_attn.q_proj.bias"])
    np.testing.assert_array_equal(bias[:, 2].reshape(-1), stored["model.layers.1.self_attn.k_proj.bias"])
    np.testing.assert_array_equal(bias[:, 3].reshape(-1), stored["model.layers.1.self_attn.v_proj.bias"])
    assert weights.layers[0].o_bias is None


def make_qwen2(folder: pathlib.Path) -> None:
    def change(config, tensors):
        config["architectures"] = ["Qwen2ForCausalLM"]
        for layer in range(3):
            for name, size in (("q", 128), ("k", 64), ("v", 64)):
                tensors[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = np.arange(size, dtype=np.float32) + layer

    changed(folder, change)


NORM = "model.layers.2.input_layernorm.weight"
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    "change, parts",
    [
        (lambda config, tensors: tensors.pop(NORM), [NORM, "no tensor"]),
        (lambda config, tensors: tensors.pop("lm_head.weight"), ["lm_head.weight", "no tensor"]),
        (
            lambda config, tensors: tensors.update({UP: tensors[UP][:-1].copy()}),
            [UP, "[95, 64]", "[96, 64]", "model.safetensors"],
        ),
        (
            lambda config, tensors: config.update(vocab_size=321),
            ["model.embed_tokens.weight", "[320, 64]", "[321, 64]"],
        ),
        (lambda config, tensors: tensors.update({UP: np.ones((96, 64), np.int8)}), [UP, "I8"]),
        (
            lambda config, tensors: tensors.update({UP.replace("weight", "weight_scale"): np.ones(1, np.float32)}),
            ["weight_scale"],
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_named(tmp_path, change, parts):
    changed(tmp_path, change)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    for part in (str(tmp_path), *parts):
        assert part in str(caught.value)


def test_loading_compiles_nothing():
    with Guard() as guard:
        load(TINY, tp=2, dtype="bfloat16")
        assert guard.counts("startup") == Counts()


def test_a_stale_shard_beside_the_model(tmp_path):
    shutil.copytree(TINY, tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / "model-00001-of-00001.safetensors")
    save_file({"old.weight": np.ones(1, np.float32)}, tmp_path / "m" / "model-00001-of-00003.safetensors")
    with pytest.raises(CheckpointError, match="old.weight"):
        load(tmp_path / "m")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_was_copied_of_a_mapped_file_is_unmapped(tmp_path):
    """Also within a tensor that is larger than a block; its values stay right."""
    values = np.random.default_rng(0).standard_normal((3 * BLOCK // 4096, 1024), np.float32)
    save_file({"a": values}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    mapped, most = checkpoint.read("a"), 0
    out = np.empty_like(values)

    def release():
        nonlocal most
        most = max(most, mapped_bytes(tmp_path / "model.safetensors"))
        checkpoint.release("a")

    Read(lambda: mapped, release).copy(out, mapped)
    assert np.array_equal(out, values) and np.array_equal(mapped[-1], values[-1])
    assert BLOCK <= most < 2 * BLOCK  # a block, and what the kernel maps ahead
    checkpoint.release("a")
    assert mapped_bytes(tmp_path / "model.safetensors") == 0


def mapped_bytes(file) -> int:
    """Resident bytes of a mapped file."""
    lines = pathlib.Path("/proc/self/smaps").read_text().splitlines()
    begin = next(place for place, line in enumerate(lines) if line.endswith(str(file)))
    return next(int(line.split()[1]) * 1024 for line in lines[begin:] if line.startswith("Rss:"))
