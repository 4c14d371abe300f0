"""GPT-OSS: a mixture of experts with biases everywhere, a sink in each query head, and a sliding window in every other
layer.

Its experts' activation is a clamped SwiGLU (`engine.layers.gated`); released in MXFP4, which the checkpoint shows
dequantized."""

from __future__ import annotations

import dataclasses

from engine.config import HfConfig, ModelConfig
from engine.families.decoder import FULL, SLIDING, decoder_config, layer_types, with_windows
from engine.families.family import Family, Fields, TensorNames
from engine.families.rope import RopeDefaults
from engine.layers import SWIGLU_GAIN, SWIGLU_LIMIT

NAMES = TensorNames(router="model.layers.{layer}.mlp.router", experts="model.layers.{layer}.mlp.experts")
ROPE = {  # transformers' default
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def load_gpt_oss(hf: HfConfig) -> ModelConfig:
    if hf.get("rope_scaling") is None and hf.get("rope_parameters") is None:
        hf = {**hf, "rope_scaling": ROPE}
    fields = Fields(hf)
    for name, served in (("swiglu_alpha", SWIGLU_GAIN), ("swiglu_limit", SWIGLU_LIMIT)):
        if fields.number(name, served) != served:
            raise fields.fail(name, f"only {served} is served")
    bias = fields.flag("attention_bias", True)
    model = decoder_config(
        hf,
        family="gpt_oss",
        rope=RopeDefaults(150_000.0),
        head_dim=64,
        norm_eps=1e-5,
        wide_norms=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        sinks=True,
        moe=fields.moe(128, 4, normalize=True, bias=True),
    )
    types = [FULL if layer % 2 else SLIDING for layer in range(model.num_layers)]
    window = fields.window() if "sliding_window" in hf else 128
    return with_windows(dataclasses.replace(model, activation="clamped_swiglu"), window, layer_types(hf, types))


GPT_OSS = Family("gpt_oss", "GptOssForCausalLM", "gpt_oss", load_gpt_oss, NAMES)
