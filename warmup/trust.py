"""Which folders and files of the warmup cache may be used.

Entries are pickles and machine code: who can write one runs code in this process. So a folder is used only if it and
each parent up to the cache's root belong to the user or to root, and nobody else can write them; a file likewise.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


class Untrusted(Exception):
    """A folder or file that is neither read nor written. The message says why and what to do."""


def make_folder(root: Path, folder: Path) -> None:
    """Creates ``folder`` (``root`` or below it) for the user alone where it does not exist, and checks all of the way.

    Raises:
      Untrusted: someone else owns or can write a part of the way, or a file stands in it.
      OSError: it cannot be created.
    """
    parts = folder.relative_to(root).parts
    root.parent.mkdir(parents=True, exist_ok=True)
    for depth in range(len(parts) + 1):
        step = root.joinpath(*parts[:depth])
        try:
            step.mkdir(mode=0o700)
        except OSError:  # it exists; a read-only file system may say otherwise
            if not os.path.lexists(step):
                raise
        check(step, directory=True)


def check(path: Path, *, directory: bool) -> None:
    """Raises `Untrusted` if others own or can write ``path``, or if it is of another kind; `OSError` if it is not
    there."""
    _check_status(path, path.lstat() if not directory else path.stat(), directory=directory)


def read(path: Path) -> bytes:
    """The content of a file, checked on the open descriptor. Links are not followed, and a pipe is not waited for.

    Raises:
      Untrusted, OSError: as `check`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb", buffering=0) as file:
        _check_status(path, os.fstat(descriptor), directory=False)
        return file.read()


def _check_status(path: Path, status: os.stat_result, *, directory: bool) -> None:
    if directory and not stat.S_ISDIR(status.st_mode):
        raise Untrusted(f"{path} is not a folder: remove it, or choose another --warmup-cache")
    if not directory and not stat.S_ISREG(status.st_mode):
        raise Untrusted(f"{path} is not a plain file: remove it")
    if not hasattr(os, "geteuid"):
        return  # no owners to compare
    if status.st_uid not in (os.geteuid(), 0):
        raise Untrusted(f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}: choose another --warmup-cache")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Untrusted(f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):o}): chmod go-w it")


def remove(path: Path) -> None:
    """Removes what stands there, be it a file, a link or a folder; nothing is fine too. Raises `OSError`."""
    try:
        path.unlink(missing_ok=True)
    except (IsADirectoryError, PermissionError):  # the latter is what POSIX wants for a folder, and macOS gives
        if path.is_symlink() or not path.is_dir():
            raise
        shutil.rmtree(path)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file, mode 600, to be written inside the block, so that readers of ``path`` see all of it or none: temporary file, fsync,
    rename, fsync of the folder. A folder in its place is removed.

    Raises:
      OSError: disk full, read-only, ...; nothing is left behind.
    """
    temporary = path.with_name(f".tmp-{os.getpid()}-{os.urandom(4).hex()}-{path.name}"[:200])
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
