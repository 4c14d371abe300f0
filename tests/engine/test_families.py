"""Reading config.json in every spelling, and refusing what is not understood."""

import dataclasses
import math

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


def windows(model):
    return [model.kinds[kind].window for kind in model.pattern]


def test_which_layers_slide():
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert windows(load(**mistral, sliding_window=128)) == [128, 128]
    assert windows(load(**mistral, sliding_window=None)) == [None, None]
    assert windows(load(**mistral, max_position_embeddings=8192)) == [4096, 4096]  # transformers' default
    qwen = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 128}
    assert windows(load(**qwen, max_window_layers=1)) == [None, 128]
    assert windows(load(**qwen, layer_types=["sliding_attention", "full_attention"])) == [128, None]
    assert windows(load(architectures=["Gemma2ForCausalLM"], sliding_window=128)) == [128, None]
    gemma3 = {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 128, "num_hidden_layers": 7}
    assert windows(load(**gemma3)) == [128] * 5 + [None, 128]
    assert windows(load(**gemma3, sliding_window_pattern=2)) == [128, None, 128, None, 128, None, 128]


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ],
)
def test_spellings_of_rope_per_layer_type(spelling):
    model = load(architectures=["Gemma3ForCausalLM"], sliding_window=128, num_hidden_layers=6, **spelling)
    ropes = [model.kinds[kind].rope for kind in model.pattern]
    assert ropes == [RopeConfig(1e4)] * 5 + [RopeConfig(1e6, "linear", 8.0)]


def test_gemma3_with_vision_is_its_text_model():
    text = {**BASE, "architectures": None, "model_type": "gemma3_text", "sliding_window": 128, "head_dim": 16}
    vision = load_config(
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "eos_token_id": [1, 106]}
    )
    alone = load_config({**text, "architectures": ["Gemma3ForCausalLM"], "eos_token_id": [1, 106]})
    assert vision == dataclasses.replace(alone, family="gemma3_vision")
    # As transformers has it, the outer config says whether the head is tied.
    text["tie_word_embeddings"] = False
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    assert load_config(outer).tie_embeddings and not load_config(outer | {"tie_word_embeddings": False}).tie_embeddings


def test_regimes_of_the_rope_that_follows_length():
    static = load(rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert not static.follows_length and static.regime(10**6) == (0,)
    dynamic = load(rope_scaling={"type": "dynamic", "factor": 2.0})
    assert dynamic.follows_length and dynamic.max_position == 1024
    assert [dynamic.regime(length) for length in (1, 512, 513, 514)] == [(0,), (0,), (513,), (514,)]
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    for name in ("su", "longrope"):
        long = load(original_max_position_embeddings=128, rope_scaling={"type": name, **factors})
        assert [long.regime(length) for length in (1, 128, 129, 512)] == [(0,), (0,), (1,), (1,)]
        assert long.rope.attention_factor == pytest.approx((1 + math.log(4) / math.log(128)) ** 0.5)


def test_yarn_reaches_beyond_what_the_config_calls_its_length():
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    model = load(rope_scaling=rope)
    assert model.max_position == 2048 and model.rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize(
    "changes, parts",
    [
        ({"architectures": ["GPT9ForCausalLM"]}, ["architectures", "GPT9ForCausalLM", "LlamaForCausalLM"]),
        ({"architectures": None, "model_type": "gpt9"}, ["model_type", "gpt9"]),
        ({"architectures": [], "model_type": None}, ["model_type"]),
        ({"architectures": 5}, ["architectures", "5", "list"]),
        ({"hidden_act": "relu2"}, ["hidden_act", "relu2"]),
        ({"hidden_act": ["silu"]}, ["hidden_act", "silu"]),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 2.0}}, ["rope_scaling", "mrope"]),
        ({"rope_scaling": {"type": "dynamic", "alpha": 1000.0}}, ["rope_scaling", "alpha"]),
        ({"rope_scaling": {"type": "dynamic"}}, ["rope_scaling", "factor"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["rope_parameters", "short_factor"]),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7}},
            ["rope_parameters", "long_factor", "8"],
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope_parameters", "full_attention"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["rope_scaling", "low_freq_factor"]),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, ["high_freq_factor"]),
        ({"rope_scaling": {"type": "linear"}}, ["factor"]),
        ({"rope_scaling": 4}, ["rope_scaling"]),
        ({"rope_scaling": {"rope_type": ["linear"]}}, ["rope_scaling", "linear"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads"]),
        ({"num_attention_heads": 5}, ["hidden_size"]),
        ({"head_dim": 15}, ["head_dim"]),
        ({"hidden_size": None}, ["hidden_size", "missing"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers", "at most 10000"]),
        ({"vocab_size": 2**31}, ["vocab_size", "at most 2147483647"]),
        ({"rms_norm_eps": 10**400}, ["rms_norm_eps"]),
        ({"rms_norm_eps": math.inf}, ["rms_norm_eps"]),
        ({"rope_theta": math.inf}, ["rope_theta", "inf"]),
        ({"rope_theta": math.nan}, ["rope_theta", "nan"]),
        ({"eos_token_id": [2, 2**31]}, ["eos_token_id"]),
        ({"bos_token_id": 10**30}, ["bos_token_id"]),
        ({"vocab_size": True}, ["vocab_size"]),
        ({"rms_norm_eps": -1}, ["rms_norm_eps"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id"]),
        ({"bos_token_id": [1, 2]}, ["bos_token_id"]),
        ({"pretraining_tp": 2}, ["pretraining_tp"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
        ({"quantization_config": "gptq"}, ["quantization_config", "gptq"]),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -1}, ["sliding_window", "-1"]),
        ({"architectures": ["Gemma2ForCausalLM"], "layer_types": ["full_attention"]}, ["layer_types"]),
        (
            {"architectures": ["Gemma2ForCausalLM"], "layer_types": ["full_attention", "linear_attention"]},
            ["layer_types", "linear_attention"],
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {"rope_theta": 5.0}},
            ["rope_parameters", "rope_theta"],
        ),
        ({"architectures": ["Gemma3ForCausalLM"], "rope_parameters": 5}, ["rope_parameters", "5"]),
        ({"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {"sliding_attention": 5}}, ["sliding_attention", "5"]),
        ({"architectures": ["GemmaForCausalLM"], "use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, ["text_config"]),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 2]}, ["no_rope_layers"]),
        ({"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 9}, ["num_experts_per_tok", "9", "8"]),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 8, "mlp_only_layers": [1]},
            ["mlp_only_layers"],
        ),
        ({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.1}, ["partial_rotary_factor"]),
    ],
)
def test_refusals_name_field_and_value(changes, parts):
    with pytest.raises(ConfigError) as caught:
        load(**changes)
    for part in ("config.json", *parts):
        assert part in str(caught.value)
