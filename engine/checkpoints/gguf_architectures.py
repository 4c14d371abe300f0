"""What converters to GGUF do to each architecture, and what its metadata leave out.

Facts from llama.cpp's ``convert_hf_to_gguf.py`` and model loader, which knows some numbers by the architecture alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from engine.config import HfConfig

Metadata = Callable[..., Any]  # (key without the architecture, default) -> value
Found = dict[str, Any]  # the config so far, which is of our own making

COMMON = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
}
QWEN_MOE = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """``names`` are Hugging Face's of a layer's tensors. ``permuted``: rows of q and k are reordered. ``norm_offset``
    was added to norm weights. ``config`` adds to config.json, given the metadata and the config so far; where it
    cannot, it raises ValueError."""

    hf: str
    names: Mapping[str, str] = dataclasses.field(default_factory=lambda: COMMON)
    permuted: bool = False
    norm_offset: float = 0.0
    config: Callable[[Metadata, Found], HfConfig] = lambda metadata, config: {}
    partial: bool = False  # may rotate a part of each head


def _llama(metadata: Metadata, config: Found) -> HfConfig:
    experts = metadata("expert_count", 0)
    if not experts:
        return {}
    return {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": int(experts),
        "num_experts_per_tok": int(metadata("expert_used_count")),
        "sliding_window": None,
    }


def _qwen3_moe(metadata: Metadata, config: Found) -> HfConfig:
    return {
        "num_experts": int(metadata("expert_count")),
        "num_experts_per_tok": int(metadata("expert_used_count")),
        "moe_intermediate_size": int(metadata("expert_feed_forward_length")),
        "norm_topk_prob": True,
    }


def _gemma(metadata: Metadata, config: Found) -> HfConfig:
    return {"hidden_act": "gelu_pytorch_tanh"}


def _query_scalar(config: Found, largest: int) -> float:
    """The size with the most layers scales by hidden / heads, the others by the head's dimension."""
    if config["num_hidden_layers"] == largest:
        return float(config["hidden_size"] / config["num_attention_heads"])
    return float(config["head_dim"])


def _gemma2(metadata: Metadata, config: Found) -> HfConfig:
    return {
        "sliding_window": int(metadata("attention.sliding_window")),
        "attn_logit_softcapping": float(metadata("attn_logit_softcapping")),
        "final_logit_softcapping": float(metadata("final_logit_softcapping")),
        "query_pre_attn_scalar": _query_scalar(config, largest=46),
    }


def _gemma3(metadata: Metadata, config: Found) -> HfConfig:
    cap = metadata("final_logit_softcapping", None)
    return {
        "sliding_window": int(metadata("attention.sliding_window")),
        "final_logit_softcapping": None if cap is None else float(cap),
        "query_pre_attn_scalar": _query_scalar(config, largest=62),
        "rope_theta": float(metadata("rope.freq_base", 1_000_000.0)),
        "rope_local_base_freq": float(metadata("rope.freq_base_swa", 10_000.0)),
    }


def _phi3(metadata: Metadata, config: Found) -> HfConfig:
    # 0 says none; files of older converters do not say
    return {
        "sliding_window": int(metadata("attention.sliding_window")) or None,
        "original_max_position_embeddings": int(
            metadata("rope.scaling.original_context_length", config["max_position_embeddings"])
        ),
        "partial_rotary_factor": int(metadata("rope.dimension_count", config["head_dim"])) / config["head_dim"],
    }


def _olmo2(metadata: Metadata, config: Found) -> HfConfig:
    if metadata("attention.sliding_window", None) is not None:
        raise ValueError("it has a sliding window, as OLMo 3 does, which is not served")
    return {}


def _smollm3(metadata: Metadata, config: Found) -> HfConfig:
    return {"no_rope_layer_interval": 4}


def _granite(metadata: Metadata, config: Found) -> HfConfig:
    return {
        "attention_multiplier": float(metadata("attention.scale", 1 / math.sqrt(config["head_dim"]))),
        "embedding_multiplier": float(metadata("embedding_scale", 1.0)),
        "residual_multiplier": float(metadata("residual_scale", 1.0)),
        "logits_scaling": float(metadata("logit_scale", 1.0)),
    }


_PHI3 = {**COMMON, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}

ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", {**COMMON, **MIXTRAL}, permuted=True, config=_llama),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM", {**COMMON, **HEAD_NORMS}),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", {**COMMON, **HEAD_NORMS, **QWEN_MOE}, config=_qwen3_moe),
    "gemma": Architecture("GemmaForCausalLM", norm_offset=1.0, config=_gemma),
    "gemma2": Architecture("Gemma2ForCausalLM", {**COMMON, **GEMMA_NORMS}, norm_offset=1.0, config=_gemma2),
    "gemma3": Architecture(
        "Gemma3ForCausalLM", {**COMMON, **GEMMA_NORMS, **HEAD_NORMS}, norm_offset=1.0, config=_gemma3
    ),
    "phi3": Architecture("Phi3ForCausalLM", _PHI3, config=_phi3, partial=True),
    "olmo2": Architecture(
        "Olmo2ForCausalLM",
        {
            **COMMON,
            **HEAD_NORMS,
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        config=_olmo2,
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", permuted=True, config=_smollm3),
    "granite": Architecture("GraniteForCausalLM", permuted=True, config=_granite),
}
