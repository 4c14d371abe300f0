"""One script for a machine with a GPU (or TPU): what the engine reaches there, and what its starts cost.

``python -m benchmarks.gpu [--shapes llama-1b,llama-8b]`` makes random weights in bfloat16 on the device and measures,
for each shape:

* decode tokens per second at batch 1, 8 and 64 (128 prompt tokens; ms a step and % of the memory bandwidth that this
  script measured), and prefill tokens per second (% of the matrix-product peak it measured);
* the same decode steps with ahead-of-time executables (aot) and with the jitted functions (manual), in turn;
* with ``--transformers-python P``, the same shape in Hugging Face transformers in the same rounds.

Then four starts in processes of their own, of the first shape: cold and again, aot and manual, stage by stage: compile
or load, weights (random ones, so only their making), allocation, first runs. ``--quick`` does all of it with a tiny
shape, on any device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.bare_engine import SHAPES, BareEngine, layout, make_engine, parameters, random_weights
from benchmarks.engine import prompt_operations, step_bytes
from benchmarks.machine import Machine
from benchmarks.output import Report, Table, add_options, bars, conditions, emit
from benchmarks.peer_worker import Absent, Worker
from engine.jax_engine import JaxEngine
from engine.programs import Executable
from warmup import plan
from warmup.guard import Guard
from warmup.prepare import Mode, open_store, prepare_fitting
from warmup.report import WarmupReport

PROMPT, STEPS = 128, 64
STARTS = (("aot, cold", "aot"), ("aot, again", "aot"), ("manual, cold", "manual"), ("manual, again", "manual"))


def options(shape: str, batches: Sequence[int], bucket: int) -> dict[str, Any]:
    """Of `preheat serve`, for the figures and the starts alike."""
    return {
        "slots": batches[-1], "max_len": max(1024, bucket), "batch_sizes": tuple(batches),
        "prefill_buckets": (PROMPT, bucket),
        "prefill_chunk": bucket, "dtype": "auto" if shape != "llama-tiny" else "float32",
    }  # fmt: skip


def measure(
    shape: str, batches: Sequence[int], bucket: int, rounds: int, machine: Machine, peer: Worker | None
) -> list[Table]:
    model = SHAPES[shape]
    config = layout(model, **options(shape, batches, bucket))
    aot = make_engine(model, config)
    engine = aot.engine
    itemsize = jax.numpy.dtype(config.dtype).itemsize
    table = {program.name: program.function for program in engine.programs()}
    executables = dict(engine._executables)
    modes: dict[str, Mapping[str, Executable]] = {"aot": executables, "manual": table}
    names = [*modes, *(["transformers"] if peer else [])]
    found: dict[int, dict[str, list[float]]] = {batch: {name: [] for name in names} for batch in batches}
    shares: dict[int, list[float]] = {batch: [] for batch in batches}
    prefill: dict[str, list[float]] = {name: [] for name in names if name != "manual"}
    long = aot.prompt(bucket)
    for number in range(rounds + 1):  # the first warms up
        for batch in batches:
            for mode, functions in modes.items():
                engine.install(functions)
                seconds = _steps(aot, batch)
                if number:
                    found[batch][mode].append(batch * STEPS / seconds)
                    if mode == "aot":
                        ideal = (
                            step_bytes(model, engine.abstract_weights, aot.live(batch), itemsize) / machine.bandwidth()
                        )
                        shares[batch].append(ideal * STEPS / seconds)
            if peer is not None:
                prompts = [aot.prompt(PROMPT, row).tolist() for row in range(batch)]
                seconds, _ = peer.decode(prompts, STEPS + 1)
                if number:
                    found[batch]["transformers"].append(batch * STEPS / seconds)
        engine.install(executables)
        seconds = min(aot.prefill(long) for _ in range(3))
        other = None if peer is None else min(peer.prefill(long.tolist()) for _ in range(3))
        if number:
            prefill["aot"].append(bucket / seconds)
            if other is not None:
                prefill["transformers"].append(bucket / other)
    rows = [
        (batch, *(statistics.median(figures[name]) for name in names),
         1e3 * batch / statistics.median(figures["aot"]), 100 * statistics.median(shares[batch]))
        for batch, figures in found.items()
    ]  # fmt: skip
    columns = ("batch", *(f"{name}, tokens/s" for name in names), "aot, ms a step", "% of bandwidth")
    note = (
        f"{parameters(model) / 1e9:.2f} G parameters in {config.dtype}, {PROMPT} prompt + {STEPS} new tokens, "
        f"medians of {rounds} rounds."
    )
    rate = statistics.median(prefill["aot"])
    share = 100 * prompt_operations(model, bucket) * rate / bucket / machine.matmul_peak()
    others = [statistics.median(values) for name, values in prefill.items() if name != "aot"]
    return [
        Table(f"{shape}: decode", columns, rows, note),
        Table(
            f"{shape}: prefill",
            ("tokens", *(f"{name}, tokens/s" for name in prefill), "% of matmul peak"),
            [(bucket, rate, *others, share)],
        ),
    ]


def _steps(bare: BareEngine, batch: int) -> float:
    for slot in range(batch):
        bare.start(bare.prompt(PROMPT, slot), slot)
    bare.decode(batch, 2)
    return bare.decode(batch, STEPS)[0]


def start_once(mode: Mode, cache: Path, shape: str, batches: Sequence[int], bucket: int) -> dict[str, float | int]:
    """One start in this process, stage by stage; seconds."""
    began = time.monotonic()
    model = SHAPES[shape]
    devices = jax.devices()[:1]
    device = time.monotonic()
    with Guard() as guard:
        report = WarmupReport(mode, guard=guard, started=began)
        config = layout(model, **options(shape, batches, bucket))
        budget = plan.memory_budget(None, devices)
        store = open_store(cache, model, config, devices, budget=budget)
        engine, prepared, _ = prepare_fitting(
            lambda layout: JaxEngine(model, layout, devices), config, mode, store, budget, report=report, guard=guard
        )
        programs = time.monotonic()
        engine.set_weights(random_weights(engine.abstract_weights))
        weights = time.monotonic()
        engine.install(prepared.executables)
        engine.allocate()
        allocated = time.monotonic()
        prepared.touch_all(engine)
        touched = time.monotonic()
        counts = guard.counts("startup")
    return {
        "device": device - began, "programs": programs - device, "weights": weights - programs,
        "allocate": allocated - weights, "first runs": touched - allocated, "compiles": counts.compiles,
    }  # fmt: skip


def starts(shape: str, quick: bool) -> Table:
    rows = []
    columns: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, mode in STARTS:
            command = [sys.executable, "-m", "benchmarks.gpu", "--child", mode, folder, "--shapes", shape]
            done = subprocess.run(
                [*command, *(["--quick"] if quick else [])], stdout=subprocess.PIPE, text=True, check=True
            )
            stages = json.loads(done.stdout.splitlines()[-1])
            columns = list(stages)
            rows.append((name, *stages.values()))
    note = (
        "Seconds after imports, each start in a process of its own. Random weights are made by programs of their own, "
        "whose compiles are counted too."
    )
    return Table(f"{shape}: starts", ("start", *columns), rows, note)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="llama-1b,llama-8b", help=f"comma-separated, of {', '.join(SHAPES)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transformers-python", metavar="P", help="an interpreter that has transformers and torch")
    parser.add_argument("--no-starts", action="store_true", help="leave out the four starts")
    parser.add_argument("--child", nargs=2, metavar=("MODE", "CACHE"), help=argparse.SUPPRESS)
    add_options(parser)
    parsed = parser.parse_args(arguments)
    shapes = ["llama-tiny"] if parsed.quick else parsed.shapes.split(",")
    batches, bucket = ((1, 2), 256) if parsed.quick else ((1, 8, 64), 1024)
    if parsed.child:
        mode, cache = parsed.child
        print(json.dumps(start_once(mode, Path(cache), shapes[0], batches, bucket)))
        return 0
    # Before this process takes the device's memory.
    started = [] if parsed.no_starts else [starts(shapes[0], parsed.quick)]
    report = Report("benchmarks.gpu", conditions(device=jax.devices()[0].device_kind), started)
    for shape in shapes:
        dtype = layout(SHAPES[shape], **options(shape, batches, bucket)).dtype
        with contextlib.ExitStack() as stack:
            peer = None
            if parsed.transformers_python:
                try:
                    peer = stack.enter_context(
                        Worker(parsed.transformers_python, "benchmarks.peer_random", _shape_file(shape, stack))
                    )
                except Absent as error:
                    report.tables.append(Table("Not compared with", ("peer", "why"), [("transformers", str(error))]))
            machine = Machine(dtype, quick=parsed.quick)
            if shape == shapes[0]:
                figures = [
                    ("bytes read, GB/s", machine.read_bandwidth() / 1e9),
                    ("matrix-vector product, GB/s", machine.product_bandwidth() / 1e9),
                    (f"matrix product in {dtype}, TFlop/s", machine.matmul_peak() / 1e12),
                ]
                report.tables.append(Table("The device", ("", "measured"), figures))
            report.tables += measure(shape, batches, bucket, 1 if parsed.quick else parsed.rounds, machine, peer)
    decoded = next(table for table in report.tables if table.title.endswith("decode"))
    return emit(report, parsed, bars(decoded, "tokens/s; ms; %"))


def _shape_file(shape: str, stack: contextlib.ExitStack) -> Path:
    """The shape as Hugging Face's config.json, for a peer that makes its own random weights."""
    model = SHAPES[shape]
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    config = {
        "vocab_size": model.vocab_size, "hidden_size": model.hidden_size, "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers, "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim,
        "max_position_embeddings": model.max_position,
        "tie_word_embeddings": model.tie_embeddings, "rms_norm_eps": model.norm_eps,
    }  # fmt: skip
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


if __name__ == "__main__":
    sys.exit(main())
