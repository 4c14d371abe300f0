"""SmolLM3: Llama, some of whose layers (every fourth) rotate nothing."""

from __future__ import annotations

from engine.config import HfConfig, LayerKind, ModelConfig
from engine.families.decoder import FULL, SLIDING, decoder_config, layer_types, with_kinds
from engine.families.family import Family, Fields
from engine.families.rope import RopeDefaults


def load_smollm3(hf: HfConfig) -> ModelConfig:
    fields = Fields(hf)
    bias = fields.flag("attention_bias", False)
    model = decoder_config(
        hf,
        family="smollm3",
        rope=RopeDefaults(2_000_000.0),
        tie_embeddings=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )
    rotates = fields.get("no_rope_layers")  # despite its name, 1 where the layer rotates
    if rotates is None:
        interval = fields.integer("no_rope_layer_interval", 4)
        rotates = [int((layer + 1) % interval != 0) for layer in range(model.num_layers)]
    if not isinstance(rotates, list) or len(rotates) < model.num_layers or set(rotates) - {0, 1}:
        raise fields.fail("no_rope_layers", "a 0 or 1 for each of num_hidden_layers is needed")
    slides = fields.flag("use_sliding_window", False)
    types = layer_types(hf, [SLIDING if slides and not rotate else FULL for rotate in rotates[: model.num_layers]])
    window = fields.window() if slides else None
    kinds = zip(rotates, types, strict=False)
    return with_kinds(
        model,
        [LayerKind(model.rope if rotate else None, window if kind == SLIDING else None) for rotate, kind in kinds],
    )


SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", "smollm3", load_smollm3)
