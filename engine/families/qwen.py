"""Qwen2 and Qwen2.5: Llama with biases on the query, key and value projections. Qwen3: a norm of each query and key
head in their place; and Qwen3's mixture of experts."""

from __future__ import annotations

from engine.config import HfConfig, ModelConfig
from engine.families.decoder import FULL, SLIDING, decoder_config, layer_types, with_windows
from engine.families.family import Family, Fields


def load_qwen2(hf: HfConfig) -> ModelConfig:
    return _with_windows(hf, decoder_config(hf, family="qwen2", qkv_bias=True))


def load_qwen3(hf: HfConfig) -> ModelConfig:
    bias = Fields(hf).flag("attention_bias", False)
    model = decoder_config(hf, family="qwen3", head_dim=128, qk_norm="head", qkv_bias=bias, o_bias=bias)
    return _with_windows(hf, model)


def load_qwen3_moe(hf: HfConfig) -> ModelConfig:
    fields = Fields(hf)
    if fields.integer("decoder_sparse_step", 1) != 1 or fields.get("mlp_only_layers"):
        name = "mlp_only_layers" if fields.get("mlp_only_layers") else "decoder_sparse_step"
        raise fields.fail(name, "only models all of whose layers are mixtures are served")
    bias = fields.flag("attention_bias", False)
    model = decoder_config(
        hf,
        family="qwen3_moe",
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        intermediate="moe_intermediate_size",
        moe=fields.moe(128, 8, normalize=fields.flag("norm_topk_prob", False)),
    )
    window = fields.integer("sliding_window", 4096) if fields.flag("use_sliding_window", False) else None
    return with_windows(model, window, [SLIDING] * model.num_layers)


def _with_windows(hf: HfConfig, model: ModelConfig) -> ModelConfig:
    """Layers from ``max_window_layers`` on slide, or what ``layer_types`` says, where ``use_sliding_window`` is
    true."""
    fields = Fields(hf)
    if not fields.flag("use_sliding_window", False):
        return model
    first = fields.integer("max_window_layers", 28, minimum=0)
    default = [SLIDING if layer >= first else FULL for layer in range(model.num_layers)]
    return with_windows(model, fields.integer("sliding_window", 4096), layer_types(hf, default))


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", "qwen2", load_qwen2)
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", "qwen3", load_qwen3)
QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", "qwen3_moe", load_qwen3_moe)
