"""One file of float32 weights that every peer reads: GGUF.

``python -m benchmarks.f32_gguf SOURCE TARGET``: ``SOURCE`` is a GGUF file, whose tensors are dequantized one by one and
written with the same metadata (so they keep the order of rows that GGUF wants), or a name of
``benchmarks.bare_engine.SHAPES``, of which a model with random weights is made. Its tokenizer knows bytes and names for
all other ids.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

from benchmarks.bare_engine import SHAPES
from engine.config import ModelConfig

_OWN_KEYS = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")  # the writer's


def convert(source: Path, target: Path) -> None:
    """Dequantizes a GGUF file."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith(_OWN_KEYS):
            kind = field.types[0]
            element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type=element)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        writer.add_tensor(tensor.name, values)
    _write(writer)


def make_random(model: ModelConfig, target: Path, seed: int = 0) -> None:
    """A Llama with random weights."""
    draw = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(model.max_position)
    writer.add_embedding_length(model.hidden_size)
    writer.add_block_count(model.num_layers)
    writer.add_feed_forward_length(model.intermediate_size)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.num_kv_heads)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_rope_freq_base(model.rope.theta)
    writer.add_layer_norm_rms_eps(model.norm_eps)
    writer.add_vocab_size(model.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_tokenizer(writer, model.vocab_size)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, draw.standard_normal(shape, np.float32) * np.float32(0.02))

    def add_norm(name: str) -> None:
        writer.add_tensor(name, np.ones(model.hidden_size, np.float32))

    hidden, ffn = model.hidden_size, model.intermediate_size
    add("token_embd.weight", model.vocab_size, hidden)
    add_norm("output_norm.weight")
    if not model.tie_embeddings:
        add("output.weight", model.vocab_size, hidden)
    for layer in range(model.num_layers):
        block = f"blk.{layer}"
        add_norm(f"{block}.attn_norm.weight")
        add_norm(f"{block}.ffn_norm.weight")
        add(f"{block}.attn_q.weight", model.num_heads * model.head_dim, hidden)
        add(f"{block}.attn_k.weight", model.num_kv_heads * model.head_dim, hidden)
        add(f"{block}.attn_v.weight", model.num_kv_heads * model.head_dim, hidden)
        add(f"{block}.attn_output.weight", hidden, model.num_heads * model.head_dim)
        add(f"{block}.ffn_gate.weight", ffn, hidden)
        add(f"{block}.ffn_up.weight", ffn, hidden)
        add(f"{block}.ffn_down.weight", hidden, ffn)
    _write(writer)


def _add_tokenizer(writer: gguf.GGUFWriter, vocab: int) -> None:
    """Byte-level, as GPT-2 spells bytes: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}
    tokens = ["<pad>", "<s>", "</s>", *(spelled[byte] for byte in range(256)), "ab"]
    tokens += [f"t{number}t" for number in range(len(tokens), vocab)]
    types = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (vocab - 3)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["a b"])  # readers want one
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(source: str, target: Path) -> None:
    """Writes the file that a name or path stands for."""
    if source in SHAPES:
        make_random(SHAPES[source], target)
    elif source.endswith(".gguf"):
        convert(Path(source), target)
    else:
        raise SystemExit(f"{source}: give a .gguf file or one of {', '.join(SHAPES)}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("target", type=Path)
    parsed = parser.parse_args(arguments)
    write(parsed.source, parsed.target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
