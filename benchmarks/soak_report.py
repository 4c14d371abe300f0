"""What a soak run found, and whether anything of it is wrong. See ``benchmarks/soak.py``."""

from __future__ import annotations

import collections
import dataclasses
import os
import time
from pathlib import Path

import numpy as np

GAUGES = ("preheat_requests_running", "preheat_requests_waiting", "preheat_slots_used", "preheat_kv_pages_used")
LATE_THREADS = 2  # the pools of XLA and gRPC start a thread when they first need it; a leak would be hundreds


@dataclasses.dataclass(frozen=True)
class Reading:
    """One look at a process."""

    at: float  # seconds
    rss: int  # bytes
    threads: int
    files: int  # descriptors


@dataclasses.dataclass
class Report:
    """What happened. `problems` is empty after a good run."""

    seconds: float
    sent: int = 0
    unsure: int = 0  # left so early that the server need not have seen them
    compared: int = 0
    seen: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # outcomes that clients saw
    outcomes: dict[str, int] = dataclasses.field(default_factory=dict)  # as the server counted them
    readings: dict[str, list[Reading]] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)

    def problem(self, text: str) -> None:
        if len(self.problems) < 50:
            self.problems.append(text)

    def slope(self, process: str) -> float:
        """Growth of the resident memory over the second half, in MiB per minute."""
        half = self.readings[process][len(self.readings[process]) // 2 : -1]  # the last one is taken at rest
        if len(half) < 3:
            return 0.0
        minutes = np.array([reading.at for reading in half]) / 60
        return float(np.polyfit(minutes, [reading.rss / 2**20 for reading in half], 1)[0])

    def text(self) -> str:
        lines = [
            f"{self.seconds:.0f} s, {self.sent} requests sent, {self.compared} answers equal to those of solo runs",
            "outcomes: " + ", ".join(f"{name} {count}" for name, count in self.outcomes.items())
            + f"; sum {sum(self.outcomes.values())}; {self.unsure} left at once, of which the server saw "
            f"{self.unsure - (self.sent - sum(self.outcomes.values()))}",
        ]  # fmt: skip
        for name, readings in self.readings.items():
            first, last = readings[0], readings[-1]
            lines.append(
                f"{name}: resident {first.rss / 2**20:.0f} -> {last.rss / 2**20:.0f} MiB, "
                f"slope {self.slope(name):+.2f} MiB/min, "
                f"threads {first.threads} -> {last.threads}, files {first.files} -> {last.files}"
            )
        return "\n".join([*lines, *(f"WRONG: {problem}" for problem in self.problems)])


def judge(report: Report, before: dict[str, float], after: dict[str, float]) -> None:
    """Looks for all that is wrong; ``before`` and ``after`` are the server's series at rest."""
    series = {name: f'preheat_requests_total{{outcome="{name}"}}'
              for name in ("ok", "error", "rejected", "cancelled", "invalid")}  # fmt: skip
    report.outcomes = {name: int(after[key] - before[key]) for name, key in series.items()}
    total = sum(report.outcomes.values())
    if not report.sent - report.unsure <= total <= report.sent:
        report.problem(f"{report.sent} requests were sent ({report.unsure} left at once), {total} have an outcome")
    if report.outcomes["error"]:
        report.problem(f"{report.outcomes['error']} requests ended in an error")
    if report.outcomes["invalid"] != report.seen["invalid"]:
        report.problem(f"clients saw {report.seen['invalid']} refused as invalid, {report.outcomes['invalid']} count")
    if not 0 <= report.outcomes["ok"] - report.seen["ok"] <= report.sent - sum(report.seen.values()):
        report.problem(f"clients saw {report.seen['ok']} answers, {report.outcomes['ok']} count")
    for name in GAUGES:
        if after[name]:
            report.problem(f"{name} is {after[name]} with nothing running")
    for name in ("compiles", "traces"):
        made = after[f'preheat_xla_{name}_total{{phase="serving"}}']
        if made:
            report.problem(f"{made:.0f} {name} while serving")
    fallen = [name for name in before if "_total" in name and after.get(name, 0) < before[name]]
    if fallen:
        report.problem(f"counters have fallen: {fallen}")
    for name, readings in report.readings.items():
        first, last = readings[0], readings[-1]
        if last.threads > first.threads + LATE_THREADS or last.files > first.files:
            report.problem(f"{name}: more threads or files than before: {first} -> {last}")
        growth = report.slope(name) * report.seconds / 2 / 60
        if growth > max(32.0, 0.03 * last.rss / 2**20):
            report.problem(f"{name}: resident memory grew by {growth:.0f} MiB in the second half")
    if not report.compared:
        report.problem("no answer was compared")


def read_process(pid: int) -> Reading:
    """Looks at ``/proc`` (Linux)."""
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
    return Reading(
        time.monotonic(), int(status["VmRSS"].split()[0]) * 1024, int(status["Threads"]), len(os.listdir(folder / "fd"))
    )
