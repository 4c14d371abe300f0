"""Reading adapters: that what is added is B A in the engine's own layouts, and what is refused, by name."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import peft_harness
import pytest
from safetensors.numpy import load_file, save_file

from engine.checkpoints import CheckpointError, open_checkpoint
from engine.config import AdapterLayout, EngineConfig
from engine.families import load_config
from engine.loader import load_weights
from engine.peft import adapter_layout, open_adapter
from engine.sharding import make_mesh
from engine.weights import abstract_weights

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
BASE = GOLDEN / "tiny_llama"
PHI3 = {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}
LAYOUT = EngineConfig(slots=1, max_len=16, kv_pages=2, prefill_buckets=(16,), batch_sizes=(1,))


def model_of(path):
    return load_config(open_checkpoint(path).hf_config)


def loaded(path, adapters=(), **layout):
    checkpoint, model = open_checkpoint(path), model_of(path)
    config = dataclasses.replace(LAYOUT, adapters=adapter_layout(adapters), **layout)
    mesh = make_mesh(jax.devices()[:1])
    return load_weights(checkpoint, model, abstract_weights(model, config, mesh), adapters)


@pytest.mark.parametrize(
    ("base", "targets", "modules"),
    [
        (BASE, peft_harness.ALL, None),
        (BASE, ("k", "gate"), None),
        (GOLDEN / "families" / "qwen3", ("v", "up", "o"), None),
        (GOLDEN / "families" / "phi3", ("qkv", "o", "gate_up", "down"), PHI3),
        (GOLDEN / "families" / "mixtral", ("q", "k", "v", "o"), None),
    ],
)
@pytest.mark.parametrize("layers", ["unrolled", "scanned"])
def test_the_change_is_that_of_merged_weights(tmp_path, base, targets, modules, layers):
    """Each map's B A, in the layout of its weights, is what merging changes; an adapter before it changes nothing."""
    peft_harness.make_adapter(tmp_path / "other", base, targets[:1], rank=11, seed=8, modules=modules)
    tensors = peft_harness.make_adapter(tmp_path / "a", base, targets, rank=3, alpha=6, seed=7, modules=modules)
    merged = peft_harness.merge(tmp_path / "merged", base, tensors, 2.0)
    model = model_of(base)
    opened = [open_adapter(name, tmp_path / name, model) for name in ("other", "a")]
    weights, plain, changed = loaded(base, opened, layers=layers), loaded(base, layers=layers), loaded(merged, layers=layers)
    for group, before, after in zip(weights.layers, plain.layers, changed.layers, strict=True):
        for name in ("qkv", "o", "gate_up", "down"):
            want = np.asarray(getattr(after, name)) - np.asarray(getattr(before, name))
            low_rank = getattr(group.adapters, name)
            if low_rank is None:
                assert not want.any()
                continue
            a, b = np.asarray(low_rank.a)[:, 1], np.asarray(low_rank.b)[..., 1, :]
            groups, parts = b.shape[1], a.shape[1]
            part = [0] * (groups - parts) + list(range(parts))  # of each group of features
            got = np.einsum("ng...r,ngri->ng...i", b, a[:, part])
            if name == "qkv":
                got = got.swapaxes(1, 2)  # KV heads first
            np.testing.assert_allclose(got.reshape(want.shape), want, atol=1e-5)


def test_the_layout_has_room_for_all(tmp_path):
    model = model_of(BASE)
    peft_harness.make_adapter(tmp_path / "a", BASE, ("q",), rank=4)
    peft_harness.make_adapter(tmp_path / "b", BASE, ("down", "k"), rank=4, rank_pattern={"down_proj": 9})
    a, b = (open_adapter(name, tmp_path / name, model) for name in "ab")
    assert adapter_layout([]) is None
    assert adapter_layout([a]) == AdapterLayout(1, 8, ("qkv",))
    assert adapter_layout([a, b]) == AdapterLayout(2, 16, ("qkv", "down"))


def refusal(path, model=None):
    with pytest.raises(CheckpointError) as caught:
        open_adapter("a", path, model or model_of(BASE))
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"peft_type": "LOHA"}, ["peft_type is 'LOHA'", "only LORA"]),
        ({"use_dora": True}, ["use_dora is True", "merge it"]),
        ({"modules_to_save": ["lm_head"]}, ["modules_to_save is ['lm_head']"]),
        ({"bias": "all"}, ["bias is 'all'", "bias none"]),
        ({"lora_bias": True}, ["lora_bias is True"]),
        ({"fan_in_fan_out": True}, ["fan_in_fan_out"]),
        ({"target_parameters": ["x"]}, ["target_parameters"]),
        ({"layer_replication": [[0, 2]]}, ["layer_replication"]),
        ({"use_of_tomorrow": True}, ["use_of_tomorrow is True"]),
        ({"init_lora_weights": "pissa"}, ["init_lora_weights is 'pissa'", "convert"]),
        ({"r": 0}, ["r is 0", "positive integer"]),
        ({"r": None}, ["r is None"]),
        ({"lora_alpha": "8"}, ["lora_alpha is '8'"]),
        ({"rank_pattern": {"x_proj": 1.5}}, ["rank_pattern['x_proj'] is 1.5"]),
        ({"alpha_pattern": [1]}, ["alpha_pattern", "object"]),
        ({"alpha_pattern": {"(": 1}}, ["alpha_pattern", "regular expression"]),
        ({"r": 5}, ["lora_A.weight has shape [4, 64]", "[5, 64]", "tiny_llama"]),
    ],
)
def test_configurations_that_are_refused(tmp_path, settings, said):
    peft_harness.make_adapter(tmp_path / "a", BASE, ("q", "v"), **settings)
    message = refusal(tmp_path / "a")
    assert str(tmp_path / "a") in message and all(part in message for part in said), message


def change_tensors(path, change):
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


Q = "base_model.model.model.layers.0.self_attn.q_proj"
NEW = np.zeros((4, 64), np.float32)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(f"{Q}.lora_B.weight"), [f"no tensor {Q}.lora_B.weight", "incomplete"]),
        (lambda t: t.update({f"{Q}.lora_A.weight": np.zeros((4, 32), np.float32)}), [f"{Q}.lora_A.weight", "[4, 32]", "[4, 64]"]),
        (lambda t: t.update({f"{Q}.lora_B.weight": np.zeros((64, 4), np.float32)}), [f"{Q}.lora_B.weight", "[64, 4]", "[128, 4]"]),
        (lambda t: t.update({f"{Q.replace('.0.', '.3.')}.lora_A.weight": NEW}), ["of layer 3", "the model has 3", "tiny_llama"]),
        (lambda t: t.update({f"{Q}.lora_magnitude_vector": NEW}), ["lora_magnitude_vector", "train the adapter without it"]),
        (lambda t: t.update({"base_model.model.lm_head.weight": NEW}), ["lm_head.weight"]),
        (lambda t: t.update({"base_model.model.lm_head.lora_A.weight": NEW}), ["module lm_head", "q_proj"]),
        (lambda t: t.update({f"{Q.replace('q_proj', 'x_proj')}.lora_A.weight": NEW}), ["x_proj", "not served", "down_proj"]),
        (lambda t: t.update({f"{Q}.lora_A.weight": np.zeros((4, 64), np.int32)}), ["dtype I32", "F32"]),
        (lambda t: t.clear(), ["no tensors"]),
    ],
)
def test_tensors_that_are_refused(tmp_path, change, said):
    peft_harness.make_adapter(tmp_path / "a", BASE, ("q", "v"))
    change_tensors(tmp_path / "a", change)
    message = refusal(tmp_path / "a")
    assert "adapter_model.safetensors" in message and all(part in message for part in said), message


def test_experts_are_refused(tmp_path):
    base = GOLDEN / "families" / "mixtral"
    peft_harness.make_adapter(tmp_path / "a", base, ("q",))
    name = "base_model.model.model.layers.0.block_sparse_moe.experts.0.w1.lora_A.weight"
    change_tensors(tmp_path / "a", lambda tensors: tensors.update({name: NEW}))
    assert "experts or the router" in refusal(tmp_path / "a", model_of(base))


def test_files_that_are_missing_or_damaged(tmp_path):
    peft_harness.make_adapter(tmp_path / "a", BASE, ("q",))
    weights, config = tmp_path / "a" / "adapter_model.safetensors", tmp_path / "a" / "adapter_config.json"
    assert f"{tmp_path}/nowhere/adapter_config.json does not exist" in refusal(tmp_path / "nowhere")
    assert f"{weights}/adapter_config.json does not exist" in refusal(weights)
    content = weights.read_bytes()
    weights.write_bytes(content[:-4])
    assert "truncated" in refusal(tmp_path / "a")
    weights.unlink()
    assert f"{weights} does not exist" in refusal(tmp_path / "a")
    (tmp_path / "a" / "adapter_model.bin").touch()
    assert "save the adapter as safetensors" in refusal(tmp_path / "a")
    config.write_text("{")
    assert "not valid JSON" in refusal(tmp_path / "a")
    config.write_text(json.dumps([]))
    assert "list where an object" in refusal(tmp_path / "a")
