"""Counts what JAX traces, lowers and compiles, and says who caused it once the server is ready.

The one source is JAX's own monitoring events, so nothing can compile without being seen: programs of the table, small
eager operations, conversions inside a library. The counts are split in two phases, ``startup`` and ``serving``;
`Guard.ready` switches from the first to the second, and from then on every trace or compile is logged as a warning
with the name of the jitted function and the nearest caller outside JAX. A strict guard raises `CompiledWhileServing`
in the calling thread before the compile begins, so that the request which needed it fails.

**What is a compile.** JAX's ``backend_compile_duration`` event fires around "get the executable", whether XLA compiles
it or the persistent cache has it; a cache hit fires ``cache_hits`` in between, on the same thread. So a compile is the
former without the latter. That holds with and without the persistent cache, and also for programs the cache declines
to store (for which JAX fires no ``cache_misses``).

Listeners run on the thread that compiles; the counters have a lock, the state between two events is thread-local.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Literal

import jax

from warmup.errors import CompiledWhileServing

logger = logging.getLogger(__name__)

Phase = Literal["startup", "serving"]
Kind = Literal["trace", "lowering", "compile", "cache_hit"]

_TRACE = "/jax/core/compile/jaxpr_trace_duration"
_LOWER = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILE = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT = "/jax/compilation_cache/cache_hits"

# Modules whose frames are JAX's business, not the caller's.
_INTERNAL = ("jax", "jaxlib", "contextlib", "functools", "warmup.guard")


@dataclasses.dataclass
class Counts:
    """How many of each. ``traces`` counts every jaxpr made, those of nested jitted functions included."""

    traces: int = 0
    lowerings: int = 0
    compiles: int = 0
    cache_hits: int = 0

    def add(self, kind: Kind) -> None:
        match kind:
            case "trace":
                self.traces += 1
            case "lowering":
                self.lowerings += 1
            case "compile":
                self.compiles += 1
            case "cache_hit":
                self.cache_hits += 1

    @property
    def total(self) -> int:
        """Traces, lowerings and compiles together: 0 means that nothing was made anew."""
        return self.traces + self.lowerings + self.compiles


class Guard:
    """Counts from construction until `close`. Several guards may live side by side; each sees every event of the
    process.

    ``on_event(kind, phase)`` is called for each count, on the thread that caused it: the hook for metrics.
    """

    def __init__(self, *, strict: bool = False, on_event: Callable[[Kind, Phase], None] | None = None):
        self.strict = strict
        self._on_event = on_event
        self._lock = threading.Lock()
        self._phase: Phase = "startup"
        self._counts: dict[Phase, Counts] = {"startup": Counts(), "serving": Counts()}
        self._explain = False
        self._thread = threading.local()
        jax.monitoring.register_event_listener(self._event)
        jax.monitoring.register_scalar_listener(self._begin)
        jax.monitoring.register_event_duration_secs_listener(self._end)

    def close(self) -> None:
        """Stops counting."""
        jax.monitoring.unregister_event_listener(self._event)
        jax.monitoring.unregister_scalar_listener(self._begin)
        jax.monitoring.unregister_event_duration_listener(self._end)

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def phase(self) -> Phase:
        return self._phase

    def ready(self) -> None:
        """From now on the server serves: what is counted goes to ``serving``, is logged, and is refused when strict."""
        self._phase = "serving"

    def counts(self, phase: Phase) -> Counts:
        """A copy of the counts of a phase."""
        with self._lock:
            return dataclasses.replace(self._counts[phase])

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Names in the log what is traced or compiled inside the block, on any thread, as while serving."""
        self._explain = True
        try:
            yield
        finally:
            self._explain = False

    @contextlib.contextmanager
    def watch(self) -> Iterator[Counts]:
        """Counts what the calling thread alone does inside the block."""
        outer: list[Counts] = getattr(self._thread, "watches", [])
        counts = Counts()
        self._thread.watches = [*outer, counts]
        try:
            yield counts
        finally:
            self._thread.watches = outer

    # Listeners. JAX calls them with the name of the event, a value, and what it is about: ``fun_name``, mostly.

    def _begin(self, event: str, value: float, **about: str | int) -> None:
        if event != _COMPILE:
            return
        self._thread.hit = False
        if self.strict and self._phase == "serving":
            fun_name = str(about.get("fun_name", "?"))
            self._count("compile", fun_name)  # here, for no end event follows the exception
            raise CompiledWhileServing(
                f"{fun_name} needs compiling while serving, called from {caller()}; --strict-compiles refuses it. "
                "Something reached a program that is not in the table, or a table program with other "
                "shapes, types or shardings"
            )

    def _event(self, event: str, **about: str | int) -> None:
        if event == _CACHE_HIT:
            self._thread.hit = True

    def _end(self, event: str, duration_secs: float, **about: str | int) -> None:
        fun_name = str(about.get("fun_name", "?"))
        if event == _TRACE:
            self._count("trace", fun_name)
        elif event == _LOWER:
            self._count("lowering", fun_name)
        elif event == _COMPILE:
            self._count("cache_hit" if getattr(self._thread, "hit", False) else "compile", fun_name)

    def _count(self, kind: Kind, fun_name: str) -> None:
        with self._lock:
            phase = self._phase
            self._counts[phase].add(kind)
        for watch in getattr(self._thread, "watches", ()):
            watch.add(kind)
        if phase == "serving" or self._explain:
            when = "while serving" if phase == "serving" else "in the proof before ready"
            logger.warning("%s of %s %s, called from %s", kind.replace("_", " "), fun_name, when, caller())
        if self._on_event is not None:
            self._on_event(kind, phase)


def caller() -> str:
    """``file:line in function`` of the innermost frame that is not JAX's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not any(module == name or module.startswith(name + ".") for name in _INTERNAL):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "an unknown caller"
