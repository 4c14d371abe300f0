"""What `GET /warmup` and the log say about a start: every program with its times and bytes, progress, stages.

One `WarmupReport` per process. Warmup writes to it from several threads while the server's threads read snapshots; all
of it is behind one lock and costs nothing on the serving path.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NotRequired, TypedDict

from warmup.guard import Guard

State = Literal["loading", "warming", "ready", "failed"]
Source = Literal["compiled", "cache", "aot"]
Stage = Literal["import", "weights", "programs", "proof"]

_MIB = 1024 * 1024


@dataclasses.dataclass(frozen=True)
class ProgramMemory:
    """Bytes of one executable on one device, as XLA's ``memory_analysis`` tells them.

    ``alias`` is the part of the output that is written into donated arguments. ``code`` is the size of the generated
    code; where the backend tells none (CPU), that of the serialized executable, if there is one.
    """

    argument: int = 0
    output: int = 0
    alias: int = 0
    temp: int = 0
    code: int = 0


@dataclasses.dataclass
class ProgramReport:
    """One row of the report. Times in seconds; ``None`` in ``source`` until the program is prepared."""

    name: str
    source: Source | None = None
    seconds_trace: float = 0.0  # tracing and lowering
    seconds_compile: float = 0.0  # XLA, or its persistent cache
    seconds_load: float = 0.0  # reading and deserializing an artifact
    seconds_run: float = 0.0  # the first run
    memory: ProgramMemory = ProgramMemory()
    touched: bool = False

    def as_dict(self) -> ProgramRow:
        return {
            "name": self.name,
            "source": self.source,
            "seconds_trace": round(self.seconds_trace, 6),
            "seconds_compile": round(self.seconds_compile, 6),
            "seconds_load": round(self.seconds_load, 6),
            "seconds_run": round(self.seconds_run, 6),
            "argument_bytes": self.memory.argument,
            "output_bytes": self.memory.output,
            "alias_bytes": self.memory.alias,
            "temp_bytes": self.memory.temp,
            "code_bytes": self.memory.code,
        }


class ProgramRow(TypedDict):
    """A `ProgramReport` as JSON."""

    name: str
    source: Source | None
    seconds_trace: float
    seconds_compile: float
    seconds_load: float
    seconds_run: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int


class Snapshot(TypedDict):
    """The JSON of ``GET /warmup``."""

    mode: str
    state: str
    programs: list[ProgramRow]
    done: int
    total: int
    eta_seconds: float | None
    startup: dict[str, float | None]  # seconds of each stage; null for one that has not ended, or is left out
    compiles_since_ready: int
    traces_since_ready: int
    error: NotRequired[str]


class WarmupReport:
    """The report of one start.

    ``started`` is when the process began, on ``clock``'s scale; ``clock`` is `time.monotonic` but in tests.
    """

    def __init__(
        self,
        mode: str,
        *,
        guard: Guard | None = None,
        started: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.mode = mode
        self._guard = guard
        self._clock = clock
        self._started = clock() if started is None else started
        self._lock = threading.Lock()
        self._state: State = "loading"
        self._error: str | None = None
        self._programs: dict[str, ProgramReport] = {}
        self._stages: dict[Stage, float] = {}
        self._total: float | None = None
        self._began: float | None = None  # when warming began
        self._touching: float | None = None  # when the first touch-run began
        self._touch_seconds = 0.0

    # Written by warmup.

    def begin(self, names: Sequence[str]) -> None:
        """The table is known; its programs are being prepared."""
        with self._lock:
            self._programs = {name: ProgramReport(name) for name in names}
            self._began = self._clock()
            self._touching = None
            if self._state == "loading":
                self._state = "warming"

    def prepared(
        self,
        name: str,
        source: Source,
        memory: ProgramMemory,
        *,
        trace: float = 0.0,
        compile: float = 0.0,
        load: float = 0.0,
    ) -> None:
        """A program can be called. Times in seconds."""
        with self._lock:
            row = self._programs[name]
            row.source, row.memory = source, memory
            row.seconds_trace, row.seconds_compile, row.seconds_load = trace, compile, load

    def touching(self) -> None:
        """All programs are prepared; the touch-runs begin."""
        with self._lock:
            self._touching = self._clock()

    def touched(self, name: str, seconds: float) -> None:
        """A program has run once. What makes the buffers ran when they were made: its time is added to."""
        with self._lock:
            row = self._programs[name]
            row.seconds_run += seconds
            row.touched = True
            if self._touching is not None:
                self._touch_seconds = self._clock() - self._touching

    def set_stage(self, stage: Stage, seconds: float) -> None:
        """How long a stage of the start took; stages may overlap."""
        with self._lock:
            self._stages[stage] = seconds

    @contextlib.contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        """Times its block as a stage."""
        began = self._clock()
        try:
            yield
        finally:
            self.set_stage(stage, self._clock() - began)

    def ready(self) -> None:
        """The server is ready."""
        with self._lock:
            self._state = "ready"
            self._total = self._clock() - self._started

    def fail(self, message: str) -> None:
        """The start failed."""
        with self._lock:
            self._state = "failed"
            self._error = message
            self._total = self._clock() - self._started

    # Read by anyone.

    @property
    def state(self) -> State:
        return self._state

    @property
    def touch_seconds(self) -> float:
        """From the beginning of the touch-runs to the end of the last; less than their sum, for some run side by
        side."""
        return self._touch_seconds

    @property
    def programs(self) -> tuple[ProgramReport, ...]:
        """Copies of the rows, in the order of the table."""
        with self._lock:
            return tuple(dataclasses.replace(row) for row in self._programs.values())

    def snapshot(self) -> Snapshot:
        """The JSON of ``GET /warmup``. ``eta_seconds`` is null until it can be told, 0 when there is nothing left."""
        serving = None if self._guard is None else self._guard.counts("serving")
        with self._lock:
            rows = self._programs.values()
            result: Snapshot = {
                "mode": self.mode,
                "state": self._state,
                "programs": [row.as_dict() for row in rows],
                "done": sum(row.touched for row in rows),
                "total": len(self._programs),
                "eta_seconds": self._eta(),
                "startup": {
                    "seconds_import": self._stages.get("import"),
                    "seconds_weights": self._stages.get("weights"),
                    "seconds_programs": self._stages.get("programs"),
                    "seconds_proof": self._stages.get("proof"),
                    "seconds_total": self._total if self._total is not None else self._clock() - self._started,
                },
                "compiles_since_ready": serving.compiles if serving else 0,
                "traces_since_ready": serving.traces if serving else 0,
            }
            if self._error is not None:
                result["error"] = self._error
            return result

    def progress(self) -> str | None:
        """One line on how far warming is; `None` before the table is known and once all programs have run."""
        with self._lock:
            if self._began is None or self._state != "warming":
                return None
            touching = self._touching is not None
            done = sum(row.touched if touching else row.source is not None for row in self._programs.values())
            total, eta = len(self._programs), self._eta()
        if touching and done == total:
            return None
        left = "" if eta is None else f", about {eta:.0f} s left"
        return f"{done} of {total} programs {'have run' if touching else 'are compiled or loaded'}{left}"

    def _eta(self) -> float | None:
        """Seconds until every program has run, from the mean time of those done in the current phase (prepare, then
        touch)."""
        if self._state in ("ready", "failed"):
            return 0.0
        if self._began is None:
            return None
        rows = self._programs.values()
        now = self._clock()
        if self._touching is not None:
            done, since = sum(row.touched for row in rows), self._touching
        else:
            done, since = sum(row.source is not None for row in rows), self._began
        if done == 0:
            return None
        return round((now - since) / done * (len(self._programs) - done), 3)

    def table(self) -> str:
        """The rows as text for the log, times in seconds and bytes in MiB, and a line of sums."""
        header = ("program", "source", "trace", "compile", "load", "run", "args", "out", "alias", "temp", "code")
        rows = self.programs
        lines: list[tuple[str, ...]] = [header]
        for row in rows:
            memory = row.memory
            lines.append(
                (
                    row.name,
                    row.source or "-",
                    *(
                        f"{value:.3f}"
                        for value in (row.seconds_trace, row.seconds_compile, row.seconds_load, row.seconds_run)
                    ),
                    *(
                        f"{value / _MIB:.1f}"
                        for value in (memory.argument, memory.output, memory.alias, memory.temp, memory.code)
                    ),
                )
            )
        sums = [
            sum(getattr(row, field) for row in rows)
            for field in ("seconds_trace", "seconds_compile", "seconds_load", "seconds_run")
        ]
        code = sum(row.memory.code for row in rows)
        lines.append(
            (f"{len(rows)} programs", "", *(f"{value:.3f}" for value in sums), "", "", "", "", f"{code / _MIB:.1f}")
        )
        return format_table(lines)


def format_table(lines: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first to the left, the others to the right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
