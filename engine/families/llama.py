"""Llama (2, 3, SmolLM2, TinyLlama, ...), and Mistral without its sliding window: the same decoder and the same tensor
names.

`decoder_config` reads what families of this shape have in common; a family adds what differs.
"""

from __future__ import annotations

from engine.config import ConfigError, ModelConfig, RopeConfig
from engine.families.family import Family, Fields

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def decoder_config(
    hf: dict, *, family: str, qkv_bias: bool, o_bias: bool, mlp_bias: bool, default_theta: float = 10_000.0
) -> ModelConfig:
    """A config of the Llama shape. Both spellings of each field are read; what is not served is refused by name."""
    fields = Fields(hf)
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.fail("num_key_value_heads", f"it must divide num_attention_heads ({heads})")
    if hf.get("head_dim") is None and hidden % heads:
        raise fields.fail("hidden_size", f"without head_dim it must be a multiple of num_attention_heads ({heads})")
    head_dim = fields.integer("head_dim", hidden // heads)
    if head_dim % 2:
        raise fields.fail("head_dim", "rotary position embeddings need an even number")
    activation = hf.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise fields.fail("hidden_act", f"served are {', '.join(ACTIVATIONS)}")
    if hf.get("quantization_config"):
        method = hf["quantization_config"].get("quant_method")
        raise ConfigError(
            f"config.json: quantization_config is there (quant_method {method!r}), which is not served; "
            "use the unquantized version of the model, or a GGUF"
        )
    max_position = fields.integer("max_position_embeddings")
    vocab_size = fields.integer("vocab_size")
    eos = fields.tokens("eos_token_id")
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=fields.number("rms_norm_eps", 1e-6),  # transformers' default
        activation=ACTIVATIONS[activation],
        rope=rope_config(hf, max_position, default_theta),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        bos_token_id=fields.token("bos_token_id"),
        eos_token_ids=eos,
    )


def rope_config(hf: dict, max_position: int, default_theta: float) -> RopeConfig:
    """Rotary embedding in either spelling: ``rope_parameters`` (transformers 5), or ``rope_theta`` with
    ``rope_scaling``, whose kind is ``rope_type`` or, in older files, ``type``.
    """
    nested = hf.get("rope_parameters")
    name = "rope_parameters" if nested is not None else "rope_scaling"
    scaling = nested if nested is not None else hf.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ConfigError(f"config.json: {name} is {scaling!r}; an object or null is needed")
    if any(isinstance(value, dict) for value in scaling.values()):
        raise ConfigError(
            f"config.json: {name} differs between layers ({', '.join(scaling)}), which this family does not have"
        )
    fields = Fields(scaling, f"config.json: {name}")
    theta = fields.number("rope_theta", Fields(hf).number("rope_theta", default_theta))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    for place in (hf, scaling):
        if place.get("partial_rotary_factor") not in (None, 1.0):
            raise ConfigError(
                f"config.json: partial_rotary_factor is {place['partial_rotary_factor']!r}; "
                "only whole heads (1.0) can be rotated"
            )
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=fields.number("factor"))
    if kind == "llama3":
        rope = RopeConfig(
            theta=theta,
            kind="llama3",
            factor=fields.number("factor"),
            low_freq_factor=fields.number("low_freq_factor"),
            high_freq_factor=fields.number("high_freq_factor"),
            # transformers 5 falls back to max_position_embeddings
            original_max_position=fields.integer("original_max_position_embeddings", max_position),
        )
        if rope.high_freq_factor <= rope.low_freq_factor:
            raise fields.fail("high_freq_factor", f"it must be over low_freq_factor ({rope.low_freq_factor})")
        return rope
    raise ConfigError(
        f"config.json: {name} has rope_type {kind!r}, which is not served; served are default, linear, llama3"
    )


def load_llama(hf: dict) -> ModelConfig:
    fields = Fields(hf)
    if fields.integer("pretraining_tp", 1) != 1:
        raise fields.fail("pretraining_tp", "only 1 is served")
    attention_bias, mlp_bias = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    return decoder_config(hf, family="llama", qkv_bias=attention_bias, o_bias=attention_bias, mlp_bias=mlp_bias)


def load_mistral(hf: dict) -> ModelConfig:
    window = hf.get("sliding_window")
    if window is not None and window < Fields(hf).integer("max_position_embeddings"):
        raise ConfigError(
            f"config.json: sliding_window is {window}, which is not served; use a Mistral without one (v0.2 or later), "
            "or set it to null and max_position_embeddings to the window"
        )
    return decoder_config(hf, family="mistral", qkv_bias=False, o_bias=False, mlp_bias=False)


LLAMA = Family("llama", "LlamaForCausalLM", "llama", load_llama)
MISTRAL = Family("mistral", "MistralForCausalLM", "mistral", load_mistral)
