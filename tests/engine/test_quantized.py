"""Quantized checkpoints against their definition, value by value."""

import json
import pathlib
import struct

import ml_dtypes
import numpy as np
import pytest

from engine.checkpoints import CheckpointError, open_checkpoint
from engine.config import ConfigError
from engine.families import load_config

DTYPES = {
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(ml_dtypes.float8_e5m2): "F8_E5M2",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.float32): "F32",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
}
RNG = np.random.default_rng(0)
NAME = "model.layers.0.mlp.up_proj.weight"


def write(folder: pathlib.Path, quantization: dict, tensors: dict[str, np.ndarray]) -> pathlib.Path:
    """A checkpoint, its safetensors written by hand."""
    header, body = {}, b""
    for name, array in tensors.items():
        data = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": DTYPES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": quantization}))
    return folder


def read(folder, quantization, tensors, name=NAME):
    checkpoint = open_checkpoint(write(folder, quantization, tensors))
    assert "quantization_config" not in checkpoint.hf_config
    assert checkpoint.names() == [name] and checkpoint.file(name) == folder / "model.safetensors"
    values = checkpoint.read(name)
    assert values.shape == checkpoint.shape(name) and values.dtype == np.float32
    return values


def test_fp8_in_blocks(tmp_path):
    weight = RNG.normal(size=(200, 300)).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    scale = RNG.uniform(0.5, 2, size=(2, 3)).astype(np.float32)
    found = read(
        tmp_path, {"quant_method": "fp8", "weight_block_size": [128, 128]}, {NAME: weight, NAME + "_scale_inv": scale}
    )
    for row, column in [(0, 0), (127, 128), (128, 127), (199, 299), (130, 256)]:
        assert found[row, column] == float(weight[row, column]) * scale[row // 128, column // 128]


@pytest.mark.parametrize("shape", [(), (1,), (6,), (6, 1), (1, 1), (6, 4)])
@pytest.mark.parametrize("kind", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8])
def test_one_scale_one_per_row_or_one_per_group(tmp_path, shape, kind):
    weight = (RNG.normal(size=(6, 8)) * 10).astype(np.float32).astype(kind)
    scale = RNG.uniform(0.5, 2, size=shape).astype(np.float32).astype(ml_dtypes.bfloat16)
    group = {"weights": {"num_bits": 8}, "format": None}
    config = {"quant_method": "compressed-tensors", "format": "naive-quantized", "config_groups": {"group_0": group}}
    extra = {NAME.replace("weight", "input_scale"): np.ones(1, np.float32)}
    found = read(tmp_path, config, {NAME: weight, NAME + "_scale": scale, **extra})
    for row in range(6):
        for column in range(8):
            wide = scale.astype(np.float32)
            one = (
                wide.item()
                if wide.size == 1
                else wide[row]
                if wide.ndim == 1
                else wide[row, column * wide.shape[1] // 8]
            )
            assert found[row, column] == float(weight[row, column]) * np.float32(one)


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_integers(tmp_path, bits):
    """``compressed-tensors`` packs from the lowest bits up; codes are shifted by half their range."""
    codes = RNG.integers(-(1 << bits - 1), 1 << bits - 1, size=(3, 20))
    words = np.zeros((3, -(-20 * bits // 32)), np.uint32)
    for row in range(3):
        for column, code in enumerate(codes[row]):
            words[row, column * bits // 32] |= np.uint32((int(code) + (1 << bits - 1)) << column * bits % 32)
    scale = RNG.uniform(0.5, 2, size=(3, 5)).astype(np.float32)
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": bits}}},
    }
    parts = {"_packed": words.view(np.int32), "_scale": scale, "_shape": np.array([3, 20], np.int64)}
    found = read(tmp_path, config, {NAME + part: array for part, array in parts.items()})
    np.testing.assert_array_equal(found, codes.astype(np.float32) * np.repeat(scale, 4, axis=1))


def test_mxfp4(tmp_path):
    """E2M1 by its bits: sign, exponent with bias 1, one bit of mantissa; the first value in the low half of a byte."""

    def e2m1(code):
        sign, exponent, mantissa = -1 if code & 8 else 1, code >> 1 & 3, code & 1
        return sign * (mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1))

    name = "model.layers.0.mlp.experts.down_proj"
    blocks = RNG.integers(0, 256, size=(2, 3, 2, 16), dtype=np.uint8)
    scales = RNG.integers(120, 134, size=(2, 3, 2), dtype=np.uint8)
    found = read(tmp_path, {"quant_method": "mxfp4"}, {name + "_blocks": blocks, name + "_scales": scales}, name)
    assert found.shape == (2, 64, 3)
    for expert, row, column in np.ndindex(2, 3, 64):
        byte = int(blocks[expert, row, column // 32, column % 32 // 2])
        code = byte >> 4 if column % 2 else byte & 15
        assert found[expert, column, row] == e2m1(code) * 2.0 ** (int(scales[expert, row, column // 32]) - 127)


def test_what_is_not_quantized_stays(tmp_path):
    norm = np.ones(4, ml_dtypes.bfloat16)
    checkpoint = open_checkpoint(write(tmp_path, {"quant_method": "fp8"}, {"model.norm.weight": norm}))
    assert checkpoint.read("model.norm.weight").dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", None])
def test_other_methods_are_refused_by_name(tmp_path, method):
    with pytest.raises(CheckpointError, match=f"config.json.*{method}.*served are compressed-tensors, fp8, "):
        open_checkpoint(write(tmp_path, {"quant_method": method}, {NAME: np.ones((2, 2), np.int8)}))
    with pytest.raises(ConfigError, match=f"quantization_config.*{method}"):
        load_config({"model_type": "llama", "quantization_config": {"quant_method": method}})


PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"0": {"weights": {"num_bits": 3}}},
}


@pytest.mark.parametrize(
    ("quantization", "tensors", "part"),
    [
        ({"quant_method": "fp8"}, {NAME: np.ones((2, 2), ml_dtypes.float8_e4m3fn)}, "F8_E4M3"),  # its scale is missing
        (
            {"quant_method": "fp8", "weight_block_size": [2, 2]},
            {NAME: np.ones((4, 4), ml_dtypes.float8_e4m3fn), NAME + "_scale_inv": np.ones((2, 1), np.float32)},
            r"_scale_inv has shape \[2, 1\]",
        ),
        (
            {"quant_method": "fp8"},
            {NAME: np.ones((4, 4), np.int8), NAME + "_scale": np.ones((3, 1), np.float32)},
            r"_scale has shape",
        ),
        (PACKED, {NAME: np.ones((2, 2), np.int8)}, "num_bits"),
        ({**PACKED, "config_groups": ["weights"]}, {NAME: np.ones((2, 2), np.int8)}, "config_groups"),
        ({**PACKED, "config_groups": {"0": {}}}, {NAME: np.ones((2, 2), np.int8)}, "num_bits"),
        ({"quant_method": "fp8", "weight_block_size": 128}, {NAME: np.ones((2, 2), np.int8)}, "weight_block_size is 128"),
        ({**PACKED, "format": "marlin-24"}, {NAME: np.ones((2, 2), np.int8)}, "marlin-24"),
        (
            {"quant_method": "compressed-tensors"},
            {NAME: np.ones((2, 2), np.int8), NAME + "_zero_point": np.ones((2, 1), np.int8)},
            "asymmetric",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "naive-quantized", "config_groups": {"0": {"weights": {"num_bits": 8}}}},
            {NAME + "_packed": np.ones((2, 2), np.int32), NAME + "_scale": np.ones((2, 1), np.float32)},
            "weight_packed is packed, which no group",
        ),
        (
            {**PACKED, "config_groups": {"0": {"weights": {"num_bits": 4}}}},
            {NAME + "_packed": np.ones((2, 2), np.int32)},
            "weight_packed has no .*weight_scale",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, quantization, tensors, part):
    with pytest.raises(CheckpointError, match=part):
        open_checkpoint(write(tmp_path, quantization, tensors)).read(NAME)
