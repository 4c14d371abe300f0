"""Weights loaded from a folder, and a decoder in plain numpy that shows whether they are the right ones."""

from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from engine.agreement import read_model
from engine.checkpoints import open_checkpoint
from engine.config import EngineConfig, ModelConfig
from engine.loader import load_weights
from engine.sharding import make_mesh
from engine.weights import Weights, abstract_weights

TINY = pathlib.Path(__file__).parent.parent / "golden" / "tiny_llama"


def load(
    path: pathlib.Path, *, layers: str = "unrolled", dtype: str = "float32", tp: int = 1
) -> tuple[ModelConfig, Weights]:
    checkpoint = open_checkpoint(path)
    model = read_model(checkpoint)
    config = EngineConfig(
        slots=1, max_len=64, kv_pages=3, prefill_buckets=(16,), batch_sizes=(1,), layers=layers, dtype=dtype, tp=tp
    )
    return model, load_weights(checkpoint, model, abstract_weights(model, config, make_mesh(jax.devices()[:tp])))


def log_probs(model: ModelConfig, weights: Weights, ids: np.ndarray, dtype: type = np.float64) -> np.ndarray:
    """A decoder in numpy, one head at a time: [len, vocab]."""

    def norm(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + dtype(model.norm_eps)) * scale

    weights = jax.tree.map(lambda leaf: np.asarray(leaf, dtype), weights)
    length, head_dim = len(ids), model.head_dim
    frequency = model.rope.theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if model.rope.kind == "llama3":
        rope = model.rope
        for i, f in enumerate(frequency):
            turns = rope.original_max_position * f / (2 * np.pi)
            share = min(max((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0), 1)
            frequency[i] = share * f + (1 - share) * f / rope.factor
    angle = (np.arange(length)[:, None] * frequency).astype(dtype)

    def rotate(x):  # [len, head_dim]
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)

    x = weights.embed[ids]
    hidden_future = np.triu(np.full((length, length), -np.inf, dtype), 1)
    for group in weights.layers:
        for n in range(len(group.attention_norm)):
            h = norm(x, group.attention_norm[n])
            heads = []
            for kv in range(model.num_kv_heads):
                biases = (0,) * len(group.qkv[n, kv]) if group.qkv_bias is None else group.qkv_bias[n, kv]
                *queries, key, value = (h @ matrix.T + bias for matrix, bias in zip(group.qkv[n, kv], biases, strict=True))
                for query in queries:
                    scores = rotate(query) @ rotate(key).T / dtype(head_dim**0.5) + hidden_future
                    scores = np.exp(scores - scores.max(-1, keepdims=True))
                    heads.append(scores / scores.sum(-1, keepdims=True) @ value)
            x = x + np.concatenate(heads, -1) @ group.o[n].T + (0 if group.o_bias is None else group.o_bias[n])
            h = norm(x, group.mlp_norm[n])
            gate, up = h @ group.gate_up[n, 0].T, h @ group.gate_up[n, 1].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ group.down[n].T
    logits = norm(x, weights.final_norm) @ (weights.embed if weights.head is None else weights.head).T
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def changed(folder: pathlib.Path, change) -> pathlib.Path:
    """A copy of the tiny Llama with its config and tensors changed."""
    config, tensors = json.loads((TINY / "config.json").read_text()), load_file(TINY / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
