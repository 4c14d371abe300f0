"""What configs of all families have in common, read once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from engine.config import ConfigError, HfConfig, LayerKind, ModelConfig, RopeConfig
from engine.families.family import Fields
from engine.families.rope import RopeDefaults, longest, rope_config

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
QUANTIZED = ("fp8", "fbgemm_fp8", "compressed-tensors", "mxfp4")
MAX_LAYERS = 10_000  # of which each has a Python object or more
FULL, SLIDING = "full_attention", "sliding_attention"


def decoder_config(
    hf: HfConfig,
    *,
    family: str,
    rope: RopeDefaults | RopeConfig = RopeDefaults(),
    activation: object = None,  # the field's value, where it is not hidden_act
    head_dim: int | None = None,  # where the config is silent; None: hidden_size / num_attention_heads
    norm_eps: float = 1e-6,
    tie_embeddings: bool = False,
    intermediate: str = "intermediate_size",
    **differences: Any,
) -> ModelConfig:
    """A config of the Llama shape. Both spellings of each field are read; what is not served is refused by name.

    The keyword arguments are the family's defaults; ``differences`` are fields of `ModelConfig`.
    """
    fields = Fields(hf)
    _check_quantization(hf)
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.fail("num_key_value_heads", f"it must divide num_attention_heads ({heads})")
    if hf.get("head_dim") is None and head_dim is None and hidden % heads:
        raise fields.fail("hidden_size", f"without head_dim it must be a multiple of num_attention_heads ({heads})")
    head_dim = fields.integer("head_dim", head_dim or hidden // heads)
    if head_dim % 2:
        raise fields.fail("head_dim", "rotary position embeddings need an even number")
    max_position = fields.integer("max_position_embeddings")
    if isinstance(rope, RopeDefaults):
        rope = rope_config(hf, max_position, head_dim, rope)
    return ModelConfig(
        **{
            "family": family,
            "vocab_size": fields.integer("vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": fields.integer(intermediate),
            "num_layers": fields.integer("num_hidden_layers", maximum=MAX_LAYERS),
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "max_position": longest(rope, max_position),
            "norm_eps": fields.number("rms_norm_eps", norm_eps),
            "activation": _activation(fields, activation),
            "rope": rope,
            "tie_embeddings": fields.flag("tie_word_embeddings", tie_embeddings),
            "bos_token_id": fields.token("bos_token_id"),
            "eos_token_ids": fields.tokens("eos_token_id"),
            **differences,
        }
    )


def _check_quantization(hf: HfConfig) -> None:
    """What is served, ``engine/checkpoints/quantized.py`` shows dequantized."""
    quantization = Fields(hf).object("quantization_config")
    method = quantization.get("quant_method")
    if quantization and method not in QUANTIZED:
        raise ConfigError(
            f"config.json: quantization_config is there (quant_method {method!r}), which is not served (served are "
            f"{', '.join(QUANTIZED)}); use the unquantized version of the model, or a GGUF"
        )


def _activation(fields: Fields, value: object) -> str:
    name = "hidden_act" if value is None else "hidden_activation"
    found = value or fields.get("hidden_act") or "silu"
    if not isinstance(found, str) or found not in ACTIVATIONS:
        raise ConfigError(f"{fields.prefix}: {name} is {found!r}; served are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[found]


def layer_types(hf: HfConfig, default: Sequence[str]) -> list[str]:
    """``layer_types``: of each layer, whether it slides. ``default`` where the config is silent."""
    types = hf.get("layer_types")
    types = list(default) if types is None else types
    if not isinstance(types, list) or len(types) != hf["num_hidden_layers"]:
        raise ConfigError(f"config.json: layer_types is {types!r}; one type for each of num_hidden_layers is needed")
    if unknown := sorted(set(map(str, types)) - {FULL, SLIDING}):
        raise ConfigError(f"config.json: layer_types has {', '.join(unknown)}; served are {FULL}, {SLIDING}")
    return types


def with_windows(model: ModelConfig, window: int | None, types: Sequence[str]) -> ModelConfig:
    """The model with a window in its sliding layers, all layers rotating alike."""
    return with_kinds(model, [LayerKind(model.rope, window if kind == SLIDING else None) for kind in types])


def with_kinds(model: ModelConfig, kinds: Sequence[LayerKind]) -> ModelConfig:
    """The model with these layers. A window that no sequence outgrows is none."""
    kinds = [LayerKind(kind.rope, None if (kind.window or 0) >= model.max_position else kind.window) for kind in kinds]
    distinct = tuple(dict.fromkeys(kinds))
    if distinct == (LayerKind(model.rope),):
        return model
    return dataclasses.replace(model, layer_kinds=distinct, layer_pattern=tuple(distinct.index(kind) for kind in kinds))
