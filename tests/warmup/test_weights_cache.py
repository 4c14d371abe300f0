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
from server.models import DEFAULT_MODEL, resolve_model
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


ARRAY_FAULTS = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-10]),
    "one bit": flip,
    "missing": lambda path: path.unlink(),
    "of another shape": lambda path: np.save(path, np.zeros(3, np.float32)),
    "a pickle": lambda path: np.save(path, np.array([{}]), allow_pickle=True),
    "writable by all": lambda path: path.chmod(0o666),
}


@pytest.mark.parametrize("fault", ARRAY_FAULTS)
def test_a_faulty_array_is_converted_again(folder, tmp_path, fault, caplog):
    root = tmp_path / "cache"
    first, _ = load(folder, root)
    ARRAY_FAULTS[fault](stored(root) / "0.npy")  # the embedding
    with caplog.at_level(logging.WARNING):
        again, reads = load(folder, root)
    assert reads == ["model.embed_tokens.weight"]
    (line,) = caplog.messages
    assert "converting array 0 again" in line
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)


MANIFEST_FAULTS = {
    "no JSON": "{",
    "no arrays": "{}",
    "other arrays": json.dumps({"arrays": {"0": {"dtype": "float32", "shape": [1], "checksum": 1}}}),
}


@pytest.mark.parametrize("fault", MANIFEST_FAULTS)
def test_a_faulty_manifest_is_not_used(folder, tmp_path, fault, caplog):
    root = tmp_path / "cache"
    load(folder, root)
    (stored(root) / "manifest.json").write_text(MANIFEST_FAULTS[fault])
    with caplog.at_level(logging.WARNING):
        _, reads = load(folder, root)
    assert reads and len(caplog.messages) == 1 and "is not used" in caplog.messages[0]


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
