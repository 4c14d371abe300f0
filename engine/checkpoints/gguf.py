"""GGUF models, shown as the Hugging Face checkpoint they were converted from.

The converters rename tensors, and for ``llama`` and its kin they reorder the rows of the query and key projections:
ggml rotates neighbouring pairs of dimensions where Hugging Face rotates halves. For Gemma they add 1 to norm weights,
and they stack experts. `GgufCheckpoint` undoes all that, and turns the metadata into a ``config.json`` dictionary; what
is special to each architecture is in ``gguf_architectures.py``. What cannot be expressed is refused by name."""

from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from engine.checkpoints.dequantize import dequantize, readable_types
from engine.checkpoints.errors import CheckpointError
from engine.checkpoints.gguf_architectures import ARCHITECTURES, Found
from engine.checkpoints.gguf_file import GgufFile
from engine.checkpoints.mapped import release_pages
from engine.config import HfConfig

MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies; not a weight of the model
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"  # longrope's


class GgufCheckpoint:
    """A ``.gguf`` file. See `engine.checkpoints.Checkpoint`."""

    strict = True

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
        self.converted = ARCHITECTURES[self.architecture]
        self._places = {hf: place for name in self.gguf.tensors for hf, place in self._hf_names(name)}
        self.hf_config = self._config()
        self.dequantizes = any(tensor.type.name not in ("F32", "F16", "BF16") for tensor in self.gguf.tensors.values())

    def names(self) -> list[str]:
        return sorted(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        gguf_name, expert = self._place(name)
        shape = self.gguf.tensors[gguf_name].shape
        return shape if expert is None else shape[1:]

    def file(self, name: str) -> pathlib.Path:
        return self.path

    def release(self, name: str) -> None:
        tensor = self.gguf.tensors[self._place(name)[0]]
        release_pages(self.gguf.data, tensor.offset, tensor.offset + tensor.size)

    def read(self, name: str) -> np.ndarray:
        gguf_name, expert = self._place(name)
        kind, shape = self.gguf.tensors[gguf_name].type, self.shape(name)
        raw = self.gguf.raw(gguf_name)
        if expert is not None:
            raw = raw[expert * shape[0] : (expert + 1) * shape[0]]
        elif self.converted.permuted and ".attn_q." in gguf_name:
            raw = unpermute(raw, self._number("attention.head_count"), len(shape))
        elif self.converted.permuted and ".attn_k." in gguf_name:
            raw = unpermute(raw, self._number("attention.head_count_kv"), len(shape))
        try:
            values = dequantize(raw, kind, shape)
        except NotImplementedError:
            raise CheckpointError(
                f"{self.path}: tensor {gguf_name} has type {kind.name}, which cannot be dequantized; "
                f"use another quantization, such as Q8_0; served are {', '.join(readable_types())}"
            ) from None
        if self.converted.norm_offset and name.endswith("norm.weight"):
            return values.astype(np.float32) - np.float32(self.converted.norm_offset)
        return values

    def _hf_names(self, name: str) -> Iterator[tuple[str, tuple[str, int | None]]]:
        """The Hugging Face names of a tensor, several if it stacks experts, and which part of it each is."""
        if name in (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS):
            return
        if name in MODEL_NAMES:
            yield MODEL_NAMES[name], (name, None)
            return
        match = LAYER.fullmatch(name)
        if match is None or match[2] not in self.converted.names:
            raise CheckpointError(
                f"{self.path}: tensor {name} is of no known kind; the model needs something that is not served"
            )
        hf = f"model.layers.{match[1]}.{self.converted.names[match[2]]}.{match[3]}"
        if "{expert}" not in hf:
            yield hf, (name, None)
            return
        for expert in range(self.gguf.tensors[name].shape[0]):
            yield hf.format(expert=expert), (name, expert)

    def _place(self, name: str) -> tuple[str, int | None]:
        """The tensor in the file, and which of its experts."""
        try:
            return self._places[name]
        except KeyError:
            raise CheckpointError(f"{self.path} has no tensor {name}") from None

    def _key(self, key: str) -> Any:
        return self.gguf.require(f"{self.architecture}.{key}")

    def _optional(self, key: str, default: object) -> Any:
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

    def _config(self) -> HfConfig:
        """The metadata as config.json has it."""
        gguf = self.gguf
        if "token_embd.weight" not in gguf.tensors:
            raise CheckpointError(f"{self.path} has no tensor token_embd.weight; download it again")
        heads, hidden = self._number("attention.head_count"), self._number("embedding_length")
        config: Found = {
            "architectures": [self.converted.hf],
            "model_type": self.architecture,
            "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
            "hidden_size": hidden,
            "intermediate_size": self._number("feed_forward_length"),
            "num_hidden_layers": self._number("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._number("attention.head_count_kv"),
            "head_dim": int(self._optional("attention.key_length", hidden // max(1, heads))),
            "max_position_embeddings": self._number("context_length"),
            "rms_norm_eps": float(str(np.float32(self._key("attention.layer_norm_rms_epsilon")))),
            "rope_theta": float(self._optional("rope.freq_base", 10_000.0)),
            "rope_scaling": self._rope_scaling(),
            "hidden_act": "silu",
            "tie_word_embeddings": "output.weight" not in gguf.tensors,
            "bos_token_id": self._token("bos"),
            "eos_token_id": self._token("eos"),
            "attention_bias": self._has_bias("attn_q", "attn_k", "attn_v", "attn_output"),
            "mlp_bias": self._has_bias("ffn_gate", "ffn_up", "ffn_down"),
        }
        rotated = int(self._optional("rope.dimension_count", config["head_dim"]))
        if rotated != config["head_dim"] and not self.converted.partial:
            raise CheckpointError(
                f"{self.path} rotates {rotated} of {config['head_dim']} head dimensions "
                f"({self.architecture}.rope.dimension_count), "
                "which is not served"
            )
        try:
            return {**config, **self.converted.config(self._metadata, config)}
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {error}") from None

    def _token(self, name: str) -> int | None:
        """A special token's id; as llama.cpp has it, none where it is not of the vocabulary, such as -1."""
        id = self.gguf.get(f"tokenizer.ggml.{name}_token_id")
        return id if id is not None and 0 <= id < self.gguf.tensors["token_embd.weight"].shape[0] else None

    def _has_bias(self, *modules: str) -> bool:
        """Whether any layer has a bias of one of these; the metadata do not say."""
        found = (LAYER.fullmatch(name) for name in self.gguf.tensors)
        return any(match is not None and match[2] in modules and match[3] == "bias" for match in found)

    def _metadata(self, key: str, *default: object) -> Any:
        """For `Architecture.config`: a value, which must be there if there is no default."""
        return self._optional(key, *default) if default else self._key(key)

    def _rope_scaling(self) -> HfConfig | None:
        kind = self._optional("rope.scaling.type", "none")
        if LONG_FACTORS in self.gguf.tensors:
            factors = {"long_factor": LONG_FACTORS, "short_factor": SHORT_FACTORS}
            attention = self._optional("rope.scaling.attn_factor", None)
            return {
                "rope_type": "longrope",
                "attention_factor": attention and float(str(np.float32(attention))),
                **{name: self._factors(tensor) for name, tensor in factors.items()},
            }
        if ROPE_FACTORS in self.gguf.tensors:
            return self._llama3_scaling()
        if kind == "none":
            return None
        factor = float(self._optional("rope.scaling.factor", 1.0))
        scaling: HfConfig = {"rope_type": kind, "factor": factor}
        original = self._optional("rope.scaling.original_context_length", None)
        if original is not None:
            scaling["original_max_position_embeddings"] = int(original)
        return scaling

    def _factors(self, name: str) -> list[float]:
        if name not in self.gguf.tensors:
            raise CheckpointError(f"{self.path} has no tensor {name}; download it again")
        factors = dequantize(self.gguf.raw(name), self.gguf.tensors[name].type, (-1,))
        return [float(factor) for factor in factors]

    def _llama3_scaling(self) -> HfConfig:
        """The parameters that the converter turned into ``rope_freqs.weight``.

        Every Llama 3.1 to 3.3 has the same but for ``factor``, which is the largest divisor; other values are refused.
        """
        found = np.array(self._factors(ROPE_FACTORS))
        scaling = {
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
        return {"rope_type": "llama3", **scaling}


def unpermute(raw: np.ndarray, heads: int, dimensions: int) -> np.ndarray:
    """Rows of a query or key projection from ggml's order back to Hugging Face's.

    Within a head the converter puts row ``half * d/2 + i`` at ``2 i + half``. Works on stored bytes, since rows are
    whole. ``raw`` is [heads * d, bytes per row], or [1, bytes] for a bias (``dimensions`` 1; float32 then).
    """
    rows = raw.view("<f4").reshape(-1, 1) if dimensions == 1 else raw
    half = len(rows) // heads // 2
    ordered = rows.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)
    return np.ascontiguousarray(ordered).view(np.uint8).reshape(raw.shape)


def llama3_divisors(theta: float, head_dim: int, scaling: Mapping[str, float]) -> np.ndarray:
    """What each rotary frequency is divided by, float64 [head_dim / 2] ("The Llama 3 Herd of Models", and its reference
    code).
    """
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / wavelength
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1 - smooth) / scaling["factor"] + smooth)
