"""Gemma 1, 2 and 3: embeddings scaled by sqrt(hidden), norms that multiply by 1 + weight in float32, gelu.

Gemma 2 adds norms after attention and feed-forward, soft-caps, a query scale of its own and a sliding window in every
other layer. Gemma 3 has norms of queries and keys in place of the soft-caps, and sliding layers that rotate by another
base. Its models with vision are served as the language models they hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from engine.config import ConfigError, HfConfig, LayerKind, ModelConfig, RopeConfig
from engine.families.decoder import FULL, SLIDING, decoder_config, layer_types, with_kinds, with_windows
from engine.families.family import Family, Fields, TensorNames
from engine.families.rope import RopeDefaults, read_rope

NORMS: dict[str, Any] = {"norm_offset": 1.0, "wide_norms": True}
LAYER = "model.layers.{layer}."
NAMES = TensorNames(mlp_norm=LAYER + "pre_feedforward_layernorm.weight")


def load_gemma(hf: HfConfig) -> ModelConfig:
    # The first config.json files say gelu and mean its approximation; hidden_activation came to say so.
    hf = {**hf, "hidden_act": "gelu_pytorch_tanh" if hf.get("hidden_act") in (None, "gelu") else hf["hidden_act"]}
    bias = Fields(hf).flag("attention_bias", False)
    return _gemma(hf, "gemma", qkv_bias=bias, o_bias=bias)


def load_gemma2(hf: HfConfig) -> ModelConfig:
    fields = Fields(hf)
    model = _gemma(
        hf,
        "gemma2",
        activation=fields.get("hidden_activation") or "gelu_pytorch_tanh",
        attention_softcap=_cap(fields, "attn_logit_softcapping", 50.0),
        logit_softcap=_cap(fields, "final_logit_softcapping", 30.0),
        **_second(fields),
    )
    types = [FULL if layer % 2 else SLIDING for layer in range(model.num_layers)]
    return with_windows(model, _window(hf), layer_types(hf, types))


def load_gemma3(hf: HfConfig) -> ModelConfig:
    fields = Fields(hf)
    max_position = fields.integer("max_position_embeddings", 131_072)
    head_dim = fields.integer("head_dim", 256)
    full, sliding = gemma3_ropes(hf, max_position, head_dim)
    model = _gemma(
        {"max_position_embeddings": max_position, **hf},
        "gemma3",
        rope=full,
        activation=fields.get("hidden_activation") or "gelu_pytorch_tanh",
        qk_norm="head",
        attention_softcap=_cap(fields, "attn_logit_softcapping", None),
        logit_softcap=_cap(fields, "final_logit_softcapping", None),
        **_second(fields),
    )
    period = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
    default = [SLIDING if (layer + 1) % period else FULL for layer in range(model.num_layers)]
    kinds = {FULL: LayerKind(full), SLIDING: LayerKind(sliding, _window(hf))}
    return with_kinds(model, [kinds[kind] for kind in layer_types(hf, default)])


def load_gemma3_vision(hf: HfConfig) -> ModelConfig:
    """The language model of a model with vision. Its own config leaves out what is as in transformers."""
    text = hf.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError(f"config.json: text_config is {text!r}; an object is needed")
    eos = hf.get("eos_token_id") if text.get("eos_token_id") is None else text["eos_token_id"]
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208, "eos_token_id": eos}
    known = {name: value for name, value in text.items() if value is not None}
    known["tie_word_embeddings"] = Fields(hf).flag("tie_word_embeddings", True)  # the outer config's counts
    return dataclasses.replace(load_gemma3({**heads, **known}), family="gemma3_vision")


def gemma3_ropes(hf: HfConfig, max_position: int, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Of full and of sliding layers. In the older spelling ``rope_scaling`` is about the full ones, and
    ``rope_local_base_freq`` is the base of the others.
    """
    nested, scaling = Fields(hf).object("rope_parameters"), Fields(hf).object("rope_scaling")
    if unknown := sorted(nested.keys() - {FULL, SLIDING}):
        raise ConfigError(f"config.json: rope_parameters has {', '.join(unknown)}; served are {FULL}, {SLIDING}")
    parts = Fields(nested, "config.json: rope_parameters")
    full = {**parts.object(FULL), **scaling}
    local = {"rope_theta": hf.get("rope_local_base_freq"), **parts.object(SLIDING)}
    return (
        read_rope(hf, "rope_parameters.full_attention", full, max_position, head_dim, RopeDefaults(1_000_000.0)),
        read_rope({}, "rope_parameters.sliding_attention", local, max_position, head_dim, RopeDefaults(10_000.0)),
    )


def _gemma(hf: HfConfig, family: str, **differences: Any) -> ModelConfig:
    if Fields(hf).flag("use_bidirectional_attention", False):
        raise ConfigError("config.json: use_bidirectional_attention is true, which is not served")
    scale = float(Fields(hf).integer("hidden_size") ** 0.5)
    return decoder_config(
        hf, family=family, head_dim=256, tie_embeddings=True, embed_scale=scale, **NORMS, **differences
    )


def _second(fields: Fields) -> dict[str, Any]:
    """What came with Gemma 2."""
    bias = fields.flag("attention_bias", False)
    scale = fields.number("query_pre_attn_scalar", 256.0) ** -0.5
    return {"norms": "both", "query_scale": scale, "qkv_bias": bias, "o_bias": bias}


def _cap(fields: Fields, name: str, default: float | None) -> float | None:
    """A soft-cap; null is none, and absent the default."""
    if name not in fields.hf:
        return default
    return None if fields.get(name) is None else fields.number(name)


def _window(hf: HfConfig) -> int | None:
    return Fields(hf).window() if "sliding_window" in hf else 4096


def _within(names: TensorNames, prefix: str) -> TensorNames:
    """The names of a model that is a part of another."""
    named = {field: prefix + name for field, name in vars(names).items() if name is not None}
    return dataclasses.replace(names, **named)


GEMMA = Family("gemma", "GemmaForCausalLM", "gemma", load_gemma)
GEMMA2 = Family("gemma2", "Gemma2ForCausalLM", "gemma2", load_gemma2, NAMES)
GEMMA3 = Family("gemma3", "Gemma3ForCausalLM", "gemma3_text", load_gemma3, NAMES)
GEMMA3_VISION = Family(
    "gemma3_vision",
    "Gemma3ForConditionalGeneration",
    "gemma3",
    load_gemma3_vision,
    _within(NAMES, "language_model."),
    ignored=(r"vision_tower\..*", r"multi_modal_projector\..*"),
)
