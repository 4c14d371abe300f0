"""Compiling the table: one thread lowers, several compile.

Lowering holds the interpreter lock, so a second thread would not help it; XLA's compile releases the lock. While
program N compiles in a worker, program N + 1 is traced and lowered in the calling thread.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax

from engine.programs import Program
from warmup.errors import DonationLost, WarmupError
from warmup.guard import Guard
from warmup.report import ProgramMemory
from warmup.xla_cache import XlaCache

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
CompilerOptions = dict[str, str | bool]


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One program, compiled. ``cached``: XLA did not compile, JAX's persistent cache had it, as the entries ``keys``. Times in
    seconds."""

    program: Program
    compiled: jax.stages.Compiled
    memory: ProgramMemory
    cached: bool
    keys: tuple[str, ...]
    seconds_trace: float
    seconds_compile: float


def no_options(program: Program) -> CompilerOptions:
    """A program is compiled as JAX does without being told."""
    return {}


def worker_count() -> int:
    """Threads that compile or load at once: one per core this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def compile_programs(
    programs: Sequence[Program],
    guard: Guard,
    use: Callable[[Compilation], Result],
    *,
    cache: XlaCache | None = None,
    workers: int | None = None,
    options: Callable[[Program], CompilerOptions] = no_options,
) -> list[Result]:
    """Compiles programs and calls ``use`` on each in the worker that compiled it.

    A program that fails with an entry of ``cache``, JAX's persistent cache, is compiled without it, once, after a warning. ``options`` are
    XLA's for each program, by their names.

    Raises:
      WarmupError: a program failed to trace, lower, compile or to be used; named, and the first in the order of the
        table.
      DonationLost: a program does not alias all of what it donates.
    """
    with concurrent.futures.ThreadPoolExecutor(workers or worker_count(), thread_name_prefix="compile") as pool:
        futures: list[concurrent.futures.Future[Result]] = []
        try:
            for program in programs:
                began = time.perf_counter()
                lowered = _lower(program)
                seconds = time.perf_counter() - began
                futures.append(pool.submit(_compile, program, lowered, seconds, guard, cache, options(program), use))
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _lower(program: Program) -> jax.stages.Lowered:
    lowered: jax.stages.Lowered = naming(program, "lower", lambda: program.trace().lower())
    return lowered


def _compile(
    program: Program,
    lowered: jax.stages.Lowered,
    seconds_trace: float,
    guard: Guard,
    cache: XlaCache | None,
    options: CompilerOptions,
    use: Callable[[Compilation], Result],
) -> Result:
    def compile() -> Compilation:
        began = time.perf_counter()
        with guard.watch() as counts:
            compiled = naming(program, "compile", lambda: lowered.compile(compiler_options=options or None))
        seconds = time.perf_counter() - began
        memory = memory_of(compiled)
        check_donation(program, memory)
        cached = counts.compiles == 0 and counts.cache_hits > 0
        return Compilation(program, compiled, memory, cached, tuple(taken) if cached else (), seconds_trace, seconds)

    watching: contextlib.AbstractContextManager[list[str]] = cache.watch() if cache else contextlib.nullcontext([])
    with watching as taken:
        try:
            done = compile()
        except WarmupError as error:
            if cache is None or not taken:
                raise
            logger.warning("warmup cache: compiling program %s again: %s", program.name, one_line(error))
            cache.distrust(taken)
            taken.clear()
            program.function.clear_cache()  # which may have the executable by now
            lowered = _lower(program)
            done = compile()
    return use(done)


def naming(program: Program, action: str, call: Callable[[], Result]) -> Result:
    """Calls, and turns whatever goes wrong into an error that names the program."""
    try:
        return call()
    except WarmupError:
        raise
    except Exception as error:
        raise WarmupError(f"program {program.name} failed to {action}: {type(error).__name__}: {error}") from error


def one_line(error: object) -> str:
    """An error's message as one line of a log; XLA's have several."""
    return " ".join(str(error).split())


def memory_of(compiled: jax.stages.Compiled, *, code: int = 0) -> ProgramMemory:
    """What XLA says of an executable's memory. ``code`` stands in where it does not tell the size of the code (CPU)."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return ProgramMemory(code=code)
    return ProgramMemory(
        argument=analysis.argument_size_in_bytes,
        output=analysis.output_size_in_bytes,
        alias=analysis.alias_size_in_bytes,
        temp=analysis.temp_size_in_bytes,
        code=analysis.generated_code_size_in_bytes or code,
    )


def check_donation(program: Program, memory: ProgramMemory) -> None:
    """Raises `DonationLost` unless all bytes of the donated argument are written in place."""
    if memory.alias >= program.donated_bytes:
        return
    what = "the decode state" if program.takes_state else "its donated argument"
    raise DonationLost(
        f"program {program.name} aliases {memory.alias} of the {program.donated_bytes} bytes of {what}: the donation "
        "was lost, and each call would allocate and write that much again. Usual causes: "
        "a jit around an already jitted function (an inner donation does not survive an outer jit), or an output whose "
        "shape, dtype or sharding differs from the donated input's"
    )
