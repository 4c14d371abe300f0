"""Converted weights on disk, so that the next start maps them instead of dequantizing, fusing and quantizing again.

Layout under the cache's root (``--warmup-cache``)::

    weights/<key>/manifest.json   the arrays: file, dtype, shape, CRC-32; written last, so a folder without it is not used
    weights/<key>/<number>.npy    one array of the weights each, whole (not sharded)

The key covers what the arrays are made from: the checkpoint's files (path, size, time of change), the model's configuration, the
abstract weights, and the source of what converts. The rules of trust are those of programs (``warmup/trust.py``). Whatever is
wrong with a folder, the weights are converted from the checkpoint again, and one line says why.

On CPU the mapped pages are the weights themselves: nothing is copied, and servers of one model share them.
"""

from __future__ import annotations

import contextlib
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
from typing import Any

import jax
import numpy as np

from engine.config import ModelConfig
from warmup import trust
from warmup.cache import DEFAULT_LIMIT
from warmup.fingerprint import source_digests
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
        self, root: Path | None, files: Sequence[Path], model: ModelConfig, abstract: Any, *, worth: int = WORTH
    ):
        self.folder: Path | None = None
        self._entries: dict[int, _Entry] = {}  # found when opened
        self._written: dict[int, _Entry] = {}
        self._lock = threading.Lock()
        self._writing = False
        leaves = jax.tree.leaves(abstract)
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        if root is None or not worth <= size <= LARGEST:
            return
        root = Path(os.path.realpath(root))
        folder = root / "weights" / _key(files, model, abstract)
        try:
            trust.make_folder(root, folder)
            self._entries = _read_manifest(folder, leaves)
            free = shutil.disk_usage(folder).free
        except FileNotFoundError:
            free = shutil.disk_usage(folder).free  # nothing stored yet
        except (Untrusted, OSError, ValueError) as error:
            logger.warning("weights cache %s is not used: %s", folder, error)
            return
        self.folder = folder
        if self._entries:
            with contextlib.suppress(OSError):
                os.utime(folder)  # last used, for `warmup.cache.prune`
            return
        self._writing = free > 2 * size
        if not self._writing:
            logger.warning("weights cache %s: not stored, the disk has %d MiB left for %d", folder, free >> 20, size >> 20)

    def get(self, index: int) -> np.ndarray | None:
        """The array of the leaf with this number, mapped read-only; `None` if it must be made. Thread-safe."""
        entry = self._entries.get(index)
        if entry is None:
            return None
        path = self.folder / entry.file
        try:
            trust.check(path, directory=False)
            array = np.load(path, mmap_mode="r", allow_pickle=False).view(np.dtype(entry.dtype))
            if array.shape != entry.shape:
                raise ValueError(f"it holds {array.shape} instead of {entry.shape}")
            if _checksum(array) != entry.checksum:
                raise ValueError("it has another checksum than the manifest")
        except (Untrusted, OSError, ValueError) as error:
            logger.warning("weights cache: converting array %d again: %s: %s", index, path, error)
            return None
        return np.asarray(array)

    def put(self, index: int, array: np.ndarray) -> None:
        """Keeps a converted array; `commit` makes all of them valid. Thread-safe."""
        if not self._writing:
            return
        entry = _Entry(f"{index}.npy", array.dtype.name, array.shape, _checksum(array))
        try:
            _save(self.folder / entry.file, array)
        except OSError as error:
            with self._lock:
                if self._writing:
                    self._writing = False
                    logger.warning("weights cache %s cannot be written, going on without: %s", self.folder, error.strerror)
            return
        with self._lock:
            self._written[index] = entry

    def commit(self, count: int) -> None:
        """All ``count`` arrays have been put: the next start may use them."""
        if not self._writing or len(self._written) != count:
            return
        arrays = {str(index): dataclasses.asdict(entry) for index, entry in sorted(self._written.items())}
        try:
            trust.write_atomic(self.folder / "manifest.json", json.dumps({"arrays": arrays}, indent=1).encode())
        except OSError as error:
            logger.warning("weights cache %s cannot be written, going on without: %s", self.folder, error.strerror)


def _key(files: Sequence[Path], model: ModelConfig, abstract: Any) -> str:
    made_from = [(os.path.realpath(file), os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files]
    leaves = [
        f"{jax.tree_util.keystr(path)} {leaf.dtype.name} {leaf.shape}" for path, leaf in jax.tree_util.tree_leaves_with_path(abstract)
    ]
    what = [made_from, dataclasses.asdict(model), leaves, source_digests("engine", host_only=True)]
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:20]


def _read_manifest(folder: Path, leaves: Sequence[jax.ShapeDtypeStruct]) -> dict[int, _Entry]:
    stored = json.loads(trust.read(folder / "manifest.json"))
    try:
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
    view = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    checksum = 0
    for start in range(0, len(view), CHUNK):
        checksum = zlib.crc32(view[start : start + CHUNK], checksum)
    return checksum


def _save(path: Path, array: np.ndarray) -> None:
    """As `trust.write_atomic`, without holding the bytes twice. Types that numpy does not know are stored as raw bytes."""
    temporary = path.with_name(f".tmp-{os.getpid()}-{os.urandom(4).hex()}-{path.name}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            np.save(file, array if array.dtype.isbuiltin == 1 else array.view(f"V{array.dtype.itemsize}"), allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
