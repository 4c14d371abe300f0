"""OLMo 2: norms after attention and feed-forward instead of before, and norms over the whole query and key
projections."""

from __future__ import annotations

from engine.config import HfConfig, ModelConfig
from engine.families.decoder import decoder_config
from engine.families.family import Family, Fields


def load_olmo2(hf: HfConfig) -> ModelConfig:
    bias = Fields(hf).flag("attention_bias", False)
    return decoder_config(
        hf,
        family="olmo2",
        norm_eps=1e-5,
        norms="post",
        wide_norms=True,
        qk_norm="projection",
        qkv_bias=bias,
        o_bias=bias,
    )


OLMO2 = Family("olmo2", "Olmo2ForCausalLM", "olmo2", load_olmo2)
