"""Reading config.json in every spelling, and refusing what is not understood."""

import pytest

from engine.config import ConfigError, RopeConfig
from engine.families import load_config

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}


def load(**changes):
    return load_config({**BASE, **changes})


def test_defaults():
    model = load()
    assert (model.family, model.head_dim, model.num_kv_heads, model.queries_per_kv) == ("llama", 16, 4, 1)
    assert model.rope == RopeConfig(theta=10000.0)
    assert (model.tie_embeddings, model.bos_token_id, model.eos_token_ids) == (False, None, ())
    assert (model.qkv_bias, model.o_bias, model.mlp_bias) == (False, False, False)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", "rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 500000, "rope_type": "llama3", **LLAMA3}},
    ],
)
def test_spellings_of_llama3_rope(spelling):
    assert load(**spelling).rope == RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 256)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_scaling": None},
        {"rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"rope_parameters": {"rope_theta": 10000.0}, "rope_scaling": None},
    ],
)
def test_spellings_of_default_rope(spelling):
    assert load(**spelling).rope == RopeConfig(10000.0)


def test_linear_rope_and_fallback_of_the_original_length():
    assert load(rope_scaling={"type": "linear", "factor": 4}).rope == RopeConfig(10000.0, "linear", 4.0)
    scaling = {**LLAMA3, "original_max_position_embeddings": None, "rope_type": "llama3"}
    assert load(rope_scaling=scaling).rope.original_max_position == 512


@pytest.mark.parametrize("eos, expected", [(2, (2,)), ([2, 7], (2, 7)), (None, ()), (0, (0,))])
def test_eos_is_a_number_or_a_list(eos, expected):
    assert load(eos_token_id=eos).eos_token_ids == expected


@pytest.mark.parametrize("head_dim, expected", [(None, 16), (32, 32), (128, 128)])
def test_head_dim(head_dim, expected):
    assert load(head_dim=head_dim).head_dim == expected


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_both_spellings_of_dtype_are_accepted(name):
    assert load(**{name: "bfloat16"}) == load()


def test_biases_tying_and_activation():
    model = load(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh")
    assert (model.qkv_bias, model.o_bias, model.mlp_bias, model.tie_embeddings) == (True, True, True, True)
    assert model.activation == "gelu_tanh"


def test_other_families():
    mistral = load(architectures=["MistralForCausalLM"], sliding_window=None)
    assert (mistral.family, mistral.qkv_bias) == ("mistral", False)
    assert (
        load(architectures=["MistralForCausalLM"], sliding_window=4096).family == "mistral"
    )  # wider than the model is long
    qwen2 = load(architectures=["Qwen2ForCausalLM"], use_sliding_window=False, sliding_window=32)
    assert (qwen2.family, qwen2.qkv_bias, qwen2.o_bias) == ("qwen2", True, False)
    assert load(architectures=None, model_type="qwen2").family == "qwen2"


@pytest.mark.parametrize(
    "changes, parts",
    [
        ({"architectures": ["GPT9ForCausalLM"]}, ["architectures", "GPT9ForCausalLM", "LlamaForCausalLM"]),
        ({"architectures": None, "model_type": "gpt9"}, ["model_type", "gpt9"]),
        ({"architectures": [], "model_type": None}, ["model_type"]),
        ({"hidden_act": "relu2"}, ["hidden_act", "relu2"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, ["rope_scaling", "yarn"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_scaling", "dynamic"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["rope_parameters", "longrope"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope_parameters", "full_attention"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["rope_scaling", "low_freq_factor"]),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, ["high_freq_factor"]),
        ({"rope_scaling": {"type": "linear"}}, ["factor"]),
        ({"rope_scaling": 4}, ["rope_scaling"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads"]),
        ({"num_attention_heads": 5}, ["hidden_size"]),
        ({"head_dim": 15}, ["head_dim"]),
        ({"hidden_size": None}, ["hidden_size", "missing"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers"]),
        ({"vocab_size": True}, ["vocab_size"]),
        ({"rms_norm_eps": -1}, ["rms_norm_eps"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id"]),
        ({"bos_token_id": [1, 2]}, ["bos_token_id"]),
        ({"pretraining_tp": 2}, ["pretraining_tp"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 128}, ["sliding_window", "128"]),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, ["use_sliding_window"]),
    ],
)
def test_refusals_name_field_and_value(changes, parts):
    with pytest.raises(ConfigError) as caught:
        load(**changes)
    for part in ("config.json", *parts):
        assert part in str(caught.value)
