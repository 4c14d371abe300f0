"""A folder in the temporary directory that only this process and its proxy use, and that nobody else outlives.

A process that is killed cannot remove its folder, so the next one does: each holds a lock (`flock`) on the folder itself for as long
as it lives, and a folder of ours that can be locked has no owner any more. The lock tells, not a process id, which another
process may have by then; programs that clean temporary directories by age (systemd-tmpfiles) leave locked folders alone as well.

Not in ``XDG_RUNTIME_DIR``: that ends with the user's last login, and servers often outlive it.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows, where folders of dead processes stay
    fcntl = None  # type: ignore[assignment]

PREFIX = "preheat-serve-"


class PrivateFolder:
    """A new folder, mode 0700, after those of dead processes have been removed.

    Raises:
        OSError: the temporary directory cannot be written.
    """

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        remove_abandoned(parent)
        self._lock: int | None = None
        while self._lock is None:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            try:
                self._lock = _lock(self.path)
            except (BlockingIOError, FileNotFoundError):
                continue  # another process took it for abandoned before it was locked, and removes it
            except OSError:
                break  # there are no locks in this file system: nobody takes it for abandoned

    def remove(self) -> None:
        """Removes it with all that it holds; a second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_abandoned(parent: Path) -> list[Path]:
    """Removes the folders in ``parent`` that processes of this user have left behind; returns those."""
    removed = []
    for folder in parent.glob(PREFIX + "*"):
        try:
            lock = _lock(folder)
        except OSError:
            continue  # somebody uses it, or it is not ours
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        removed.append(folder)
    return removed


def _lock(folder: Path) -> int:
    """A descriptor that holds the lock of a private folder of this user's.

    Raises:
        BlockingIOError: a living process holds it. FileNotFoundError: it is gone.
        OSError: it is a link, a file, of another user, open to others, or cannot be locked.
    """
    if fcntl is None:
        raise OSError("no locks")
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
            raise PermissionError(f"{folder} is not a private folder of this user")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(status, os.lstat(folder)):
            raise FileNotFoundError(folder)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
