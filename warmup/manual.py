"""Manual warmup: the jitted functions themselves serve, compiled before they are first called.

Tracing, lowering and compiling a jitted function ahead of its first call leaves the executable in the function's own
cache, so a later call with matching arguments compiles nothing. JAX's persistent cache under the warmup cache's root
saves XLA's work from one start to the next (the next start still traces and lowers), with its floors on size and
compile time at zero: small programs cost a start as much as they cost a request.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from engine.programs import Program
from warmup import trust
from warmup.compiling import Compilation, compile_programs, worker_count
from warmup.guard import Guard
from warmup.report import ProgramMemory, WarmupReport
from warmup.trust import Untrusted

logger = logging.getLogger(__name__)

_ZSTD = b"\x28\xb5\x2f\xfd"


def compile_table(
    programs: Sequence[Program], guard: Guard, report: WarmupReport, *, workers: int | None = None
) -> tuple[dict[str, Callable], dict[str, ProgramMemory]]:
    """Compiles every program. Returns what to call, and the memory of each, by name.

    Raises: as `warmup.compiling.compile_programs`.
    """

    def use(done: Compilation) -> ProgramMemory:
        report.prepared(
            done.program.name,
            "cache" if done.cached else "compiled",
            done.memory,
            trace=done.seconds_trace,
            compile=done.seconds_compile,
        )
        return done.memory

    memories = compile_programs(programs, guard, use, workers=workers)
    names = [program.name for program in programs]
    return {program.name: program.function for program in programs}, dict(zip(names, memories, strict=True))


def use_persistent_cache(root: Path | None) -> bool:
    """Turns JAX's persistent cache on, in ``root/xla``, for the rest of the process; off if ``root`` is `None` or not
    to be trusted.

    Entries that cannot be decompressed (truncated, garbage) are removed first, for JAX would neither use nor replace
    them. A folder that cannot be written is still read. Returns whether the cache is on.
    """
    folder = None if root is None else _open(Path(os.path.realpath(root)))
    options: Mapping[str, object] = {
        "jax_enable_compilation_cache": folder is not None,
        "jax_compilation_cache_dir": None if folder is None else str(folder),
        "jax_persistent_cache_min_entry_size_bytes": -1,
        # JAX warns at each entry it fails to write; where all would fail, it is told that none is worth it.
        "jax_persistent_cache_min_compile_time_secs": 0.0 if folder and os.access(folder, os.W_OK) else float("inf"),
        "jax_raise_persistent_cache_errors": False,
        # Else the folder's path becomes part of every key, and a cache that was moved (into an image, say) is of no
        # use.
        "jax_persistent_cache_enable_xla_caches": None,
    }
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # it remembers the first folder, and whether there was one
    return folder is not None


def _open(root: Path) -> Path | None:
    folder = root / "xla"
    try:
        trust.make_folder(root, folder)
        entries = sorted(folder.glob("*-cache"))
    except Untrusted as error:
        logger.warning("warmup cache not used: %s", error)
        return None
    except OSError as error:
        if not folder.is_dir():
            logger.warning("warmup cache not used: cannot create %s: %s", folder, error.strerror)
            return None
        entries = sorted(folder.glob("*-cache"))
    if not os.access(folder, os.W_OK):
        logger.warning("warmup cache %s is read-only: new programs are not stored", folder)
    with concurrent.futures.ThreadPoolExecutor(worker_count()) as pool:
        faults = list(pool.map(_fault, entries))
    for entry, fault in zip(entries, faults, strict=True):
        if fault is None:
            continue
        try:
            entry.unlink(missing_ok=True)
        except OSError as error:
            logger.warning(
                "warmup cache not used: its entry %s %s and cannot be removed: %s", entry, fault, error.strerror
            )
            return None
        logger.warning("warmup cache: removed entry %s, which is compiled again: it %s", entry.name, fault)
    return folder


def _fault(entry: Path) -> str | None:
    """What is wrong with an entry of JAX's cache, which is compressed with zlib, or with zstd where that is
    installed."""
    try:
        data = trust.read(entry)
    except FileNotFoundError:
        return None  # another process removed it
    except (OSError, Untrusted) as error:
        return f"cannot be used ({error})"
    if data.startswith(_ZSTD):
        return None  # JAX's own reader finds what is wrong
    try:
        zlib.decompress(data)
    except zlib.error as error:
        return f"is truncated or garbage ({error})"
    return None
