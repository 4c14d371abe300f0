"""What all benchmarks print: tables in Markdown, the same as JSON, a picture, and the conditions they were taken under.

A benchmark makes a `Report`; `add_options` gives it ``--quick``, ``--json`` and ``--png``, and `emit` does what they
ask.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cell = str | int | float | None  # `None`: not measured


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows under columns; the first column names the row. ``note`` says what the figures are."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Cell]]
    note: str = ""

    def text(self) -> str:
        lines = [f"**{self.title}**", "", _line(self.columns), "|" + " --- |" * len(self.columns)]
        lines += [_line([_shown(cell) for cell in row]) for row in self.rows]
        return "\n".join([*lines, *(("", self.note) if self.note else ())])


@dataclasses.dataclass
class Report:
    """What one run of a benchmark found. ``missed`` names what was promised and not reached."""

    name: str
    conditions: dict[str, Cell]
    tables: list[Table] = dataclasses.field(default_factory=list)
    missed: list[str] = dataclasses.field(default_factory=list)

    def add(self, table: Table, missed: Sequence[str] = ()) -> None:
        """A table, and promises that it shows to be missed. Shown on standard error at once: a run may take minutes."""
        self.tables.append(table)
        self.missed += missed
        print(f"{table.text()}\n", file=sys.stderr, flush=True)

    def text(self) -> str:
        conditions = ", ".join(f"{name} {_shown(value)}" for name, value in self.conditions.items())
        parts = [f"{self.name}: {conditions}", *(table.text() for table in self.tables)]
        return "\n\n".join([*parts, *(f"Not reached: {what}" for what in self.missed)])


def conditions(**more: Cell) -> dict[str, Cell]:
    """The machine and the versions, and how busy the machine was when the run began (one-minute load average)."""
    found: dict[str, Cell] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "Python": platform.python_version(),
        "jax": metadata.version("jax"),
    }
    return found | more


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="as short as possible: shows that it runs, not how fast")
    parser.add_argument("--json", type=Path, help="write the report as JSON")
    parser.add_argument("--png", type=Path, help="write a chart (needs matplotlib)")


def emit(report: Report, options: argparse.Namespace, draw: Callable[[Figure], None] | None = None) -> int:
    """Prints the report and writes what was asked for. Returns the exit code: 1 if a promise was missed, which a quick
    run cannot do."""
    print(report.text(), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(dataclasses.asdict(report), indent=1) + "\n")
    if options.png is not None and draw is not None:
        picture(options.png, draw)
    return 1 if report.missed and not options.quick else 0


def picture(path: Path, draw: Callable[[Figure], None]) -> None:
    """A chart without a display; ``draw`` fills the figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(9, 4), layout="constrained")
    draw(figure)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def bars(table: Table, unit: str) -> Callable[[Figure], None]:
    """Draws the numbers of a table: a group of bars for each row, one bar for each column."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        columns = [
            index for index in range(1, len(table.columns))
            if all(isinstance(row[index], int | float | None) for row in table.rows)
        ]  # fmt: skip
        width = 0.8 / max(1, len(columns))
        for place, index in enumerate(columns):
            heights = [0.0 if row[index] is None else float(row[index]) for row in table.rows]  # type: ignore[arg-type]
            lefts = [group + (place - (len(columns) - 1) / 2) * width for group in range(len(heights))]
            axes.bar(lefts, heights, width, label=table.columns[index])
        axes.set_xticks(range(len(table.rows)), [str(row[0]) for row in table.rows], rotation=15, ha="right")
        axes.set_ylabel(unit)
        axes.set_title(table.title)
        axes.legend()

    return draw


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _shown(cell: Cell) -> str:
    """Three figures that count, or the whole number."""
    if cell is None:
        return "-"
    if not isinstance(cell, float):
        return str(cell)
    if abs(cell) >= 100:
        return f"{cell:.0f}"
    return f"{cell:.3g}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
