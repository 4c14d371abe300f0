"""GGUF models, shown as the Hugging Face checkpoint they were converted from.

The converters rename tensors, and for the ``llama`` architecture they reorder the rows of the query and key
projections: ggml rotates neighbouring pairs of dimensions where Hugging Face rotates halves. `GgufCheckpoint` undoes
both, and turns the metadata into a ``config.json`` dictionary. What it cannot express is refused by name.
"""

from __future__ import annotations

import math
import pathlib
import re

import numpy as np

from engine.checkpoints.dequantize import dequantize
from engine.checkpoints.errors import CheckpointError
from engine.checkpoints.gguf_file import GgufFile

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
PERMUTED = {"llama"}  # architectures whose q and k rows the converter reorders

MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
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
LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies; not a weight of the model


class GgufCheckpoint:
    """A ``.gguf`` file. See `engine.checkpoints.Checkpoint`."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.gguf = GgufFile(path)
        self.architecture = self.gguf.require("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{path} has the architecture {self.architecture!r}; served are {', '.join(sorted(ARCHITECTURES))}"
            )
        if self.gguf.get("split.count", 1) > 1:
            raise CheckpointError(
                f"{path} is one of {self.gguf.get('split.count')} parts; merge them with gguf-split first"
            )
        self._gguf_names = {hf_name(name, path): name for name in self.gguf.tensors if name != ROPE_FACTORS}
        self.hf_config = self._config()

    def names(self) -> list[str]:
        return sorted(self._gguf_names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.gguf.tensors[self._gguf_name(name)].shape

    def file(self, name: str) -> pathlib.Path:
        return self.path

    def read(self, name: str) -> np.ndarray:
        gguf_name = self._gguf_name(name)
        tensor = self.gguf.tensors[gguf_name]
        raw = self.gguf.raw(gguf_name)
        if self.architecture in PERMUTED and ".attn_q." in gguf_name:
            raw = unpermute(raw, self.hf_config["num_attention_heads"], len(tensor.shape))
        elif self.architecture in PERMUTED and ".attn_k." in gguf_name:
            raw = unpermute(raw, self.hf_config["num_key_value_heads"], len(tensor.shape))
        try:
            return dequantize(raw, tensor.type, tensor.shape)
        except NotImplementedError:
            raise CheckpointError(
                f"{self.path}: tensor {gguf_name} has type {tensor.type.name}, which cannot be dequantized; "
                "use another quantization, such as Q8_0"
            ) from None

    def _gguf_name(self, name: str) -> str:
        try:
            return self._gguf_names[name]
        except KeyError:
            raise CheckpointError(f"{self.path} has no tensor {name}") from None

    def _key(self, key: str):
        return self.gguf.require(f"{self.architecture}.{key}")

    def _optional(self, key: str, default):
        return self.gguf.get(f"{self.architecture}.{key}", default)

    def _number(self, key: str) -> int:
        value = self._key(key)
        if isinstance(value, np.ndarray):
            if len(set(value.tolist())) != 1:
                raise CheckpointError(
                    f"{self.path}: {self.architecture}.{key} differs between layers, which is not served"
                )
            value = value[0]
        return int(value)

    def _config(self) -> dict:
        """The metadata as config.json has it."""
        gguf = self.gguf
        if "token_embd.weight" not in gguf.tensors:
            raise CheckpointError(f"{self.path} has no tensor token_embd.weight; download it again")
        heads, hidden = self._number("attention.head_count"), self._number("embedding_length")
        if self._optional("expert_count", 0):
            raise CheckpointError(
                f"{self.path} is a mixture of {self._optional('expert_count', 0)} experts, which is not served"
            )
        config = {
            "architectures": [ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
            "hidden_size": hidden,
            "intermediate_size": self._number("feed_forward_length"),
            "num_hidden_layers": self._number("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._number("attention.head_count_kv"),
            "head_dim": int(self._optional("attention.key_length", hidden // heads)),
            "max_position_embeddings": self._number("context_length"),
            "rms_norm_eps": float(str(np.float32(self._key("attention.layer_norm_rms_epsilon")))),
            "rope_theta": float(self._optional("rope.freq_base", 10_000.0)),
            "rope_scaling": self._rope_scaling(),
            "hidden_act": "silu",
            "tie_word_embeddings": "output.weight" not in gguf.tensors,
            "bos_token_id": gguf.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": gguf.get("tokenizer.ggml.eos_token_id"),
            "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors,
        }
        rotated = int(self._optional("rope.dimension_count", config["head_dim"]))
        if rotated != config["head_dim"]:
            raise CheckpointError(
                f"{self.path} rotates {rotated} of {config['head_dim']} head dimensions "
                f"({self.architecture}.rope.dimension_count), "
                "which is not served"
            )
        return config

    def _rope_scaling(self) -> dict | None:
        kind = self._optional("rope.scaling.type", "none")
        if ROPE_FACTORS in self.gguf.tensors:
            return self._llama3_scaling()
        if kind == "none":
            return None
        factor = float(self._optional("rope.scaling.factor", 1.0))
        scaling = {"rope_type": kind, "factor": factor}
        original = self._optional("rope.scaling.original_context_length", None)
        if original is not None:
            scaling["original_max_position_embeddings"] = int(original)
        return scaling

    def _llama3_scaling(self) -> dict:
        """The parameters that the converter turned into ``rope_freqs.weight``.

        Every Llama 3.1 to 3.3 has the same but for ``factor``, which is the largest divisor; other values are refused.
        """
        found = dequantize(self.gguf.raw(ROPE_FACTORS), self.gguf.tensors[ROPE_FACTORS].type, (-1,)).astype(np.float64)
        scaling = {
            "rope_type": "llama3",
            "factor": float(found.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        theta = float(self._optional("rope.freq_base", 10_000.0))
        if not np.allclose(llama3_divisors(theta, 2 * len(found), scaling), found, rtol=1e-4):
            raise CheckpointError(
                f"{self.path}: tensor {ROPE_FACTORS} scales rotary frequencies otherwise than Llama 3 does, "
                "which is not served; use the safetensors version of the model"
            )
        return scaling


def hf_name(name: str, path: pathlib.Path) -> str:
    """The Hugging Face name of a GGUF tensor."""
    if name in MODEL_NAMES:
        return MODEL_NAMES[name]
    match = LAYER.fullmatch(name)
    if match is None or match[2] not in LAYER_NAMES:
        raise CheckpointError(
            f"{path}: tensor {name} is of no known kind; the model needs something that is not served"
        )
    return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"


def unpermute(raw: np.ndarray, heads: int, dimensions: int) -> np.ndarray:
    """Rows of a query or key projection from ggml's order back to Hugging Face's.

    Within a head the converter puts row ``half * d/2 + i`` at ``2 i + half``. Works on stored bytes, since rows are
    whole. ``raw`` is [heads * d, bytes per row], or [1, bytes] for a bias (``dimensions`` 1; float32 then).
    """
    rows = raw.view("<f4").reshape(-1, 1) if dimensions == 1 else raw
    half = len(rows) // heads // 2
    ordered = rows.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)
    return np.ascontiguousarray(ordered).view(np.uint8).reshape(raw.shape)


def llama3_divisors(theta: float, head_dim: int, scaling: dict) -> np.ndarray:
    """What each rotary frequency is divided by, float64 [head_dim / 2] ("The Llama 3 Herd of Models", and its reference
    code).
    """
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / wavelength
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1 - smooth) / scaling["factor"] + smooth)
