"""JAX's persistent cache, kept by us: what manual mode uses instead of the files that JAX would write.

JAX names an entry after everything its program is made from, but believes whatever it finds under that name: another program's entry, a
truncated one, one that was compiled for another processor. It also writes in place, so another process may read half an entry. So the
entries are ours: each begins with a seal (`warmup.folder.seal`) of the platform, the name and the bytes, is written atomically, and is
checked each time it is read, not before: nothing can change in between. What does not match is named in one line, removed, and compiled
again.

The platform (versions, kind of device, instruction set) also names the folder, so that machines which share a cache do not remove each
other's entries.

JAX asks two things of a cache, ``get`` and ``put`` (``jax._src.compilation_cache_interface``). There is no public way to give it one; the
module variable that holds its own is the same in jax 0.10 and 0.12. Under a JAX without it, the cache is off.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
from jax._src import compilation_cache

from warmup.folder import Folder, seal
from warmup.trust import Untrusted

logger = logging.getLogger(__name__)

SUFFIX = "-cache"
_SEAL = 64  # characters


class XlaCache:
    """The entries of one platform. Thread-safe; never raises, whatever is in the folder."""

    def __init__(self, folder: Folder, platform: str):
        self._folder = folder
        self._path = folder.path  # JAX logs it
        self._platform = platform
        self._distrusted: set[str] = set()
        self._thread = threading.local()

    @property
    def folder(self) -> Path:
        return self._folder.path

    def get(self, key: str) -> bytes | None:
        """JAX asks for an entry, in the thread that compiles."""
        if key in self._distrusted:
            return None
        file = key + SUFFIX
        try:
            data = self._folder.read(file)
        except FileNotFoundError:
            return None
        except Untrusted as error:
            why = str(error)
        except OSError as error:
            why = f"it cannot be read: {error.strerror}"
        else:
            value = data[_SEAL:]
            if data[:_SEAL] == self._seal(key, value):
                getattr(self._thread, "taken", []).append(key)
                return value
            why = "it does not hold what was stored for this program (truncated, damaged, or another's)"
        logger.warning("warmup cache: compiling %s again: its entry %s: %s", key.rpartition("-")[0], file, why)
        self._folder.remove(file)
        return None

    def put(self, key: str, value: bytes) -> None:
        """JAX has compiled a program that it did not get."""
        self._folder.write(key + SUFFIX, self._seal(key, value) + value)

    @contextlib.contextmanager
    def watch(self) -> Iterator[list[str]]:
        """Lists the entries that JAX gets in the calling thread inside the block."""
        taken: list[str] = []
        self._thread.taken = taken
        try:
            yield taken
        finally:
            self._thread.taken = []

    def distrust(self, keys: Iterable[str]) -> None:
        """Removes entries that cannot be loaded or run; this process reads them no more."""
        for key in keys:
            self._distrusted.add(key)
            self._folder.remove(key + SUFFIX)

    def _seal(self, key: str, value: bytes) -> bytes:
        return seal([self._platform, key], value).encode()


def use_xla_cache(root: Path | None, platform: str) -> XlaCache | None:
    """Gives JAX the cache under ``root/xla``, for the rest of the process; none if ``root`` is `None` or not to be trusted. A folder
    that cannot be written is still read.

    ``platform`` is what executables depend on that JAX does not name them after: `Fingerprint.platform`.
    """
    folder = Folder.open(root, "xla", platform)
    if folder is not None and not hasattr(compilation_cache, "_cache"):
        logger.warning("warmup cache not used: jax %s keeps its persistent cache elsewhere", jax.__version__)
        folder = None
    options = {
        "jax_enable_compilation_cache": folder is not None,
        "jax_compilation_cache_dir": None,  # JAX's own kind of cache
        # Small programs cost a start as much as they cost a request. What would not be written need not be serialized either.
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_persistent_cache_min_compile_time_secs": 0.0 if folder and folder.writable else float("inf"),
        "jax_raise_persistent_cache_errors": False,
        "jax_persistent_cache_enable_xla_caches": None,
    }
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # it remembers the first cache, and whether there was one
    if folder is None:
        return None
    cache = XlaCache(folder, platform)
    compilation_cache._cache = cache  # type: ignore[assignment]  # has the methods, not the private base class
    return cache
