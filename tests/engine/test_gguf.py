"""GGUF checkpoints, written by the ``gguf`` package and as the converters do it."""

import pathlib
import re

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import quants

from engine.agreement import read_model
from engine.checkpoints import CheckpointError, open_checkpoint
from engine.checkpoints.gguf_blocks import BLOCK_TYPES
from engine.config import ConfigError
from engine.families import load_config
from tests.engine.loader_harness import load

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, VOCAB = 4, 2, 8, 32, 64, 96


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """What Llama's converter does to query and key rows, written row by row: halves become neighbours."""
    out, dim = np.empty_like(weights), len(weights) // heads
    for head in range(heads):
        for i in range(dim // 2):
            out[head * dim + 2 * i] = weights[head * dim + i]
            out[head * dim + 2 * i + 1] = weights[head * dim + dim // 2 + i]
    return out


def hf_weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "model.layers.0.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "model.layers.0.mlp.gate_proj.weight": (FFN, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (FFN, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, FFN),
    }
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
    "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "model.layers.0.self_attn.q_proj.bias": "blk.0.attn_q.bias",
    "model.layers.0.self_attn.k_proj.bias": "blk.0.attn_k.bias",
    "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
}


def write(
    path: pathlib.Path,
    weights: dict[str, np.ndarray],
    *,
    kind: Type = Type.F32,
    architecture: str = "llama",
    blocks: int = 1,
    extra: dict[str, np.ndarray] | None = None,
    change=lambda writer: None,
) -> pathlib.Path:
    """A GGUF of these Hugging Face tensors; matrices stored as ``kind``, ``extra`` under its own names."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(blocks)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_bos_token_id(3)
    writer.add_eos_token_id(5)
    change(writer)
    for name, array in weights.items():
        if architecture == "llama" and ".q_proj." in name:
            array = permute(array, HEADS)
        elif architecture == "llama" and ".k_proj." in name:
            array = permute(array, KV_HEADS)
        if array.ndim == 1 or kind == Type.F32:
            writer.add_tensor(GGUF_NAMES[name], array)
        else:
            writer.add_tensor(GGUF_NAMES[name], quants.quantize(array, kind), raw_dtype=kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1])
def test_reads_what_was_converted(tmp_path, kind):
    weights = hf_weights()
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", weights, kind=kind))
    assert checkpoint.names() == sorted(weights)
    for name, array in weights.items():
        expected = array
        if array.ndim == 2 and kind != Type.F32:
            expected = quants.dequantize(quants.quantize(array, kind), kind)
        assert checkpoint.shape(name) == array.shape
        np.testing.assert_array_equal(checkpoint.read(name).astype(np.float32), expected, err_msg=name)
    if kind == Type.BF16:
        assert checkpoint.read("model.embed_tokens.weight").dtype == ml_dtypes.bfloat16


def test_many_blocks_are_dequantized_alike(tmp_path):
    """More blocks than one piece of the fast path holds."""
    weights = hf_weights()
    weights["model.embed_tokens.weight"] = np.random.default_rng(1).normal(size=(9001, HIDDEN)).astype(np.float32)
    assert {Type.Q8_0, Type.Q4_0, Type.Q4_1} <= BLOCK_TYPES.keys()
    for kind in BLOCK_TYPES:
        checkpoint = open_checkpoint(write(tmp_path / f"{kind.name}.gguf", weights, kind=kind))
        expected = quants.dequantize(quants.quantize(weights["model.embed_tokens.weight"], kind), kind)
        np.testing.assert_array_equal(checkpoint.read("model.embed_tokens.weight"), expected)


def test_a_type_that_nobody_unpacks_is_refused_by_name(tmp_path):
    """Q8_1 is for activations: ggml stores no weights so, and the ``gguf`` package does not read it."""
    stored = np.zeros((VOCAB, gguf.GGML_QUANT_SIZES[Type.Q8_1][1]), np.uint8)
    weights = {name: array for name, array in hf_weights().items() if "embed" not in name}
    change = lambda writer: writer.add_tensor("token_embd.weight", stored, raw_dtype=Type.Q8_1)
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", weights, change=change))
    with pytest.raises(CheckpointError, match=r"token_embd.weight has type Q8_1.*served are BF16, .*Q4_0, Q4_1, Q4_K"):
        checkpoint.read("model.embed_tokens.weight")


def test_config(tmp_path):
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", hf_weights()))
    model = load_config(checkpoint.hf_config)
    assert (model.family, model.vocab_size, model.hidden_size, model.intermediate_size) == ("llama", VOCAB, HIDDEN, FFN)
    assert (model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim) == (1, HEADS, KV_HEADS, HEAD_DIM)
    assert (model.max_position, model.norm_eps, model.rope.theta, model.rope.kind) == (256, 1e-5, 500000.0, "default")
    assert model.tie_embeddings and model.bos_token_id == 3 and model.eos_token_ids == (5,)


def test_untied_head(tmp_path):
    weights = hf_weights()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] * 2
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", weights))
    assert checkpoint.hf_config["tie_word_embeddings"] is False
    np.testing.assert_array_equal(checkpoint.read("lm_head.weight"), weights["lm_head.weight"])


def test_biases_of_queries_and_keys_are_reordered_too(tmp_path):
    weights = hf_weights()
    weights["model.layers.0.self_attn.q_proj.bias"] = np.arange(HEADS * HEAD_DIM, dtype=np.float32)
    weights["model.layers.0.self_attn.k_proj.bias"] = np.arange(KV_HEADS * HEAD_DIM, dtype=np.float32)
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", weights))
    for name in ("model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.k_proj.bias"):
        np.testing.assert_array_equal(checkpoint.read(name), weights[name])


def test_biases_are_those_that_are_there(tmp_path, caplog):
    """A GGUF does not say whether it has biases; one that is not there adds nothing, as in llama.cpp."""
    weights = hf_weights()
    values = np.arange(HEADS * HEAD_DIM, dtype=np.float32)
    weights["model.layers.0.self_attn.q_proj.bias"] = values
    _, loaded = load(write(tmp_path / "m.gguf", weights))
    qkv = np.asarray(loaded.layers[0].qkv_bias)[0]  # [kv_heads, queries_per_kv + 2, head_dim]
    np.testing.assert_array_equal(qkv[:, :-2].reshape(-1), values)
    assert not qkv[:, -2:].any() and not np.asarray(loaded.layers[0].o_bias).any()
    (said,) = [record.getMessage() for record in caplog.records]
    for part in ("k_proj.bias", "o_proj.bias", "v_proj.bias", str(tmp_path)):
        assert part in said
    output = {"blk.0.attn_output.bias": np.arange(HIDDEN, dtype=np.float32)}
    _, loaded = load(write(tmp_path / "o.gguf", hf_weights(), extra=output))
    np.testing.assert_array_equal(np.asarray(loaded.layers[0].o_bias)[0], np.arange(HIDDEN))


@pytest.mark.parametrize(
    "blocks, extra, part",
    [
        (1, "blk.1.ffn_up.weight", "model.layers.1.mlp.up_proj.weight, of layers beyond the 1"),
        (2, "blk.0.attn_v.bias", "model.layers.1.input_layernorm.weight"),
    ],
)
def test_another_number_of_layers_is_refused(tmp_path, blocks, extra, part):
    """As llama.cpp refuses tensors that it does not use, and ones that it misses."""
    path = write(tmp_path / "m.gguf", hf_weights(), blocks=blocks, extra={extra: np.zeros(16, np.float32)})
    with pytest.raises(CheckpointError, match=part) as caught:
        load(path)
    assert "num_hidden_layers" in str(caught.value) and str(path) in str(caught.value)


def test_qwen2_keeps_its_rows(tmp_path):
    weights = hf_weights()
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", weights, architecture="qwen2"))
    assert load_config(checkpoint.hf_config).family == "qwen2"
    np.testing.assert_array_equal(
        checkpoint.read("model.layers.0.self_attn.q_proj.weight"), weights["model.layers.0.self_attn.q_proj.weight"]
    )


def test_llama3_scaling_is_recovered_from_its_factors(tmp_path):
    """Divisors computed frequency by frequency, as Llama 3.1's reference code branches."""
    factor, low, high, original, head_dim = 32.0, 1.0, 4.0, 8192, HEAD_DIM
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * 500000.0 ** (i / head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    assert len(set(divisors)) == 3, "all three branches"
    extra = {"rope_freqs.weight": np.array(divisors, np.float32)}
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", hf_weights(), extra=extra))
    rope = load_config(checkpoint.hf_config).rope
    assert (rope.kind, rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position) == (
        "llama3",
        factor,
        low,
        high,
        original,
    )
    assert "rope_freqs.weight" not in checkpoint.names()


def refuses(path: pathlib.Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    for part in (str(path), *parts):
        assert part in str(caught.value)


def test_other_rope_factors_are_refused(tmp_path):
    extra = {"rope_freqs.weight": np.array([1, 2, 3, 7], np.float32)}
    refuses(write(tmp_path / "m.gguf", hf_weights(), extra=extra), "rope_freqs.weight")


@pytest.mark.parametrize(
    "key, value, part",
    [
        ("llama.attention.head_count", 0, "m.gguf: num_attention_heads is 0"),
        ("llama.block_count", 2**32 - 1, "m.gguf: num_hidden_layers is 4294967295"),
        ("llama.rope.freq_base", float("nan"), "m.gguf: rope_theta is nan"),
        ("general.alignment", 0, "m.gguf: general.alignment is 0"),
    ],
)
def test_numbers_out_of_range_are_named(tmp_path, key, value, part):
    path = write(tmp_path / "m.gguf", hf_weights(), change=lambda writer: put(writer, key, value))
    with pytest.raises((CheckpointError, ConfigError), match=re.escape(part)):
        read_model(open_checkpoint(path))


def put(writer: gguf.GGUFWriter, key: str, value) -> None:
    kind = gguf.GGUFValueType.FLOAT32 if isinstance(value, float) else gguf.GGUFValueType.UINT32
    writer.kv_data[0][key] = gguf.GGUFValue(value, kind)


def test_special_tokens_beyond_the_vocabulary_are_none(tmp_path):
    """As in llama.cpp; converters have written -1 for a token that there is not."""

    def change(writer):
        put(writer, "tokenizer.ggml.bos_token_id", 2**32 - 1)
        put(writer, "tokenizer.ggml.eos_token_id", VOCAB)

    model = read_model(open_checkpoint(write(tmp_path / "m.gguf", hf_weights(), change=change)))
    assert (model.bos_token_id, model.eos_token_ids) == (None, ())


def test_linear_scaling(tmp_path):
    def change(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    rope = load_config(open_checkpoint(write(tmp_path / "m.gguf", hf_weights(), change=change)).hf_config).rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)


@pytest.mark.parametrize(
    "change, part",
    [
        (lambda writer: writer.add_rope_dimension_count(4), "rope.dimension_count"),
        (lambda writer: writer.add_uint16("split.count", 2), "one of 2 parts"),
    ],
)
def test_what_is_not_served_is_refused(tmp_path, change, part):
    refuses(write(tmp_path / "m.gguf", hf_weights(), change=change), part)


def test_unknown_architecture_and_tensor(tmp_path):
    refuses(write(tmp_path / "a.gguf", hf_weights(), architecture="mamba"), "'mamba'")
    extra = {"blk.0.attn_q_norm.weight": np.ones(8, np.float32)}
    refuses(write(tmp_path / "b.gguf", hf_weights(), extra=extra), "blk.0.attn_q_norm.weight")


def test_damaged_files(tmp_path):
    data = write(tmp_path / "m.gguf", hf_weights()).read_bytes()
    broken = tmp_path / "broken.gguf"
    for content, part in [
        (data[:-100], "truncated: tensor"),
        (data[:200], "truncated or damaged"),
        (data[:6], "truncated or damaged"),
        (b"", "is empty"),
        (b"GGML" + data[4:], "not a GGUF file"),
        (data[:4] + b"\x09\0\0\0" + data[8:], "version 9"),
        (data[:24] + b"\xff" * 8 + data[32:], "truncated or damaged"),
    ]:
        broken.write_bytes(content)
        refuses(broken, part)


def test_missing_metadata(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refuses(tmp_path / "m.gguf", "llama.attention.head_count")
