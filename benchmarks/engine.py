"""The engine bare: decode and prefill against what the machine could do, and what its programs cost to compile.

``python -m benchmarks.engine [--models llama-125m,smollm2-135m-instruct]`` measures, for each model:

* decode steps at batch 1, 8 and 32 with 128 prompt and 64 new tokens. A step must read all weights and the keys and
  values of the live tokens; these bytes by the machine's bandwidth, measured in the same round, are the shortest time
  it could take.
* prefill of the largest bucket: its floating-point operations by the machine's matrix-product peak.
* whether a step at 256 live tokens costs more with ``--max-len`` 8192 than with 512.
* programs, and the seconds to trace, lower and compile them, with twice and four times the layers.

Models are names of ``benchmarks.bare_engine.SHAPES`` (random weights), or checkpoints. All figures are medians of
rounds in which everything that is compared runs in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence

import jax

from benchmarks.bare_engine import SHAPES, BareEngine, compile_table, layout, make_engine, model_config, parameters
from benchmarks.machine import Machine
from benchmarks.output import Report, Table, add_options, bars, conditions, emit
from engine.config import ModelConfig
from engine.jax_engine import JaxEngine
from engine.programs import tree_bytes
from engine.weights import Weights
from warmup.target import parse_target, target_devices

PROMISED_ROOFLINE = 0.8  # of the bandwidth, at batch 1
PROMISED_RATIO = 1.1  # of a step with --max-len 8192 to one with 512
PROMPT, NEW = 128, 64
LIVE = 256


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    batches: tuple[int, ...] = (1, 8, 32)
    bucket: int = 512
    rounds: int = 5
    max_lens: tuple[int, int] = (512, 8192)
    layers: tuple[int, ...] = (6, 12, 24)
    table: dict[str, object] = dataclasses.field(
        default_factory=lambda: {"max_len": 2048}
    )  # whose compiling is measured


QUICK = Sizes(
    batches=(1,), bucket=64, rounds=1, max_lens=(512, 512), layers=(1,),
    table={"max_len": 64, "slots": 1, "prefill_chunk": 16},
)  # fmt: skip


def step_bytes(model: ModelConfig, weights: Weights, live: int, itemsize: int) -> int:
    """Bytes that a decode step cannot avoid reading: all weights, but of an embedding that is no head the rows of its
    tokens only (left out), and keys and values of ``live`` tokens."""
    unread = 0 if model.tie_embeddings else tree_bytes(weights.embed)
    cache = 2 * model.num_layers * model.num_kv_heads * model.head_dim * itemsize * live
    return tree_bytes(weights) - unread + cache


def prompt_operations(model: ModelConfig, tokens: int) -> int:
    """Floating-point operations of a prompt: two for each weight and token but for the head, which sees one token; and
    two products of tokens by head dimensions for each query and what it sees."""
    head = model.vocab_size * model.hidden_size
    tables = head * (1 if model.tie_embeddings else 2)
    attention = 4 * model.num_layers * model.num_heads * model.head_dim * tokens * (tokens + 1) // 2
    return 2 * (parameters(model) - tables) * tokens + 2 * head + attention


def measure_steps(bare: BareEngine, machine: Machine, sizes: Sizes, name: str) -> tuple[Table, Table, list[str]]:
    """Decode by batch size, and prefill."""
    engine, model = bare.engine, bare.engine.model
    itemsize = jax.numpy.dtype(engine.config.dtype).itemsize
    prompt = bare.prompt(sizes.bucket)
    decode: dict[int, list[tuple[float, float]]] = {batch: [] for batch in sizes.batches}
    prefill = []
    for _ in range(sizes.rounds):
        for batch in sizes.batches:
            for slot in range(batch):
                bare.start(bare.prompt(PROMPT, slot), slot)
            live = bare.live(batch) + batch * NEW // 2  # in the middle of the run
            bare.decode(batch, 1)
            # before and after: a shared machine changes
            before = machine.bandwidth()
            seconds, _ = bare.decode(batch, NEW - 1)
            ideal = step_bytes(model, engine.abstract_weights, live, itemsize) / max(before, machine.bandwidth())
            decode[batch].append((seconds / (NEW - 1), ideal))
        prefill.append((bare.prefill(prompt), prompt_operations(model, len(prompt)) / machine.matmul_peak()))
    rows, missed = [], []
    for batch, times in decode.items():
        step = statistics.median(seconds for seconds, _ in times)
        share = statistics.median(ideal / seconds for seconds, ideal in times)
        rows.append((batch, batch / step, 1e3 * step, 100 * share))
        if batch == 1 and share < PROMISED_ROOFLINE:
            missed.append(f"{name}: decode at batch 1 reaches {100 * share:.0f} % of the bandwidth, not 80 %")
    decoded = Table(
        f"{name}: decode, {PROMPT} prompt + {NEW} new tokens",
        ("batch", "tokens/s", "ms a step", "% of bandwidth roofline"),
        rows,
        f"{parameters(model) / 1e6:.1f} M parameters in {engine.config.dtype}.",
    )
    seconds = statistics.median(seconds for seconds, _ in prefill)
    share = statistics.median(ideal / seconds for seconds, ideal in prefill)
    prefilled = Table(
        f"{name}: prefill",
        ("tokens", "tokens/s", "ms", "% of matmul peak"),
        [(sizes.bucket, sizes.bucket / seconds, 1e3 * seconds, 100 * share)],
    )
    return decoded, prefilled, missed


def engines_by_max_len(model: ModelConfig, weights: Weights, sizes: Sizes) -> list[BareEngine]:
    """Engines that differ in what a sequence may become. Their pools hold what is live and no more, to save memory."""
    slots = min(8, sizes.batches[-1])
    engines = []
    for max_len in sizes.max_lens:
        config = layout(
            model, slots=slots, max_len=max_len, batch_sizes=tuple(sorted({1, slots})), prefill_buckets=(LIVE,),
            prefill_chunk=LIVE,
        )  # fmt: skip
        pages = 1 + slots * -(-2 * LIVE // config.page_size)
        engines.append(make_engine(model, dataclasses.replace(config, kv_pages=pages), weights=weights))
    return engines


def measure_max_len(engines: Sequence[BareEngine], sizes: Sizes, name: str) -> tuple[Table, list[str]]:
    """A step at so many live tokens, with two lengths that are possible. Rounds of the same steps, in turn."""
    slots = engines[0].engine.config.slots
    rows, missed = [], []
    for batch in sorted({1, slots}):
        times: list[list[float]] = [[], []]
        for _ in range(2 * sizes.rounds):
            for found, bare in zip(times, engines, strict=True):
                for slot in range(batch):
                    bare.start(bare.prompt(LIVE, slot), slot)
                bare.decode(batch, 1)
                found.append(bare.decode(batch, 16)[0] / 16)
        ratio = statistics.median(long / short for short, long in zip(*times, strict=True))
        rows.append((batch, *(1e3 * statistics.median(found) for found in times), ratio))
        if ratio > PROMISED_RATIO:
            missed.append(f"{name}: a step of {batch} with --max-len {sizes.max_lens[1]} takes {ratio:.2f} x as long")
    short, long = sizes.max_lens
    columns = ("batch", f"ms a step, --max-len {short}", f"--max-len {long}", "ratio")
    note = f"Medians; the ratio is the median of the pairs' (promised: at most {PROMISED_RATIO})."
    return Table(f"{name}: decode at {LIVE} live tokens", columns, rows, note), missed


def measure_compiling(model: ModelConfig, sizes: Sizes, name: str, target: str | None = None) -> Table:
    """The table of programs of the default server, by number of layers; CPU time of all cores together. ``target``: for
    a TPU that is not here."""
    devices = jax.devices()[:1] if target is None else target_devices(parse_target(target), 1)
    platform, rows = devices[0].platform, []
    for layers in sizes.layers:
        deeper = dataclasses.replace(model, num_layers=layers, layer_pattern=())
        engine = JaxEngine(deeper, layout(deeper, platform=platform, **sizes.table), devices)
        began, cpu = time.perf_counter(), time.process_time()
        compiled = compile_table(engine.programs())
        rows.append((
            layers, len(compiled), sum(done.seconds_trace for done in compiled), time.perf_counter() - began,
            time.process_time() - cpu,
        ))  # fmt: skip
    columns = ("layers", "programs", "trace + lower s", "all, s", "all, CPU s")
    note = (
        f"{target or platform}, {engine.config.layers} layers; the whole table of `preheat serve` with "
        f"{engine.config.slots} slots, --max-len {engine.config.max_len}, chunks of {engine.config.prefill_chunk}."
    )
    return Table(f"{name}: compiling" + (f" for {target}" if target else ""), columns, rows, note)


def run(names: Sequence[str], sizes: Sizes, *, targets: Sequence[str] = (), quick: bool = False) -> Report:
    report = Report("benchmarks.engine", conditions(device=jax.devices()[0].device_kind))
    for index, name in enumerate(names):
        model = model_config(name)
        largest = sizes.batches[-1]
        config = layout(
            model, slots=largest, max_len=512, batch_sizes=sizes.batches,
            prefill_buckets=tuple(sorted({PROMPT, sizes.bucket})),
            prefill_chunk=max(PROMPT, sizes.bucket),
        )  # fmt: skip
        bare = make_engine(model, config, checkpoint=None if name in SHAPES else name)
        machine = Machine(config.dtype, quick=quick)
        decoded, prefilled, missed = measure_steps(bare, machine, sizes, name)
        if index == 0:
            figures = [
                ("read of a large array, GB/s", statistics.median(machine.read_bandwidth() for _ in range(3)) / 1e9),
                ("matrix-vector product, GB/s", statistics.median(machine.product_bandwidth() for _ in range(3)) / 1e9),
                ("matrix product, GFlop/s", statistics.median(machine.matmul_peak() for _ in range(3)) / 1e9),
            ]
            report.tables.append(Table("The machine, all cores", ("", "measured"), figures))
        report.add(decoded, missed)
        report.add(prefilled)
        weights = bare.engine._weights
        assert weights is not None
        if index == 0:
            engines = (
                [bare, bare] if quick else engines_by_max_len(model, weights, sizes)
            )  # two more are two more compiles
            table, missed = measure_max_len(engines, sizes, name)
            report.add(table, missed)
            del bare, weights, engines
            for target in (None, *targets):
                report.add(measure_compiling(model, sizes, name, target))
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama-125m,smollm2-135m-instruct", help="comma-separated")
    parser.add_argument("--targets", help="TPUs to compile for as well, as in v5e-1 (needs libtpu)")
    parser.add_argument("--rounds", type=int, default=Sizes.rounds)
    add_options(parser)
    parsed = parser.parse_args(arguments)
    sizes = QUICK if parsed.quick else Sizes(rounds=parsed.rounds)
    names = ["llama-tiny"] if parsed.quick else parsed.models.split(",")
    report = run(names, sizes, targets=parsed.targets.split(",") if parsed.targets else (), quick=parsed.quick)
    decoded = next(table for table in report.tables if "decode, " in table.title)
    return emit(report, parsed, bars(decoded, "tokens/s; ms; %"))


if __name__ == "__main__":
    sys.exit(main())
