"""Qwen2 and Qwen2.5: Llama with biases on the query, key and value projections."""

from __future__ import annotations

from engine.config import ConfigError, ModelConfig
from engine.families.family import Family, Fields
from engine.families.llama import decoder_config


def load_qwen2(hf: dict) -> ModelConfig:
    if Fields(hf).flag("use_sliding_window", False):
        raise ConfigError(
            "config.json: use_sliding_window is true, which is not served; set it to false if the model allows it"
        )
    return decoder_config(hf, family="qwen2", qkv_bias=True, o_bias=False, mlp_bias=False)


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", "qwen2", load_qwen2)
