"""Phi-3, Phi-3.5 and Phi-4 (and Phi-4-mini): Llama with fused projections, longrope, and a part of each head
rotated."""

from __future__ import annotations

from engine.config import HfConfig, ModelConfig
from engine.families.decoder import SLIDING, decoder_config, with_windows
from engine.families.family import Family, Fields, TensorNames
from engine.families.rope import RopeDefaults

ROPE = RopeDefaults(partial=True, aliases=(("yarn", "longrope"),))  # what its first files called longrope
NAMES = TensorNames(qkv="model.layers.{layer}.self_attn.qkv_proj", gate_up="model.layers.{layer}.mlp.gate_up_proj")


def load_phi3(hf: HfConfig) -> ModelConfig:
    model = decoder_config(hf, family="phi3", rope=ROPE, norm_eps=1e-5)
    return with_windows(model, Fields(hf).window(), [SLIDING] * model.num_layers)


PHI3 = Family("phi3", "Phi3ForCausalLM", "phi3", load_phi3, NAMES)
