"""Why ahead-of-time serving was slow: step time and memory with the donation kept and lost.

A server that lowered ``jax.jit(engine.generate)`` around a method that was jitted *with donation* found its decode
steps slower the larger the batch, and ran out of memory. ``python -m benchmarks.aot_regression`` repeats that for each
batch size with three executables of the same decode program, each prepared as a start prepares it:

manual          the donating jitted function itself
aot             the same function, compiled, stored and loaded back
aot, lost       ``jax.jit`` around it: the inner donation does not survive, and every step writes a second KV cache

For each batch size, one process prepares all three, which fills the caches of the other processes, and times them. They
act on one engine and take turns step by step, in an order that changes from turn to turn, so that a drift of the
machine hits all alike. ``manual`` is in each turn twice: *again* is what the method finds where nothing differs.
A ratio is the median of the turns' ratios: on a busy machine its standard error (bootstrap, of *again*) was
0.003-0.009 where that of the ratio of medians was 0.005-0.022. The figure behind ``±`` is half of the 95 % interval of
that median. ``lost`` is timed last, against ``manual`` alone, because its allocations disturb whoever runs next. Before
that, each has chosen some tokens from the same state.

Peak memory is a second start's, in a process of its own: it reads what the first one stored (``manual``: JAX's
persistent cache), holds the weights and the state, runs every program and some steps. With ``--target v5e-4`` the
numbers are ``memory_analysis`` of the decode program of a server on that TPU slice, compiled here (needs libtpu).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from benchmarks.bare_engine import GREEDY, SHAPES, layout
from benchmarks.output import Report, Table, add_options, conditions, emit
from engine.api import Row
from engine.config import EngineConfig, ModelConfig
from engine.jax_engine import JaxEngine
from engine.loader import ALIGNMENT
from engine.programs import Executable, Jitted, Program, tree_bytes
from engine.weights import Weights
from warmup.compiling import memory_of
from warmup.guard import Guard
from warmup.prepare import Mode, open_store, prepare
from warmup.report import WarmupReport
from warmup.target import parse_target, target_devices

VARIANTS: dict[str, Mode] = {"manual": "manual", "aot": "aot", "aot, lost": "aot"}  # and how each is warmed up
CONTEXT = 256  # live tokens of each row, at most
PROMPT, STEPS = 192, 31  # tokens of each row at first; steps until it is filled again: within one page
CHECKED = 8  # steps whose tokens are compared
MIB = 2**20
TIME_LIMITS, MEMORY_LIMIT = (0.97, 1.03), 1.02  # of aot against manual


class LostEngine(JaxEngine):
    """An engine whose decode programs are the jitted functions inside another jit. Warmup's check of what is aliased
    would refuse them, so they say that they donate nothing; and so it is."""

    def programs(self) -> tuple[Program, ...]:
        return tuple(
            dataclasses.replace(program, function=around(program), donates=None, takes_state=False)
            if program.name.startswith("generate/")
            else program
            for program in super().programs()
        )


def around(program: Program) -> Jitted:
    """A jit around the jitted function."""
    return cast(Jitted, jax.jit(lambda *arguments: program.function(*arguments)))


def describe(options: argparse.Namespace, batch: int) -> tuple[ModelConfig, EngineConfig]:
    """A Llama with one decode program of one batch size, laid out as on a server, though never in segments."""
    model = dataclasses.replace(SHAPES["llama-125m"], num_layers=options.layers)
    if options.quick:
        model = SHAPES["llama-tiny"]
    config = layout(model, slots=batch, max_len=options.max_len, batch_sizes=(batch,), prefill_buckets=(CONTEXT,))
    return model, dataclasses.replace(config, call_bytes=0)


def random_weights(abstract: Weights) -> Weights:
    """Made in place, so that they take their own size and no more: nothing is compiled, nothing is copied on CPU."""
    generator = np.random.default_rng(0)

    def make(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        size = math.prod(leaf.shape)
        room = np.empty(size + ALIGNMENT // 4, np.float32)
        first = -room.ctypes.data % ALIGNMENT // 4
        values = generator.standard_normal(out=room[first : first + size], dtype=np.float32)
        values *= np.float32(0.02)
        made: jax.Array = jax.device_put(values.reshape(leaf.shape).astype(leaf.dtype, copy=False), leaf.sharding)
        return made

    weights: Weights = jax.tree.map(make, abstract)
    return weights


def start(
    options: argparse.Namespace, batch: int, variant: str, root: Path, weights: Weights | None = None
) -> tuple[JaxEngine, Mapping[str, Executable], Weights]:
    """Prepares one variant from its own cache under ``root``, as a server does, and runs every program once."""
    model, config = describe(options, batch)
    engine = (LostEngine if variant == "aot, lost" else JaxEngine)(model, config, jax.devices()[:1])
    weights = random_weights(engine.abstract_weights) if weights is None else weights
    mode = VARIANTS[variant]
    with Guard() as guard:
        store = open_store(root / variant.replace(", ", "-"), model, config, engine.devices)
        prepared = prepare(engine, mode, store, report=WarmupReport(mode, guard=guard), guard=guard)
        engine.install(prepared.executables)
        engine.allocate()
        engine.set_weights(weights)
        prepared.touch_all(engine)
    return engine, prepared.executables, weights


def fill(engine: JaxEngine) -> list[Row]:
    """Every slot holds a prompt of PROMPT tokens. Returns the rows of a step."""
    per_slot = engine.config.pages_per_slot
    prefix = engine.acquire_prefix()
    first = engine.prefill(prefix, np.arange(PROMPT, dtype=np.int32), 0, GREEDY, last=True)
    rows = []
    for slot in range(engine.config.slots):
        pages = 1 + slot * per_slot + np.arange(per_slot, dtype=np.int32)
        engine.insert(prefix, first, slot, pages[: PROMPT // engine.config.page_size], PROMPT, GREEDY)
        rows.append(Row(slot, int(pages[PROMPT // engine.config.page_size])))
    engine.release_prefix(prefix)
    return rows


def alternate(engine: JaxEngine, tables: Sequence[Mapping[str, Executable]], seconds: float) -> list[list[float]]:
    """Seconds of a step with each of these tables of executables, which take turns for so long; one list a turn."""
    orders = itertools.cycle(itertools.permutations(range(len(tables))))
    turns: list[list[float]] = []
    ends = time.perf_counter() + seconds
    while not turns or time.perf_counter() < ends:
        rows = fill(engine)
        engine.read(engine.generate(rows))  # waits for the inserts
        for _ in range((STEPS - 1) // len(tables)):
            turn = [0.0] * len(tables)
            for index in next(orders):
                engine.install(tables[index])
                began = time.perf_counter()
                engine.read(engine.generate(rows))
                turn[index] = time.perf_counter() - began
            turns.append(turn)
            if time.perf_counter() > ends:
                break
    return turns


def times(options: argparse.Namespace, batch: int, root: Path) -> dict[str, object]:
    """Prepares and stores all variants, and times them. Turns are of (manual, manual again, aot) and (manual, lost)."""
    executables, weights = {}, None
    for variant in VARIANTS:
        engine, executables[variant], weights = start(options, batch, variant, root, weights)
    name = f"generate/{batch}"
    tables = {variant: {**executables["manual"], name: executables[variant][name]} for variant in VARIANTS}
    tokens = {}
    for variant in VARIANTS:
        engine.install(tables[variant])
        rows = fill(engine)
        tokens[variant] = [engine.read(engine.generate(rows)).tokens.tolist() for _ in range(CHECKED)]
    kept = [tables["manual"], tables["manual"], tables["aot"]]
    return {
        "kept": alternate(engine, kept, options.seconds),
        "lost": alternate(engine, [tables["manual"], tables["aot, lost"]], options.seconds / 4),
        "same": tokens["manual"] == tokens["aot"] == tokens["aot, lost"],
        "kv": tree_bytes((engine.abstract_state.k_pages, engine.abstract_state.v_pages)) / MIB,
    }


def memory(options: argparse.Namespace, batch: int, variant: str, root: Path) -> dict[str, float]:
    """MiB of memory that this process has held at most, and holds after some steps of one variant."""
    engine, _, _ = start(options, batch, variant, root)
    rows = fill(engine)
    for _ in range(CHECKED):
        engine.read(engine.generate(rows))
    status = Path("/proc/self/status").read_text()  # getrusage would count what the parent held before exec
    peak, now = (int(status.split(f"\n{field}:")[1].split()[0]) / 1024 for field in ("VmHWM", "VmRSS"))
    return {"peak": peak, "steady": now}


def ask(options: argparse.Namespace, batch: int, what: str, root: Path) -> Any:
    """The answer of a child process."""
    command = [sys.executable, "-m", "benchmarks.aot_regression", "--child", what, str(root), "--batches", str(batch)]
    for name in ("layers", "max_len", "seconds"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    command += ["--quick"] if options.quick else []
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    return json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Median of ratios, and half of its 95 % interval."""

    median: float
    error: float

    @classmethod
    def of(cls, turns: Sequence[Sequence[float]], above: int, below: int) -> Ratio:
        """The interval's ends are order statistics, of binomial ranks in normal approximation."""
        ratios = sorted(turn[above] / turn[below] for turn in turns)
        reach = 0.98 * math.sqrt(len(ratios))
        low = max(0, math.floor(len(ratios) / 2 - reach))
        high = min(len(ratios), math.ceil(len(ratios) / 2 + reach)) - 1
        return cls(statistics.median(ratios), (ratios[high] - ratios[low]) / 2)

    def __str__(self) -> str:
        return f"{self.median:.3f} ± {self.error:.3f}"





def on_cpu(options: argparse.Namespace, report: Report) -> None:
    """A row of both tables for each batch size."""
    steps, peaks = [], []
    for batch in options.batches:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            timed = ask(options, batch, "times", root)
            repeats = {"manual": options.repeats, "aot": options.repeats, "aot, lost": 1}
            held = {name: [ask(options, batch, name, root) for _ in range(count)] for name, count in repeats.items()}
        kept, lost, kv = timed["kept"], timed["lost"], f"{timed['kv']:.0f}"
        null, aot = Ratio.of(kept, 1, 0), Ratio.of(kept, 2, 0)
        seconds = statistics.median(turn[0] for turn in kept)
        same = "yes" if timed["same"] else "NO"
        turns = f"{len(kept)} + {len(lost)}"
        slower = f"{Ratio.of(lost, 1, 0).median:.2f}"
        steps.append((batch, kv, f"{seconds * 1e3:.1f}", str(null), str(aot), slower, turns, same))
        if not timed["same"]:
            report.missed.append(f"batch {batch}: the three did not choose the same tokens")
        if not TIME_LIMITS[0] <= aot.median <= TIME_LIMITS[1]:
            report.missed.append(f"batch {batch}: a step of aot takes {aot} of manual's, not {TIME_LIMITS}")

        peak, steady = (
            {variant: statistics.median(run[when] for run in runs) for variant, runs in held.items()}
            for when in ("peak", "steady")
        )
        spread = max(max(run["peak"] for run in runs) - min(run["peak"] for run in runs) for runs in held.values())
        shown = f"{spread:.1f}" if options.repeats > 1 else "-"
        ratio = peak["aot"] / peak["manual"]
        extra = peak["aot, lost"] - peak["aot"]
        now = steady["aot"] / steady["manual"]
        peaks.append((batch, kv, f"{peak['manual']:.0f}", f"{ratio:.3f}", shown, f"{extra:+.0f}", f"{now:.3f}"))
        if ratio > MEMORY_LIMIT:
            report.missed.append(f"batch {batch}: aot holds {ratio:.3f} x manual's memory at most, not {MEMORY_LIMIT}")
        print(f"batch {batch}: {' | '.join(steps[-1][1:])} || {' | '.join(peaks[-1][2:])}", file=sys.stderr, flush=True)
    report.add(
        Table(
            "Decode step",
            ("batch", "KV MiB", "manual ms", "again / manual", "aot / manual", "lost / manual", "turns", "same tokens"),
            steps,
            f"Medians of turns' ratios, ± half of their 95 % interval; {PROMPT}-{PROMPT + STEPS} live tokens a row.",
        )
    )
    report.add(
        Table(
            "Memory of a second start",
            ("batch", "KV MiB", "manual peak MiB", "aot / manual", "spread MiB", "lost - aot MiB", "steady ratio"),
            peaks,
            f"Medians of {options.repeats} processes of manual and aot, one of lost; spread: between the peaks of one "
            "variant, the worse of the two; steady ratio: aot / manual after some steps.",
        )
    )


def on_target(options: argparse.Namespace, report: Report) -> None:
    """Memory per device of the decode step, donation kept and lost, compiled for a TPU slice."""
    target = parse_target(options.target)
    devices = target_devices(target, target.chips)
    model, rows, attention = SHAPES["llama-8b"], [], ""
    for batch in options.batches:
        config = layout(
            model,
            platform="tpu",
            tp=len(devices),
            slots=batch,
            batch_sizes=(batch,),
            max_len=2048,
            prefill_buckets=(512,),
        )
        engine = JaxEngine(model, config, devices)
        attention = engine.attention.explain()
        program = next(program for program in engine.programs() if program.name == f"generate/{batch}")
        for name, function in (("kept", program.function), ("lost", around(program))):
            try:
                memory = memory_of(function.trace(*program.arguments).lower().compile())
            except jax.errors.JaxRuntimeError as error:  # more than the device has
                rows.append((batch, f"{name}: does not compile: {str(error).splitlines()[0][:120]}", *[None] * 5))
                continue
            fresh = memory.output - memory.alias
            numbers = (memory.argument, memory.alias, fresh, memory.temp, memory.argument + fresh + memory.temp)
            rows.append((batch, name, *(f"{number / 2**30:.2f}" for number in numbers)))
    report.add(
        Table(
            f"{target.name}: decode step, GiB per device of {target.hbm / 2**30:.0f}",
            ("batch", "donation", "arguments", "aliased", "new output", "temporaries", "in use"),
            rows,
            f"Llama-3-8B in bfloat16, tp {len(devices)}, 2,048 tokens a slot; {attention}.",
        )
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument(
        "--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4, 8, 16, 32, 64]
    )
    parser.add_argument("--layers", type=int, default=2, help="of the 125M shape, which has 12 (default: %(default)s)")
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=12, help="of steps per batch size (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="processes for each peak (default: %(default)s)")
    parser.add_argument("--target", help="compile for a TPU slice instead, e.g. v5e-4")
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "ROOT"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.max_len < CONTEXT:
        parser.error(f"--max-len {options.max_len}: rows hold up to {CONTEXT} tokens, give at least that")
    if not options.target and not Path("/proc/self/status").exists():
        parser.error("memory is read from /proc, which is there on Linux alone; elsewhere only --target works")
    if options.child:
        what, root = options.child[0], Path(options.child[1])
        (batch,) = options.batches
        print(json.dumps(times(options, batch, root) if what == "times" else memory(options, batch, what, root)))
        return 0
    if options.quick:
        options.seconds, options.repeats = 0, 1
        options.batches = options.batches[:1]
    report = Report("aot_regression", conditions())
    (on_target if options.target else on_cpu)(options, report)
    return emit(report, options)


if __name__ == "__main__":
    sys.exit(main())
