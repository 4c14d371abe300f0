"""Manual warmup: the jitted functions themselves serve, compiled before they are first called.

Tracing, lowering and compiling a jitted function ahead of its first call leaves the executable in the function's own
cache, so a later call with matching arguments compiles nothing. JAX's persistent cache (``warmup/xla_cache.py``) saves XLA's work from one
start to the next, which still traces and lowers.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.programs import Program
from warmup.compiling import Compilation, compile_programs
from warmup.guard import Guard
from warmup.report import WarmupReport
from warmup.xla_cache import XlaCache


def compile_table(
    programs: Sequence[Program],
    cache: XlaCache | None,
    guard: Guard,
    report: WarmupReport,
    *,
    workers: int | None = None,
) -> list[Compilation]:
    """Compiles every program.

    Raises: as `warmup.compiling.compile_programs`.
    """

    def use(done: Compilation) -> Compilation:
        report.prepared(
            done.program.name,
            "cache" if done.cached else "compiled",
            done.memory,
            trace=done.seconds_trace,
            compile=done.seconds_compile,
        )
        return done

    return compile_programs(programs, guard, use, cache=cache, workers=workers)
