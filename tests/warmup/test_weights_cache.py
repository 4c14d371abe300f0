"""Converted weights: what the second load takes from the cache is what the first made, and every fault makes them again."""

import json
import logging
import os
import pathlib
import shutil

import jax
import numpy as np
import pytest

from engine.checkpoints import open_checkpoint
from engine.config import EngineConfig
from engine.families import load_config
from engine.loader import load_weights
from engine.sharding import make_mesh
from engine.weights import abstract_weights
from server.start.model_files import DEFAULT_MODEL, resolve_model
from warmup import cache as warmup_cache
from warmup.weights import WeightsCache

TINY = pathlib.Path(__file__).parents[1] / "golden" / "tiny_llama"
LAYOUT = EngineConfig(slots=1, max_len=64, kv_pages=3, prefill_buckets=(16,), batch_sizes=(1,))


class Counting:
    """A checkpoint that counts what is read of it."""

    def __init__(self, checkpoint):
        self._checkpoint, self.reads = checkpoint, []

    def __getattr__(self, name):
        return getattr(self._checkpoint, name)

    def read(self, name):
        self.reads.append(name)
        return self._checkpoint.read(name)


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(TINY, tmp_path / "model")


def load(folder, root, *, dtype="float32", worth=0):
    checkpoint = Counting(open_checkpoint(folder))
    model = load_config(checkpoint.hf_config)
    layout = EngineConfig(**{**vars(LAYOUT), "dtype": dtype})
    abstract = abstract_weights(model, layout, make_mesh(jax.devices()[:1]))
    files = sorted({checkpoint.file(name) for name in checkpoint.names()})
    cache = WeightsCache(root, files, model, abstract, worth=worth)
    return load_weights(checkpoint, model, abstract, cache=cache), checkpoint.reads


def stored(root):
    (folder,) = (root / "weights").iterdir()
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_second_load_reads_nothing_of_the_checkpoint(folder, tmp_path, dtype):
    root = tmp_path / "cache"
    first, reads = load(folder, root, dtype=dtype)
    assert reads
    again, reads = load(folder, root, dtype=dtype)
    assert reads == []
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        assert one.dtype == other.dtype == dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    assert stored(root).stat().st_mode & 0o777 == 0o700
    (item,) = warmup_cache.list_cache(root)
    assert item.label == "converted weights" and item.size > sum(leaf.nbytes for leaf in jax.tree.leaves(first))
    assert warmup_cache.prune(root, 0) == [item] and not (root / "weights" / item.path.name).exists()


def test_small_models_and_no_cache_store_nothing(folder, tmp_path):
    load(folder, tmp_path / "cache", worth=10**9)
    load(folder, None)
    assert not (tmp_path / "cache").exists()


def test_weights_that_the_next_prune_would_remove_are_not_stored(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("warmup.weights.LARGEST", 1000)
    load(folder, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_another_checkpoint_another_dtype_another_key(folder, tmp_path):
    root = tmp_path / "cache"
    load(folder, root)
    _, reads = load(folder, root, dtype="bfloat16")
    assert reads
    file = next(folder.glob("*.safetensors"))
    os.utime(file, ns=(1, 1))  # written again
    _, reads = load(folder, root)
    assert reads and len(list((root / "weights").iterdir())) == 3


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def folder_in_its_place(path):
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("x")


def pipe_in_its_place(path):
    path.unlink()
    os.mkfifo(path)


def archive_in_its_place(path):
    with path.open("wb") as file:
        np.savez(file, np.zeros(3))


def exchange_keys(path):
    """A manifest that another checkpoint's folder would have."""
    path.write_text(path.read_text().replace(path.parent.name, "0" * 20))


ARRAY_FAULTS = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-10]),
    "truncated in its header": lambda path: path.write_bytes(path.read_bytes()[:20]),
    "empty": lambda path: path.write_bytes(b""),
    "one bit": flip,
    "missing": lambda path: path.unlink(),
    "of another shape": lambda path: np.save(path, np.zeros(3, np.float32)),
    "of odd bytes": lambda path: np.save(path, np.zeros(3, np.int8)),
    "a pickle": lambda path: np.save(path, np.array([{}]), allow_pickle=True),
    "an archive": archive_in_its_place,
    "garbage": lambda path: path.write_bytes(path.read_bytes()[:10] + b"{" * 1000),
    "writable by all": lambda path: path.chmod(0o666),
    "a folder": folder_in_its_place,
    "a pipe": pipe_in_its_place,
}


@pytest.mark.parametrize("fault", ARRAY_FAULTS)
def test_a_faulty_array_is_converted_again_and_replaced(folder, tmp_path, fault, caplog):
    root = tmp_path / "cache"
    first, _ = load(folder, root)
    ARRAY_FAULTS[fault](stored(root) / "0.npy")  # the embedding
    with caplog.at_level(logging.WARNING):
        again, reads = load(folder, root)
    assert reads == ["model.embed_tokens.weight"]
    (line,) = caplog.messages
    assert "converting array 0 again" in line and "0.npy" in line
    third, reads = load(folder, root)
    assert reads == [] and len(caplog.messages) == 1
    for one, other, last in zip(*map(jax.tree.leaves, (first, again, third)), strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, last)


def test_exchanged_arrays_are_converted_again(folder, tmp_path, caplog):
    """Of one shape and type, so that only their content tells."""
    root = tmp_path / "cache"
    first, _ = load(folder, root)
    arrays = json.loads((stored(root) / "manifest.json").read_text())["arrays"]
    one, other = next(
        (arrays[a]["file"], arrays[b]["file"])
        for a in arrays
        for b in arrays
        if a < b and arrays[a]["shape"] == arrays[b]["shape"] and arrays[a]["checksum"] != arrays[b]["checksum"]
    )
    (stored(root) / one).rename(stored(root) / "kept")
    (stored(root) / other).rename(stored(root) / one)
    (stored(root) / "kept").rename(stored(root) / other)
    again, _ = load(folder, root)
    assert len(caplog.messages) == 2 and {one, other} == {name for name in (one, other) if name in caplog.text}
    for array, same in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(array, same)


MANIFEST_FAULTS = {
    "no JSON": lambda path: path.write_text("{"),
    "too deep": lambda path: path.write_text("[" * 100_000),
    "no object": lambda path: path.write_text("[]"),
    "no arrays": lambda path: path.write_text(json.dumps({"key": path.parent.name})),
    "other arrays": lambda path: path.write_text(
        json.dumps({"key": path.parent.name, "arrays": {"0": {"dtype": "float32", "shape": [1], "checksum": 1}}})
    ),
    "of another checkpoint": exchange_keys,
    "a folder": folder_in_its_place,
}


@pytest.mark.parametrize("fault", MANIFEST_FAULTS)
def test_a_faulty_manifest_converts_all_again_and_is_replaced(folder, tmp_path, fault, caplog):
    root = tmp_path / "cache"
    load(folder, root)
    MANIFEST_FAULTS[fault](stored(root) / "manifest.json")
    with caplog.at_level(logging.WARNING):
        _, reads = load(folder, root)
    assert reads and len(caplog.messages) == 1 and "converting all arrays again" in caplog.messages[0]
    _, reads = load(folder, root)
    assert reads == [] and len(caplog.messages) == 1


def test_a_folder_that_others_can_write_is_not_used(folder, tmp_path, caplog):
    root = tmp_path / "cache"
    load(folder, root)
    stored(root).chmod(0o777)
    _, reads = load(folder, root)
    assert reads and "can be written by others" in caplog.text


def test_a_start_that_dies_half_way_leaves_nothing_that_counts(folder, tmp_path):
    """Arrays without a manifest, as a killed process leaves them, are written again."""
    root = tmp_path / "cache"
    load(folder, root)
    (stored(root) / "manifest.json").unlink()
    _, reads = load(folder, root)
    assert reads and (stored(root) / "manifest.json").exists()


def test_a_full_disk_is_one_line(folder, tmp_path, monkeypatch, caplog):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("warmup.weights.np.save", full)
    weights, _ = load(folder, tmp_path / "cache")
    assert weights.embed is not None
    assert len(caplog.messages) == 1 and "No space left on device" in caplog.messages[0]
    assert [path.name for path in stored(tmp_path / "cache").iterdir()] == []


def test_what_dequantizes_says_so(folder):
    assert not open_checkpoint(folder).dequantizes
    assert open_checkpoint(resolve_model(DEFAULT_MODEL)).dequantizes
