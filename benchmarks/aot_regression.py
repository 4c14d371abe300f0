"""Why ahead-of-time serving was slow: step time and memory with the donation kept and lost.

A server that lowered ``jax.jit(engine.generate)`` around a method that was jitted *with donation* found its decode
steps slower the larger the batch, and ran out of memory. ``python -m benchmarks.aot_regression`` repeats that for each
batch size with three executables of the same decode program:

manual          the donating jitted function itself
aot             the same function, compiled, serialized and loaded back
aot, lost       ``jax.jit`` around it: the inner donation does not survive, and every step writes a second KV cache

Times are medians of interleaved steps in one process; peak memory is a process's own, one process per executable. With
``--target v5e-4`` the numbers are ``memory_analysis`` of the same three programs compiled for that TPU slice (needs
libtpu).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from engine.api import Row, SamplingParams
from engine.config import EngineConfig, ModelConfig
from engine.jax_engine import JaxEngine
from engine.programs import Program
from warmup import aot
from warmup.compiling import memory_of
from warmup.target import parse_target, target_devices

VARIANTS = ("manual", "aot", "aot, lost")
CONTEXT = 256  # live tokens of each row
MIB = 2**20


def describe(
    batch: int, layers: int, max_len: int, devices, *, dtype: str = "float32", layout: str = "unrolled"
) -> JaxEngine:
    """A Llama of 125M shape by default, with exactly one decode program."""
    model = ModelConfig(
        family="llama",
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_layers=layers,
        num_heads=12,
        num_kv_heads=12,
        head_dim=64,
        max_position=max_len,
    )
    config = EngineConfig(
        slots=batch,
        max_len=max_len,
        kv_pages=1 + batch * max_len // 32,
        prefill_buckets=(CONTEXT,),
        batch_sizes=(batch,),
        dtype=dtype,
        tp=len(devices),
        layers=layout,
    )
    return JaxEngine(model, config, devices)


def executable(variant: str, program: Program, devices) -> Callable:
    """One variant of a program, ready to call."""
    if variant == "manual":
        program.trace().lower().compile()  # stays in the jitted function's cache
        return program.function
    if variant == "aot":
        loaded = aot.load_artifact(program, aot.serialize(program, program.trace().lower().compile()), devices)
        return loaded.compiled
    return jax.jit(lambda *arguments: program.function(*arguments)).trace(*program.arguments).lower().compile()


def prepare(engine: JaxEngine) -> dict[str, Program]:
    """Weights, buffers and every program but the decode step."""
    generator = np.random.default_rng(0)
    programs = {program.name: program for program in engine.programs()}
    engine.install({name: program.function for name, program in programs.items()})
    engine.set_weights(
        jax.tree.map(
            lambda leaf: jax.device_put(generator.normal(0, 0.02, leaf.shape).astype(leaf.dtype), leaf.sharding),
            engine.abstract_weights,
        )
    )
    engine.allocate()
    return programs


def fill(engine: JaxEngine) -> list[Row]:
    """Every slot holds a prompt of CONTEXT - 64 tokens. Returns the rows of a step."""
    per_slot, length = engine.config.pages_per_slot, CONTEXT - 64
    prefix, greedy = engine.acquire_prefix(), SamplingParams()
    first = engine.prefill(prefix, np.arange(length, dtype=np.int32), 0, greedy, last=True)
    rows = []
    for slot in range(engine.config.slots):
        pages = 1 + slot * per_slot + np.arange(per_slot, dtype=np.int32)
        engine.insert(prefix, first, slot, pages[: -(-length // 32)], length, greedy)
        rows.append(Row(slot, int(pages[length // 32])))
    engine.release_prefix(prefix)
    return rows


def times(batch: int, layers: int, max_len: int, steps: int) -> dict[str, object]:
    """Median seconds of a step of each variant, the variants taking turns; and whether all chose the same tokens."""
    engine = describe(batch, layers, max_len, jax.devices()[:1])
    programs = prepare(engine)
    name = f"generate/{batch}"
    variants = {variant: executable(variant, programs[name], engine.devices) for variant in VARIANTS}
    base = {other: program.function for other, program in programs.items()}
    samples: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    tokens: dict[str, list[list[int]]] = {variant: [] for variant in VARIANTS}
    for turn in range(4):
        for variant in VARIANTS:
            engine.install({**base, name: variants[variant]})
            rows = fill(engine)
            for step in range(steps):
                began = time.perf_counter()
                chosen = engine.read(engine.generate(rows)).tokens.tolist()
                if turn and step:  # the first turn, and the first step of each, warm up
                    samples[variant].append(time.perf_counter() - began)
                if turn == 1:
                    tokens[variant].append(chosen)
    return {
        "seconds": {variant: statistics.median(values) for variant, values in samples.items()},
        "same": tokens["manual"] == tokens["aot"] == tokens["aot, lost"],
    }


def peak(variant: str, batch: int, layers: int, max_len: int) -> float:
    """Peak memory of this process in MiB after a few steps of one variant."""
    engine = describe(batch, layers, max_len, jax.devices()[:1])
    programs = prepare(engine)
    name = f"generate/{batch}"
    executables = {other: program.function for other, program in programs.items()}
    engine.install({**executables, name: executable(variant, programs[name], engine.devices)})
    rows = fill(engine)
    for _ in range(3):
        engine.read(engine.generate(rows))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def on_cpu(arguments: argparse.Namespace) -> None:
    print("| batch | KV MiB | manual ms | aot / manual | lost / manual | peak manual MiB | aot | lost | same tokens |")
    print("| --- |" + " --- |" * 8)
    for batch in arguments.batches:
        timed = ask(arguments, batch, "times")
        seconds = timed["seconds"]
        peaks = [ask(arguments, batch, variant) for variant in VARIANTS]
        kv = 2 * arguments.layers * 12 * 64 * 4 * batch * arguments.max_len / MIB
        print(
            f"| {batch} | {kv:.0f} | {seconds['manual'] * 1e3:.1f} | {seconds['aot'] / seconds['manual']:.3f} "
            f"| {seconds['aot, lost'] / seconds['manual']:.2f} | {peaks[0]:.0f} | {peaks[1] - peaks[0]:+.0f} "
            f"| {peaks[2] - peaks[0]:+.0f} | {'yes' if timed['same'] else 'NO'} |",
            flush=True,
        )


def ask(arguments: argparse.Namespace, batch: int, what: str):
    """The answer of a child process."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.aot_regression",
        "--child",
        what,
        "--batches",
        str(batch),
        "--layers",
        str(arguments.layers),
        "--max-len",
        str(arguments.max_len),
        "--steps",
        str(arguments.steps),
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    return json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)


def on_target(arguments: argparse.Namespace) -> None:
    """Memory per device of the decode step, donation kept and lost, compiled for a TPU slice."""
    target = parse_target(arguments.target)
    devices = target_devices(target, target.chips)
    print(f"{target.name}, {target.hbm / 2**30:.0f} GiB per device, Llama-3-8B in bfloat16, 2,048 tokens a slot\n")
    print(
        "| batch | donation | arguments GiB | aliased GiB | new output GiB | temporaries GiB | in use GiB |\n|"
        + " --- |" * 7
    )
    model = ModelConfig(
        family="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position=8192,
    )
    for batch in arguments.batches:
        config = EngineConfig(
            slots=batch,
            max_len=2048,
            kv_pages=1 + batch * 64,
            prefill_buckets=(512,),
            batch_sizes=(batch,),
            dtype="bfloat16",
            tp=len(devices),
            layers="scanned",
        )
        program = {program.name: program for program in JaxEngine(model, config, devices).programs()}[
            f"generate/{batch}"
        ]
        lost = jax.jit(lambda *arguments, inner=program.function: inner(*arguments))
        for name, function in (("kept", program.function), ("lost", lost)):
            try:
                memory = memory_of(function.trace(*program.arguments).lower().compile())
            except jax.errors.JaxRuntimeError as error:  # more than the device has
                print(f"| {batch} | {name} | does not compile: {str(error).splitlines()[0][:120]} |", flush=True)
                continue
            fresh = memory.output - memory.alias
            numbers = (memory.argument, memory.alias, fresh, memory.temp, memory.argument + fresh + memory.temp)
            print(
                f"| {batch} | {name} | " + " | ".join(f"{number / 2**30:.2f}" for number in numbers) + " |", flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4, 8, 16, 32, 64]
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--target", help="compile for a TPU slice instead, e.g. v5e-4")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child == "times":
        print(json.dumps(times(arguments.batches[0], arguments.layers, arguments.max_len, arguments.steps)))
    elif arguments.child:
        print(json.dumps(peak(arguments.child, arguments.batches[0], arguments.layers, arguments.max_len)))
    elif arguments.target:
        on_target(arguments)
    else:
        on_cpu(arguments)


if __name__ == "__main__":
    main()
