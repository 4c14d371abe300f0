"""Listing and pruning the warmup cache, on folders made by hand."""

import json
import os

import pytest

from tests.warmup import toy
from warmup.cache import list_cache, prune
from warmup.trust import Untrusted


def folder(root, name: str, size: int, used: float):
    path = root / "programs" / name
    path.mkdir(parents=True, mode=0o700)
    (path / "x-1.bin").write_bytes(b"x" * size)
    os.utime(path, (used, used))
    return path


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "cache"
    root.mkdir(mode=0o700)
    return root


@pytest.mark.slow
def test_the_list_tells_what_each_folder_is_for(root):
    toy.warm("aot", root)
    (item,) = list_cache(root)
    assert item.programs == 7 and "toy 1 layers" in item.label and "slots 2" in item.label
    assert item.size == sum(path.stat().st_size for path in item.path.iterdir())


def test_the_list_goes_on_over_what_it_cannot_read(root):
    folder(root, "a", 10, 100)
    newer = folder(root, "b", 20, 200)
    (newer / "fingerprint.json").write_bytes(b"\xff garbage")
    items = list_cache(root)
    assert [item.path.name for item in items] == ["b", "a"]
    assert all("unreadable" in item.label for item in items)


def test_the_least_recently_used_go_first(root):
    for name, used in (("a", 300), ("b", 100), ("c", 200)):
        folder(root, name, 1000, used)
    assert [item.path.name for item in prune(root, 2000, now=0)] == ["b"]
    assert [item.path.name for item in prune(root, 2000, now=0)] == []
    assert [item.path.name for item in prune(root, 0, now=0, keep=root / "programs" / "c")] == ["a"]
    assert [path.name for path in (root / "programs").iterdir()] == ["c"]


@pytest.mark.slow
def test_a_start_that_stores_keeps_the_cache_within_its_limit(root, monkeypatch):
    toy.warm("aot", root)
    (first,) = list_cache(root)
    os.utime(first.path, (100, 100))
    monkeypatch.setattr("warmup.cache.DEFAULT_LIMIT", first.size * 3 // 2)
    toy.warm("aot", root, config=toy.engine_config(max_len=32))
    (second,) = list_cache(root)
    assert "max-len 32" in second.label


def test_each_platform_of_jax_own_cache_is_a_folder(root):
    platform = root / "xla" / "here"
    platform.mkdir(parents=True, mode=0o700)
    (platform / "jit_f-0-cache").write_bytes(b"x" * 500)
    (item,) = list_cache(root)
    assert (item.path, item.programs, item.size) == (platform, 1, 500)
    assert prune(root, 100, keep=platform) == []
    assert prune(root, 100) == [item]
    assert not platform.exists()


def test_entries_of_an_earlier_version_are_swept_after_an_hour(root):
    (root / "xla").mkdir(mode=0o700)
    old = root / "xla" / "jit_f-0-cache"
    old.write_bytes(b"x" * 500)
    os.utime(old, (1000, 1000))
    prune(root, 10**9, now=1000 + 3599)
    assert old.exists()
    prune(root, 10**9, now=1000 + 3601)
    assert not old.exists()


def test_what_killed_processes_left_is_swept_after_an_hour(root):
    path = folder(root, "a", 10, 100)
    named, orphan, temporary = path / "n-1.bin", path / "x-1.bin", path / ".tmp-1-x"
    named.write_bytes(b"n")
    temporary.write_bytes(b"t")
    manifest = {
        "format": 2,
        "fingerprint": "a",
        "resolved": {},
        "proof": None,
        "entries": {"n": {"file": "n-1.bin", "checksum": "", "size": 1, "arguments": ""}},
    }
    (path / "manifest.json").write_text(json.dumps(manifest))
    for file in (named, orphan, temporary):
        os.utime(file, (1000, 1000))
    prune(root, 10**9, now=1000 + 3599)
    assert orphan.exists() and temporary.exists()
    prune(root, 10**9, now=1000 + 3601)
    assert not orphan.exists() and not temporary.exists() and named.exists()


def test_a_cache_that_others_can_write_is_left_alone(root):
    path = folder(root, "a", 10, 100)
    root.chmod(0o777)
    with pytest.raises(Untrusted):
        prune(root, 0)
    assert path.exists()
    root.chmod(0o700)
