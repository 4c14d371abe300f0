"""Safetensors checkpoints: what is read, and every way a download can be broken."""

import json
import pathlib

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.checkpoints import CheckpointError, open_checkpoint

CONFIG = {"architectures": ["LlamaForCausalLM"]}


def write(
    folder: pathlib.Path, shards: dict[str, dict[str, np.ndarray]], *, index: dict[str, str] | None = None
) -> pathlib.Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = (np.arange(4) / 8).astype(ml_dtypes.bfloat16)
SHARDS = {"model-00001-of-00002.safetensors": {"a": A}, "model-00002-of-00002.safetensors": {"b": B}}
INDEX = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}


def raises(folder: pathlib.Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "shards, index", [({"model.safetensors": {"a": A, "b": B}}, None), (SHARDS, INDEX), (SHARDS, None)]
)
def test_reads_one_file_or_shards(tmp_path, shards, index):
    checkpoint = open_checkpoint(write(tmp_path, shards, index=index))
    assert checkpoint.hf_config == CONFIG
    assert checkpoint.names() == ["a", "b"]
    assert checkpoint.shape("a") == (2, 3)
    np.testing.assert_array_equal(checkpoint.read("a"), A)
    assert checkpoint.read("b").dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(checkpoint.read("b").view(np.uint16), B.view(np.uint16))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_reads_float_types(tmp_path, dtype):
    checkpoint = open_checkpoint(write(tmp_path, {"model.safetensors": {"a": A.astype(dtype)}}))
    np.testing.assert_array_equal(checkpoint.read("a"), A.astype(dtype))


def test_ignores_other_files_beside_a_single_one(tmp_path):
    write(tmp_path, {"model.safetensors": {"a": A}, "adapter.safetensors": {"a": A, "z": B}})
    assert open_checkpoint(tmp_path).names() == ["a"]


def test_missing_shard_is_named(tmp_path):
    write(tmp_path, SHARDS, index=INDEX)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    raises(tmp_path, "model-00002-of-00002.safetensors is missing", "tensor b")


def test_shard_without_a_promised_tensor(tmp_path):
    write(tmp_path, {**SHARDS, "model-00002-of-00002.safetensors": {"c": B}}, index=INDEX)
    raises(tmp_path, "places tensor b in model-00002-of-00002.safetensors", "no shard has it")


def test_index_that_points_to_another_shard(tmp_path):
    write(
        tmp_path,
        SHARDS,
        index={**INDEX, "a": "model-00002-of-00002.safetensors", "x": "model-00001-of-00002.safetensors"},
    )
    raises(tmp_path, "tensor a", "it is in model-00001-of-00002.safetensors")


def test_index_outside_the_directory(tmp_path):
    write(tmp_path, SHARDS, index={**INDEX, "a": "../model.safetensors"})
    raises(tmp_path, "outside")


def test_tensor_in_two_shards(tmp_path):
    write(tmp_path, {"x.safetensors": {"a": A}, "y.safetensors": {"a": A}})
    raises(tmp_path, "tensor a is in both", "x.safetensors", "y.safetensors")


@pytest.mark.parametrize(
    "keep, message", [(4, "no safetensors header"), (20, "its header takes"), (-1, "truncated: tensor")]
)
def test_truncated_file(tmp_path, keep, message):
    file = write(tmp_path, {"model.safetensors": {"a": A}}) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    raises(tmp_path, str(file), message)


def header(tensors: dict, body: int) -> bytes:
    data = json.dumps(tensors).encode()
    return len(data).to_bytes(8, "little") + data + bytes(body)


@pytest.mark.parametrize(
    "entry, message",
    [
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, "has 8 bytes where shape [3] of F32 needs 12"),
        ({"dtype": "F31", "shape": [2], "data_offsets": [0, 8]}, "dtype F31"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}, "shape [-2]"),
        ({"dtype": "F32", "shape": [2]}, "damaged"),
        (7, "damaged"),
    ],
)
def test_damaged_header(tmp_path, entry, message):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(header({"a": entry}, 8))
    raises(tmp_path, "model.safetensors", message)


def test_not_a_safetensors_file(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"<!DOCTYPE html><html>404</html>")
    raises(tmp_path, "not a safetensors file")


def test_integer_weights_are_refused_when_read(tmp_path):
    write(tmp_path, {"model.safetensors": {"a": np.zeros(3, np.int8)}})
    with pytest.raises(CheckpointError, match="tensor a has dtype I8"):
        open_checkpoint(tmp_path).read("a")


def test_config_missing_or_broken(tmp_path):
    write(tmp_path, {"model.safetensors": {"a": A}})
    (tmp_path / "config.json").write_text("{")
    raises(tmp_path, "config.json is not valid JSON")
    (tmp_path / "config.json").write_text("[]")
    raises(tmp_path, "config.json holds list")
    (tmp_path / "config.json").unlink()
    raises(tmp_path, "config.json does not exist")


def test_directory_without_weights_and_other_paths(tmp_path):
    raises(write(tmp_path, {}), "no *.safetensors file")
    raises(tmp_path / "nothing", "does not exist")
    raises(tmp_path / "nothing.gguf", "does not exist")
    raises(tmp_path / "config.json", "neither a directory nor a .gguf file")
