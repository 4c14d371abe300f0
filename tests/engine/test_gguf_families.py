"""GGUFs of every architecture, converted here as llama.cpp's converters do it: tensors and model are those of the
checkpoint."""

import dataclasses
import json
import pathlib
import re

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from test_gguf import permute

from engine.checkpoints import CheckpointError, open_checkpoint
from engine.families import load_config

FAMILIES = pathlib.Path(__file__).parents[1] / "golden" / "families"

# What the Hugging Face config has to say for GGUF to be able to express it.
GEMMA3_ROPE = {"rope_type": "linear", "factor": 8.0}
CASES = {
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3moe", {"norm_topk_prob": True}),
    "mixtral": ("llama", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma3": (
        "gemma3",
        {"query_pre_attn_scalar": 16, "layer_types": None, "rope_parameters": None, "rope_scaling": GEMMA3_ROPE},
    ),
    "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {"no_rope_layers": None, "use_sliding_window": False, "layer_types": None}),
    "granite": ("granite", {}),
}


def convert(name: str, path: pathlib.Path, change=lambda writer: None):
    """Writes the GGUF; returns config and tensors it stands for."""
    architecture, changes = CASES[name]
    config = {**json.loads((FAMILIES / name / "config.json").read_text()), **changes}
    tensors = {key: value.astype(np.float32) for key, value in load_file(FAMILIES / name / "model.safetensors").items()}
    rope = config.get("rope_parameters") or {}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    if "rope_theta" in rope and not architecture.startswith("gemma"):
        writer.add_rope_freq_base(rope["rope_theta"])
    match name:
        case "mixtral" | "qwen3_moe":
            writer.add_expert_count(config["num_local_experts"])
            writer.add_expert_used_count(config["num_experts_per_tok"])
            if name == "qwen3_moe":
                writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        case "gemma2":
            writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
            writer.add_sliding_window(config["sliding_window"])
        case "gemma3":
            writer.add_rope_freq_base(1e6)
            writer.add_sliding_window(config["sliding_window"])
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(8.0)
        case "phi3":
            writer.add_rope_scaling_orig_ctx_len(64)
            writer.add_rope_dimension_count(12)
            writer.add_rope_scaling_attn_factors((1 + np.log(4) / np.log(64)) ** 0.5)
            writer.add_sliding_window(config["sliding_window"])
            writer.add_tensor("rope_factors_long.weight", np.array(rope["long_factor"], np.float32))
            writer.add_tensor("rope_factors_short.weight", np.array(rope["short_factor"], np.float32))
        case "granite":
            writer.add_attention_scale(config["attention_multiplier"])
            writer.add_embedding_scale(config["embedding_multiplier"])
            writer.add_residual_scale(config["residual_multiplier"])
            writer.add_logit_scale(config["logits_scaling"])
    change(writer)
    names = gguf.get_tensor_name_map({value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[architecture], 8)
    stacks: dict[str, list[np.ndarray]] = {}
    for key in sorted(
        tensors, key=lambda key: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", key)]
    ):
        array = tensors[key]
        if key.endswith("norm.weight") and architecture.startswith("gemma"):
            array = array + 1
        if architecture in ("llama", "smollm3", "granite") and ".q_proj." in key:
            array = permute(array, config["num_attention_heads"])
        if architecture in ("llama", "smollm3", "granite") and ".k_proj." in key:
            array = permute(array, config["num_key_value_heads"])
        together = re.sub(r"experts\.\d+", "experts", key)
        stored = names.get_name(together, try_suffixes=(".weight", ".bias"))
        assert stored is not None, key
        if together == key:
            writer.add_tensor(stored, array)
        else:
            stacks.setdefault(stored, []).append(array)
    for stored, arrays in stacks.items():
        writer.add_tensor(stored, np.stack(arrays))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config, tensors


@pytest.mark.parametrize("name", CASES)
def test_reads_what_was_converted(name, tmp_path):
    config, tensors = convert(name, tmp_path / "m.gguf")
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.names() == sorted(tensors)
    for key, array in tensors.items():
        assert checkpoint.shape(key) == array.shape
        np.testing.assert_allclose(checkpoint.read(key).astype(np.float32), array, atol=1e-7, err_msg=key)
    found, want = (plain(load_config(hf)) for hf in (checkpoint.hf_config, config))
    assert found == want


def plain(model):
    """The model with its numbers as float32 has them, and what says the same spelled alike."""
    assert model.layer_kinds or not model.layer_pattern
    fields = dataclasses.asdict(model)
    return json.loads(json.dumps(fields), parse_float=lambda text: float(np.float32(text)))


def test_what_cannot_be_served_is_named(tmp_path):
    convert("olmo2", tmp_path / "m.gguf", lambda writer: writer.add_sliding_window(32))
    with pytest.raises(CheckpointError, match=r"m\.gguf: it has a sliding window"):
        open_checkpoint(tmp_path / "m.gguf")
