"""What the warmup cache holds, and making it smaller: ``preheat cache list`` and ``preheat cache prune``."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import time
from pathlib import Path

from warmup import trust
from warmup.store import check_manifest
from warmup.trust import Untrusted
from warmup.xla_cache import SUFFIX

logger = logging.getLogger(__name__)

DEFAULT_LIMIT = 20 * 1024**3  # bytes


@dataclasses.dataclass(frozen=True)
class CacheItem:
    """A folder of the cache. ``used`` is when it was last used, in seconds since the epoch."""

    path: Path
    label: str
    programs: int
    size: int  # bytes
    used: float


def list_cache(root: Path) -> list[CacheItem]:
    """What the cache holds, the most recently used first. Unreadable folders are listed with what is known."""
    items = []
    for folder in _folders(root):
        files = _files(folder)
        label, programs = _label(folder)
        items.append(CacheItem(folder, label, programs, sum(size for _, size, _ in files), folder.stat().st_mtime))
    return sorted(items, key=lambda item: -item.used)


def prune(root: Path, limit: int, *, keep: Path | None = None, now: float | None = None) -> list[CacheItem]:
    """Removes the least recently used folders until the cache is at most ``limit`` bytes; ``keep`` stays.

    Also removes what killed processes and earlier versions left behind: temporary files, and entries that nothing names, older than an
    hour.

    Raises:
      Untrusted: the cache belongs to someone else.
    """
    root = Path(os.path.realpath(root))
    trust.check(root, directory=True)
    before = (time.time() if now is None else now) - 3600
    for folder in _folders(root):
        _sweep(folder, before)
    for path, _, modified in _files(root / "xla", "*"):
        if modified < before:  # entries without a seal, of an earlier version
            path.unlink(missing_ok=True)
    items = list_cache(root)
    size = sum(item.size for item in items)
    removed = []
    for item in reversed(items):
        if size <= limit:
            break
        if item.path == keep:
            continue
        _remove(item.path)
        size -= item.size
        removed.append(item)
    return removed


def keep_within_limit(root: Path, *, keep: Path | None) -> None:
    """What a start that has stored something does: prunes to `DEFAULT_LIMIT`. A cache that cannot be pruned is a warning."""
    try:
        removed = prune(root, DEFAULT_LIMIT, keep=keep)
    except (OSError, Untrusted) as error:
        logger.warning("warmup cache %s cannot be pruned: %s", root, error)
        return
    for item in removed:
        logger.info("warmup cache: removed %s (%s), used longest ago", item.path.name, item.label)


def _folders(root: Path) -> list[Path]:
    result = []
    for parent in (root / "programs", root / "weights", root / "xla"):
        if parent.is_dir():
            result += [path for path in sorted(parent.iterdir()) if path.is_dir()]
    return result


def _files(folder: Path, pattern: str = "**/*") -> list[tuple[Path, int, float]]:
    """(path, bytes, modified) of each file; those that vanish meanwhile are left out."""
    result = []
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if path.is_file() or path.is_symlink():
                result.append((path, status.st_size, status.st_mtime))
    return result


def _label(folder: Path) -> tuple[str, int]:
    if folder.parent.name == "xla":
        return "JAX's persistent cache (manual warmup)", len(list(folder.glob(f"*{SUFFIX}")))
    if folder.parent.name == "weights":
        return "converted weights", 0
    try:
        components = json.loads(trust.read(folder / "fingerprint.json"))
        manifest = json.loads(trust.read(folder / "manifest.json"))
        model, engine = components["model"], components["engine"]
        ways = "".join(f"{name} {engine[name]}, " for name in ("dp", "ep", "tp") if engine.get(name, 1) > 1)
        label = (
            f"{model['family']} {model['num_layers']} layers, hidden {model['hidden_size']}; slots {engine['slots']}, "
            f"max-len {engine['max_len']}, {ways}{engine['dtype']}; {components['devices']['kind']}, "
            f"jax {components['versions']['jax']}"
        )
        return label, len(manifest["entries"])
    except (OSError, Untrusted, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"unreadable ({type(error).__name__})", 0


def _sweep(folder: Path, before: float) -> None:
    named: set[str] | None = None
    if folder.parent.name == "programs":
        try:
            manifest = json.loads(trust.read(folder / "manifest.json"))
            check_manifest(manifest)
            named = {entry["file"] for entry in manifest["entries"].values()}
        except FileNotFoundError:
            named = set()
        except (OSError, Untrusted, ValueError, RecursionError):
            named = None  # what it names is not known: leave the entries alone
    for path, _, modified in _files(folder):
        stale = path.name.startswith(".tmp-") or (
            named is not None and path.suffix == ".bin" and path.name not in named
        )
        if stale and modified < before:
            path.unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    """Renames first, so that no reader sees half a folder."""
    grave = folder.with_name(f".removed-{os.getpid()}-{folder.name}")
    try:
        os.replace(folder, grave)
    except FileNotFoundError:
        return
    for path in sorted(grave.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    grave.rmdir()
