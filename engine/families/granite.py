"""Granite 3: Llama with four multipliers: of embeddings, attention scores, what layers add, and (a divisor) logits."""

from __future__ import annotations

from engine.config import HfConfig, ModelConfig
from engine.families.decoder import decoder_config
from engine.families.family import Family, Fields


def load_granite(hf: HfConfig) -> ModelConfig:
    fields = Fields(hf)
    bias = fields.flag("attention_bias", False)
    return decoder_config(
        hf,
        family="granite",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        embed_scale=fields.number("embedding_multiplier", 1.0),
        query_scale=fields.number("attention_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
    )


GRANITE = Family("granite", "GraniteForCausalLM", "granite", load_granite)
