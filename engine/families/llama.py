"""Llama (2, 3, SmolLM2, TinyLlama, ...): the shape that the other families are told by their differences from."""

from __future__ import annotations

from engine.config import HfConfig, ModelConfig
from engine.families.decoder import decoder_config
from engine.families.family import Family, Fields


def load_llama(hf: HfConfig) -> ModelConfig:
    fields = Fields(hf)
    if fields.integer("pretraining_tp", 1) != 1:
        raise fields.fail("pretraining_tp", "only 1 is served")
    bias = fields.flag("attention_bias", False)
    return decoder_config(hf, family="llama", qkv_bias=bias, o_bias=bias, mlp_bias=fields.flag("mlp_bias", False))


LLAMA = Family("llama", "LlamaForCausalLM", "llama", load_llama)
