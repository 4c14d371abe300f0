"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from engine.config import HfConfig, ModelConfig
from engine.families.decoder import SLIDING, decoder_config, with_windows
from engine.families.family import Family, Fields, TensorNames

BLOCK = "model.layers.{layer}.block_sparse_moe."
NAMES = TensorNames(
    router=BLOCK + "gate",
    expert_gate=BLOCK + "experts.{expert}.w1",
    expert_up=BLOCK + "experts.{expert}.w3",
    expert_down=BLOCK + "experts.{expert}.w2",
)


def load_mixtral(hf: HfConfig) -> ModelConfig:
    fields = Fields(hf)
    model = decoder_config(hf, family="mixtral", norm_eps=1e-5, moe=fields.moe(8, 2, normalize=True))
    return with_windows(model, fields.window(), [SLIDING] * model.num_layers)


MIXTRAL = Family("mixtral", "MixtralForCausalLM", "mixtral", load_mixtral, NAMES)
