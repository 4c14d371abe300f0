"""A Llama checkpoint whose answers are known, for tests that need exact expected tokens and log-probs.

With attention and MLP silenced (``o_proj = down_proj = 0``), ``embed_tokens = I`` and norm weights of 1, the final norm
sees the one-hot vector of the last token and scales it by ``s = 1 / sqrt(1 / hidden + eps)``. An untied head
``lm_head[j, i] = log P(j | i) / s`` then makes the next token's log-probabilities exactly ``log P(j | last token)``. A
``P`` with one successor per token scripts any text; a spread ``P`` gives log-probs that can be looked up.

The tokenizer is byte-level, as `server.text.tokenizers.ByteTokenizer` has it, but comes as a tokenizer.json: ids 0-255 are
bytes, 256 BOS, 257 EOS, 258 EOT. The model's vocabulary is larger than that. Needs numpy and safetensors only.
"""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from safetensors.numpy import save_file

BOS, EOS, EOT = 256, 257, 258
TOKENS = 259  # of the tokenizer
VOCAB = 264  # of the model
EPS = 1e-5
NEVER = 1e-30  # stands for a probability of 0, whose log a checkpoint cannot hold


def chain(successors: Mapping[int, int], *, vocab: int = VOCAB, otherwise: int = EOS) -> np.ndarray:
    """A ``P`` in which every token has one successor. ``P[i, j]`` is the probability of j after i."""
    matrix = np.zeros((vocab, vocab))
    for token in range(vocab):
        matrix[token, successors.get(token, otherwise)] = 1.0
    return matrix


def script(prompt_end: int, answer: Sequence[int], *, vocab: int = VOCAB) -> np.ndarray:
    """A ``P`` that answers a prompt ending in one token with ``answer``, then EOS. No token may occur twice on the
    way.
    """
    path = [prompt_end, *answer, EOS]
    if len(set(path)) != len(path):
        raise ValueError(f"a token occurs twice on the way, so that its successor is not defined: {path}")
    return chain(dict(itertools.pairwise(path)), vocab=vocab)


def spread(seed: int, *, vocab: int = VOCAB, scale: float = 2.0) -> np.ndarray:
    """A ``P`` of random log-probs with standard deviation ``scale``."""
    logits = np.random.default_rng(seed).normal(0.0, scale, (vocab, vocab))
    weights = np.exp(logits)
    return weights / weights.sum(axis=1, keepdims=True)


def make(
    directory: pathlib.Path, probabilities: np.ndarray, *, layers: int = 2, max_position: int = 512
) -> pathlib.Path:
    """Writes the checkpoint of ``P`` [vocab, vocab] (rows sum to 1) in Hugging Face's layout, float32; returns the
    directory.
    """
    vocab, hidden, ffn, heads, kv_heads, head_dim = len(probabilities), len(probabilities), 16, 2, 1, 8
    scale = 1.0 / np.sqrt(1.0 / hidden + EPS)
    zeros = np.zeros
    tensors = {
        "model.embed_tokens.weight": np.eye(vocab, hidden),
        "model.norm.weight": np.ones(hidden),
        "lm_head.weight": np.log(np.maximum(probabilities, NEVER)).T / scale,
    }
    noise = np.random.default_rng(0)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": np.ones(hidden),
            prefix + "post_attention_layernorm.weight": np.ones(hidden),
            prefix + "self_attn.q_proj.weight": noise.normal(size=(heads * head_dim, hidden)),
            prefix + "self_attn.k_proj.weight": noise.normal(size=(kv_heads * head_dim, hidden)),
            prefix + "self_attn.v_proj.weight": noise.normal(size=(kv_heads * head_dim, hidden)),
            prefix + "self_attn.o_proj.weight": zeros((hidden, heads * head_dim)),
            prefix + "mlp.gate_proj.weight": noise.normal(size=(ffn, hidden)),
            prefix + "mlp.up_proj.weight": noise.normal(size=(ffn, hidden)),
            prefix + "mlp.down_proj.weight": zeros((hidden, ffn)),
        }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_position,
        "rms_norm_eps": EPS,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "dtype": "float32",
    }
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    # The order of bytes in memory is what is written, so a transposed view must be copied first.
    save_file(
        {name: np.ascontiguousarray(array, np.float32) for name, array in tensors.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(directory)
    return directory


def write_tokenizer(directory: pathlib.Path) -> None:
    """The byte-level tokenizer's files."""
    alphabet = byte_alphabet()
    added = {BOS: "<|bos|>", EOS: "<|eos|>", EOT: "<|eot|>"}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": id,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for id, content in added.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": added[BOS], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {added[BOS]: {"id": added[BOS], "ids": [BOS], "tokens": [added[BOS]]}},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE",
            "vocab": {alphabet[byte]: byte for byte in range(256)},
            "merges": [],
        },
    }
    template = (
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '<|eot|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": added[BOS],
        "eos_token": added[EOS],
        "chat_template": template,
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=1))
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": [EOS, EOT]}))


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level BPE: itself where it is printable, else the next one from
    U+0100.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    characters, spare = [], 0x100
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(spare))
            spare += 1
    return characters
