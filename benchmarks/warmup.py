"""How long a start takes: cold, with JAX's persistent cache, and with ahead-of-time executables.

``python -m benchmarks.warmup [--model M] [--chart warmup.png]`` runs four starts, each in a process of its own, on a
cache made for the occasion: manual (cold, then again) and aot (cold, then again), up to where every program has run once. A fifth
process loads what was stored with nothing beside it. It prints a table of the stages, the compile counters and the ratios that
the project promises, and draws the timeline.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.programs import Program
    from warmup.prepare import Mode

LOADS = 5  # rounds
STARTS = (("manual, cold", "manual"), ("manual, again", "manual"), ("aot, cold", "aot"), ("aot, again", "aot"))


def child(mode: Mode, cache: Path, model: str) -> None:
    """One start. Prints its numbers as a line of JSON."""
    began = time.monotonic()
    from server.config.commands import ServeConfig
    from server.start.warm_engine import open_model, warm_engine
    from warmup.guard import Guard
    from warmup.report import WarmupReport

    imported = time.monotonic() - began
    with Guard() as guard:
        report = WarmupReport(mode, guard=guard, started=began)
        config = ServeConfig(model=model, warmup=mode, warmup_cache=cache)
        warm_engine(config, open_model(config), report, guard)
        report.ready()
        counts = guard.counts("startup")
        snapshot = report.snapshot()
    startup, rows = snapshot["startup"], snapshot["programs"]
    buffers = next(row["seconds_run"] for row in rows if row["name"] == "init_state")  # ran beside the weights
    print(
        json.dumps(
            {
                "import": imported,
                "weights": startup["seconds_weights"],
                "programs": startup["seconds_programs"],
                "touch": buffers + report.touch_seconds,
                "total": startup["seconds_total"],
                "count": len(rows),
                "traces": counts.traces,
                "lowerings": counts.lowerings,
                "compiles": counts.compiles,
            }
        )
    )


def load_child(cache: Path, model: str) -> None:
    """The stored programs, loaded as a start does with nothing beside it, and their bytes deserialized in as many threads,
    in turn. Prints the medians of both, in seconds, as a line of JSON."""
    import jax
    from jax.experimental import serialize_executable

    from engine.jax_engine import JaxEngine
    from server.config.commands import ServeConfig
    from server.start.warm_engine import engine_config, open_model, select_devices
    from warmup import plan
    from warmup.compiling import worker_count
    from warmup.fingerprint import ArgumentDescriber
    from warmup.guard import Guard
    from warmup.prepare import open_store, prepare
    from warmup.report import WarmupReport
    from warmup.store import Artifact

    config = ServeConfig(model=model, warmup="aot", warmup_cache=cache)
    opened, devices = open_model(config), select_devices(config)
    layout = engine_config(config, opened.config, devices[0].platform)
    store = open_store(cache, opened.config, layout, devices, budget=plan.memory_budget(None, devices))
    kv_pages = store.resolved["kv_pages"]
    assert isinstance(kv_pages, int)
    layout = dataclasses.replace(layout, kv_pages=kv_pages)
    engine = JaxEngine(opened.config, layout, devices)
    describer = ArgumentDescriber({"kv_pages": layout.kv_pages})

    def deserialize(item: tuple[Program, Artifact]) -> jax.stages.Compiled:
        program, found = item
        trees = jax.tree.structure((program.arguments, {})), jax.tree.structure(found.out_tree)
        loaded: jax.stages.Compiled = serialize_executable.deserialize_and_load(
            found.payload, *trees, backend=devices[0].client, execution_devices=devices
        )
        return loaded

    stored = []
    for program in engine.programs():
        found = store.load(program.name, describer.digest(program), list)
        if not isinstance(found, Artifact):
            raise SystemExit(f"{program.name} is not stored: {found.reason}")
        stored.append((program, found))
    times: dict[str, list[float]] = {"load": [], "bare": []}
    with Guard() as guard, concurrent.futures.ThreadPoolExecutor(worker_count()) as pool:
        for _ in range(LOADS):
            began = time.monotonic()
            loaded = prepare(engine, "aot", store, report=WarmupReport("aot", guard=guard), guard=guard)
            times["load"].append(time.monotonic() - began)
            began = time.monotonic()
            executables = list(pool.map(deserialize, stored))
            times["bare"].append(time.monotonic() - began)
            del loaded, executables  # what freeing them takes is nobody's
    print(json.dumps({name: statistics.median(values) for name, values in times.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--chart", type=Path, help="write the timeline as a PNG")
    parser.add_argument("--child", nargs=2, metavar=("MODE", "CACHE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child and arguments.child[0] == "load":
        load_child(Path(arguments.child[1]), arguments.model)
        return
    if arguments.child:
        child(arguments.child[0], Path(arguments.child[1]), arguments.model)
        return
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, mode in (*STARTS, ("loading", "load")):
            command = [
                sys.executable,
                "-m",
                "benchmarks.warmup",
                "--model",
                arguments.model,
                "--child",
                mode,
                f"{folder}/cache",
            ]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            results[name] = json.loads(done.stdout.splitlines()[-1])
    loading = results.pop("loading")
    columns = ("import", "weights", "programs", "touch", "total", "traces", "compiles")
    print("| start | " + " | ".join(columns) + " |\n|" + " --- |" * (len(columns) + 1))
    for name, result in results.items():
        cells = [
            f"{result[column]:.2f}" if isinstance(result[column], float) else str(result[column]) for column in columns
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")
    again, cold = results["aot, again"], results["aot, cold"]
    ideal = again["import"] + max(again["weights"], again["programs"]) + again["touch"]
    print(f"\nloading all programs / compiling them: {loading['load'] / cold['programs']:.3f} (at most 0.05)")
    print(f"loading all programs / deserializing their bytes: {loading['load'] / loading['bare']:.2f} (at most 1.2)")
    print(f"total / (import + longer of weights and programs + touch): {again['total'] / ideal:.2f} (at most 1.15)")
    if arguments.chart:
        chart(results, arguments.chart)


def chart(results: dict[str, dict[str, float]], path: Path) -> None:
    """The timeline: weights load beside the programs, touch runs follow both."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 3.5), layout="constrained")
    for row, result in enumerate(results.values()):
        after = result["import"] + max(result["weights"], result["programs"])
        bars = (
            ("import", 0, result["import"], 0, "C7"),
            ("programs", result["import"], result["programs"], -0.2, "C0"),
            ("weights", result["import"], result["weights"], 0.2, "C2"),
            ("touch", after, result["touch"], 0, "C1"),
        )
        for label, left, width, offset, color in bars:
            half = offset != 0
            axes.barh(row + offset, width, 0.4 if half else 0.8, left, color=color, label=label if row == 0 else None)
    axes.set_yticks(range(len(results)), results.keys())
    axes.invert_yaxis()
    axes.set_xlabel("seconds from the start of the process")
    axes.legend(ncols=4, loc="lower right")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
