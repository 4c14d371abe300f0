"""A Llama checkpoint of random numbers in any shape, and its greedy tokens by numpy."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

import numpy as np
from safetensors.numpy import load_file, save_file


def random_llama(
    folder: pathlib.Path, heads: int, kv_heads: int, *, hidden=32, ffn=64, vocab=160, layers=2, head_dim=8
) -> pathlib.Path:
    """Writes it; its best tokens are far ahead of the second-best."""
    rng = np.random.default_rng(heads * 100 + kv_heads)
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (heads * head_dim, hidden),
            prefix + "self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
            prefix + "self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, heads * head_dim),
            prefix + "mlp.gate_proj.weight": (ffn, hidden),
            prefix + "mlp.up_proj.weight": (ffn, hidden),
            prefix + "mlp.down_proj.weight": (hidden, ffn),
        }
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    tensors |= {name: value / 4 for name, value in tensors.items() if "self_attn" in name}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": hidden,
        "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def greedy_tokens(folder: pathlib.Path, prompt: Sequence[int], steps: int) -> tuple[list[int], float]:
    """The tokens, the whole sequence computed anew for each; and the least lead over a second-best one."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    heads, kv_heads, head_dim = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * tensors[name]

    def rotated(x):  # [tokens, heads, head_dim]
        angles = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
        cos, sin, (a, b) = np.cos(angles)[:, None], np.sin(angles)[:, None], np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    tokens, leads = list(prompt), []
    for _ in range(steps):
        x, count = tensors["model.embed_tokens.weight"][tokens], len(tokens)
        for layer in range(config["num_hidden_layers"]):
            name = f"model.layers.{layer}.{{}}.weight".format
            normed = norm(x, name("input_layernorm"))
            q, k, v = (
                (normed @ tensors[name(f"self_attn.{part}_proj")].T).reshape(count, -1, head_dim) for part in ("q", "k", "v")
            )
            q, k, v = rotated(q), *(part.repeat(heads // kv_heads, axis=1) for part in (rotated(k), v))
            scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(head_dim)
            weights = np.exp(np.where(np.tri(count), scores, -np.inf) - scores.max(-1, keepdims=True))
            attended = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(count, -1)
            x = x + attended @ tensors[name("self_attn.o_proj")].T
            normed = norm(x, name("post_attention_layernorm"))
            gate, up = (normed @ tensors[name(f"mlp.{part}_proj")].T for part in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ tensors[name("mlp.down_proj")].T
        best = np.sort(logits := tensors["lm_head.weight"] @ norm(x, "model.norm.weight")[-1])
        leads.append(best[-1] - best[-2])
        tokens.append(int(np.argmax(logits)))
    return tokens[len(prompt) :], min(leads)
