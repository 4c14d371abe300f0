"""Converted weights on disk, so that the next start maps them instead of dequantizing, fusing and quantizing again.

Layout under the cache's root (``--warmup-cache``)::

    weights/<key>/manifest.json   the arrays: file, dtype, shape, CRC-32; written last, so a folder without it is not used
    weights/<key>/<number>.npy    one array of the weights each, whole (not sharded)

The key covers what the arrays are made from: the checkpoint's files (path, size, time of change), the model's configuration, the
abstract weights, and the source of what converts; the manifest says which key it is for. The rules of trust are those of programs
(``warmup/trust.py``). An array that is not what the manifest says is converted from the checkpoint again and replaced, and one line
says why.

On CPU the mapped pages are the weights themselves: nothing is copied, and servers of one model share them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from engine.config import ModelConfig
from warmup import trust
from warmup.cache import DEFAULT_LIMIT
from warmup.fingerprint import source_digests
from warmup.folder import Folder
from warmup.trust import Untrusted

logger = logging.getLogger(__name__)

WORTH = 2 * 2**30  # bytes: smaller models convert in a second or two, beside the programs
LARGEST = DEFAULT_LIMIT * 3 // 4  # of a larger one nothing would be left after the next prune, and each start would store it again
CHUNK = 2**24  # bytes that are checked at once


@dataclasses.dataclass(frozen=True)
class _Entry:
    file: str
    dtype: str
    shape: tuple[int, ...]
    checksum: int


class WeightsCache:
    """The converted weights of one checkpoint: an `engine.loader.ArrayCache`.

    Args:
      root: of the warmup cache; `None` keeps nothing.
      files: the checkpoint's files.
      model: its configuration.
      abstract: the weights' description.
      worth: weights of fewer bytes are not kept, nor those that would take most of the cache.
    """

    def __init__(
        self, root: Path | None, files: Sequence[Path], model: ModelConfig, abstract: object, *, worth: int = WORTH
    ):
        self._entries: dict[int, _Entry] = {}  # valid as far as is known
        self._written: dict[int, _Entry] = {}
        self._lock = threading.Lock()
        self._folder: Folder | None = None
        leaves = jax.tree.leaves(abstract)
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        if root is None or not worth <= size <= LARGEST:
            return
        self._key = _key(files, model, abstract)
        self._folder = folder = Folder.open(root, "weights", self._key)
        if folder is None:
            return
        try:
            self._entries = _read_manifest(folder, self._key, leaves)
        except FileNotFoundError:
            pass  # nothing stored yet
        except (OSError, Untrusted, ValueError, RecursionError) as error:
            logger.warning("weights cache: converting all arrays again: %s cannot be used: %s", folder.path / "manifest.json", error)
        if not self._entries and folder.writable:
            try:
                free = shutil.disk_usage(folder.path).free
            except OSError as error:
                folder.stop_writing(error)
            else:
                if free < 2 * size:
                    folder.stop_writing(f"the disk has {free >> 20} MiB left for {size >> 20}")

    @property
    def used(self) -> bool:
        """Whether arrays are kept."""
        return self._folder is not None

    def get(self, index: int) -> np.ndarray | None:
        """The array of the leaf with this number, mapped read-only; `None` if it must be made. Thread-safe."""
        entry = self._entries.get(index)
        if self._folder is None or entry is None:
            return None
        path = self._folder.path / entry.file
        try:
            trust.check(path, directory=False)
            array = np.lib.format.open_memmap(path, mode="r").view(np.dtype(entry.dtype))
            if array.shape != entry.shape:
                raise ValueError(f"it holds {array.shape} instead of {entry.shape}")
            if _checksum(array) != entry.checksum:
                raise ValueError("it has another checksum than the manifest")
        except Exception as error:  # whatever numpy raises: the file is bad, and converting is the remedy
            logger.warning("weights cache: converting array %d again: %s: %s", index, path, error)
            with self._lock:
                self._entries.pop(index, None)
            return None
        return np.asarray(array)

    def put(self, index: int, array: np.ndarray) -> None:
        """Keeps a converted array; `commit` makes all of them valid. Thread-safe."""
        if self._folder is None or index in self._entries:
            return
        entry = _Entry(f"{index}.npy", array.dtype.name, array.shape, _checksum(array))
        # Types that numpy does not know are stored as raw bytes.
        raw = array if array.dtype.isbuiltin == 1 else array.view(f"V{array.dtype.itemsize}")
        if self._folder.save(entry.file, lambda file: np.save(file, raw, allow_pickle=False)):
            with self._lock:
                self._written[index] = entry

    def commit(self, count: int) -> None:
        """All ``count`` arrays have been put: the next start may use them."""
        entries = self._entries | self._written
        if self._folder is None or not self._written or len(entries) != count:
            return
        arrays = {str(index): dataclasses.asdict(entry) for index, entry in sorted(entries.items())}
        self._folder.write("manifest.json", json.dumps({"key": self._key, "arrays": arrays}, indent=1).encode())


def _key(files: Sequence[Path], model: ModelConfig, abstract: object) -> str:
    made_from = [(os.path.realpath(file), os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files]
    leaves = [
        f"{jax.tree_util.keystr(path)} {leaf.dtype.name} {leaf.shape}" for path, leaf in jax.tree_util.tree_leaves_with_path(abstract)
    ]
    what = [made_from, dataclasses.asdict(model), leaves, source_digests("engine", host_only=True)]
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:20]


def _read_manifest(folder: Folder, key: str, leaves: Sequence[jax.ShapeDtypeStruct]) -> dict[int, _Entry]:
    stored = json.loads(folder.read("manifest.json"))
    try:
        if stored["key"] != key:
            raise ValueError(f"it belongs to the weights {stored['key']!r}")
        entries = {
            int(index): _Entry(f"{int(index)}.npy", str(entry["dtype"]), tuple(entry["shape"]), int(entry["checksum"]))
            for index, entry in stored["arrays"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its manifest is malformed ({error!r})") from error
    described = {index: (leaf.dtype.name, leaf.shape) for index, leaf in enumerate(leaves)}
    if {index: (entry.dtype, entry.shape) for index, entry in entries.items()} != described:
        raise ValueError("its manifest lists other arrays")
    return entries


def _checksum(array: np.ndarray) -> int:
    """CRC-32 of the bytes; the interpreter lock is free meanwhile."""
    view = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    checksum = 0
    for start in range(0, len(view), CHUNK):
        checksum = zlib.crc32(view[start : start + CHUNK], checksum)
    return checksum

