"""Mistral: Llama; in its first version every layer has a sliding window."""

from __future__ import annotations

from engine.config import HfConfig, ModelConfig
from engine.families.decoder import SLIDING, decoder_config, with_windows
from engine.families.family import Family, Fields


def load_mistral(hf: HfConfig) -> ModelConfig:
    model = decoder_config(hf, family="mistral")
    # null is none, but transformers takes 4096 where the field is absent
    window = Fields(hf).window() if "sliding_window" in hf else 4096
    return with_windows(model, window, [SLIDING] * model.num_layers)


MISTRAL = Family("mistral", "MistralForCausalLM", "mistral", load_mistral)
