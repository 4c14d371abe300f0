"""A folder of the warmup cache: the programs of one fingerprint, JAX's entries of one platform, the arrays of one checkpoint.

What all of them have in common: nothing that is wrong with the folder fails a start. A folder that may not be used (``trust``) is one
warning, and the cache is off; one that cannot be written is one warning, and nothing more is stored. Folders may vanish at any time, for
another process may prune them.

What is stored is bound to what it was stored for (`seal`): a checksum of the bytes alone would let through an entry that is whole but
another's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from warmup import trust
from warmup.trust import Untrusted

try:
    import fcntl
except ImportError:  # not on Windows: the last writer of a manifest wins there
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

LOCK_SECONDS = 10.0  # that another process may take to change a file; it takes milliseconds, unless it hangs


def seal(owner: list[str], data: bytes | memoryview) -> str:
    """The digest of ``data`` as stored for ``owner``: for another owner the same bytes have another. 64 hex digits."""
    digest = hashlib.sha256(json.dumps(owner).encode() + b"\n")
    digest.update(data)
    return digest.hexdigest()


class Folder:
    """A folder that may be used. Thread-safe."""

    def __init__(self, root: Path, path: Path):
        self.root = root
        self.path = path
        self.writable = os.access(path, os.W_OK)
        if self.writable:
            with contextlib.suppress(OSError):
                os.utime(path)  # last used, for `warmup.cache.prune`
        else:
            logger.warning("warmup cache %s is read-only: nothing new is stored", path)

    @classmethod
    def open(cls, root: Path | None, *parts: str) -> Folder | None:
        """``root/parts``, created where it is missing; `None` where there is no ``root``, or after a warning where the folder
        cannot be used."""
        if root is None:
            return None
        root = Path(os.path.realpath(root))
        try:
            trust.make_folder(root, root.joinpath(*parts))
        except Untrusted as error:
            logger.warning("warmup cache not used: %s", error)
            return None
        except OSError as error:
            logger.warning("warmup cache not used: cannot create %s: %s", root.joinpath(*parts), error.strerror)
            return None
        return cls(root, root.joinpath(*parts))

    def read(self, file: str) -> bytes:
        """The content of a file. Raises as `trust.read`."""
        return trust.read(self.path / file)

    def write(self, file: str, data: bytes | memoryview) -> bool:
        """As `save`, of these bytes."""
        return self.save(file, lambda opened: opened.write(data))

    def save(self, file: str, write: Callable[[BinaryIO], object]) -> bool:
        """Replaces a file by what ``write`` writes, atomically. Returns whether it could; where not, nothing is written any more."""
        if not self.writable:
            return False
        try:
            if not self.path.is_dir():
                trust.make_folder(self.root, self.path)
            with trust.replacing(self.path / file) as opened:
                write(opened)
        except (OSError, Untrusted) as error:
            self.stop_writing(error)
            return False
        return True

    def remove(self, file: str) -> None:
        """Removes a file, or whatever stands in its place, if that can be done."""
        if self.writable:
            try:
                trust.remove(self.path / file)
            except OSError as error:
                self.stop_writing(error)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Inside the block no other process is in such a block of this folder. Where that cannot be had, the folder is not writable
        any more."""
        descriptor = self._lock() if self.writable else None
        try:
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _lock(self) -> int | None:
        lock = self.path / ".lock"
        descriptor = None
        try:
            trust.make_folder(self.root, self.path)
            if lock.is_dir():
                trust.remove(lock)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            deadline = time.monotonic() + LOCK_SECONDS
            while fcntl is not None:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.01)
            return descriptor
        except (OSError, Untrusted) as error:
            self.stop_writing(error if not isinstance(error, BlockingIOError) else f"another process does not release {lock}")
            if descriptor is not None:
                os.close(descriptor)
            return None

    def stop_writing(self, reason: object) -> None:
        """Nothing is written from now on; said once."""
        if self.writable:
            self.writable = False
            reason = getattr(reason, "strerror", None) or reason
            logger.warning("warmup cache %s cannot be written, going on without storing: %s", self.path, reason)
