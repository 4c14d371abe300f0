"""How long loading a checkpoint takes and what it holds in memory, against its files.

``python -m benchmarks.load_weights [--gib 1] [--rounds 5]`` writes a random float32 Llama, as one ``model.safetensors``
and in four shards, into a temporary folder. Each round is a process of its own, which reads the files once (all into
memory of its own, let go afterwards) and then loads them through ``engine.loader``; the pages of the files are in the
page cache for both, or for neither. The promises: at most 1.5 times the time of reading, and a resident memory that
grows by at most 1.2 times the files' size. On a busy machine the ratio of CPU times says more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.output import Report, Table, add_options, bars, conditions, emit

PROMISED_TIME, PROMISED_MEMORY = 1.5, 1.2
HIDDEN, FFN, HEADS, KV_HEADS, VOCAB = 2048, 5632, 32, 8, 16_000
SHARDS = 4


def write_checkpoint(folder: Path, size: float, shards: int) -> int:
    """A Llama of about ``size`` bytes, its head its own; returns the files' bytes."""
    from safetensors.numpy import save_file

    draw = np.random.default_rng(0)
    rows = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (rows, HIDDEN), "self_attn.v_proj": (rows, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN), "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
    }  # fmt: skip
    layer_bytes = 4 * sum(int(np.prod(shape)) for shape in shapes.values())
    ends = 4 * 2 * VOCAB * HIDDEN
    layers = max(1, round((size - ends) / layer_bytes))
    named: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(layers):
        named |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}
    named |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": FFN, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "dtype": "float32",
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = list(named)
    placed: dict[str, str] = {}
    per_shard = -(-len(names) // shards)
    for shard in range(shards):
        part = names[shard * per_shard : (shard + 1) * per_shard]
        file = "model.safetensors" if shards == 1 else f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file({name: draw.standard_normal(named[name], np.float32) for name in part}, folder / file)
        placed |= dict.fromkeys(part, file)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def forget(folder: Path) -> None:
    """Takes the files out of the page cache."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_once(folder: Path) -> list[np.ndarray]:
    """Every file into memory, one after the other."""
    return [np.fromfile(file, np.uint8) for file in sorted(folder.glob("*.safetensors"))]


def status(field: str) -> int:
    """Bytes, of ``/proc/self/status``."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def one_round(folder: Path, cold: bool) -> dict[str, float]:
    """In a process of its own: seconds of reading and of loading, bytes that loading added at its peak."""
    import jax

    from engine.checkpoints import open_checkpoint
    from engine.config import EngineConfig, layer_layout
    from engine.families import load_config
    from engine.jax_engine import JaxEngine
    from engine.loader import load_weights

    devices = jax.local_devices()[:1]
    model = load_config(json.loads((folder / "config.json").read_text()))
    layout = EngineConfig(slots=1, max_len=64, kv_pages=8, prefill_buckets=(16,), batch_sizes=(1,), dtype="float32",
                          layers=layer_layout(devices[0].platform))  # fmt: skip
    abstract = JaxEngine(model, layout, devices).abstract_weights
    jax.block_until_ready(jax.device_put(np.zeros(1), devices[0]))
    prepare = forget if cold else read_once
    prepare(folder)
    began, began_cpu = time.perf_counter(), time.process_time()
    held = read_once(folder)
    reading, reading_cpu = time.perf_counter() - began, time.process_time() - began_cpu
    del held
    prepare(folder)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    began, began_cpu = time.perf_counter(), time.process_time()
    weights = jax.block_until_ready(load_weights(open_checkpoint(folder), model, abstract))
    loading, loading_cpu = time.perf_counter() - began, time.process_time() - began_cpu
    peak = status("VmHWM") - before
    assert len(jax.tree.leaves(weights)) > 2
    return {
        "reading": reading, "loading": loading, "peak": peak, "reading_cpu": reading_cpu, "loading_cpu": loading_cpu,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the checkpoint (default 1)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round", nargs=2, metavar=("FOLDER", "STATE"), help=argparse.SUPPRESS)
    add_options(parser)
    options = parser.parse_args(arguments)
    if options.round:
        print(json.dumps(one_round(Path(options.round[0]), options.round[1] == "cold")))
        return 0
    gib, rounds = (0.02, 1) if options.quick else (options.gib, options.rounds)
    report = Report("load_weights", conditions(gib=gib, rounds=rounds))
    rows = []
    with tempfile.TemporaryDirectory(prefix="preheat-load-") as temporary:
        for shards in (1, SHARDS):
            folder = Path(temporary) / str(shards)
            size = write_checkpoint(folder, gib * 2**30, shards)
            for state in ("warm", "cold"):
                command = [sys.executable, "-m", "benchmarks.load_weights", "--round", str(folder), state]
                found = [json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                         for _ in range(rounds)]  # fmt: skip
                ratio = statistics.median(one["loading"] / one["reading"] for one in found)
                cpu = statistics.median(one["loading_cpu"] / one["reading_cpu"] for one in found)
                memory = statistics.median(one["peak"] / size for one in found)
                seconds = (statistics.median(one[name] for one in found) for name in ("reading", "loading"))
                name = f"{shards} file{'s' * (shards > 1)}, {'in' if state == 'warm' else 'not in'} the page cache"
                rows.append((name, *seconds, ratio, cpu, memory))
                if ratio > PROMISED_TIME:
                    report.missed.append(f"{name}: loaded in {PROMISED_TIME} x the time of reading")
                if memory > PROMISED_MEMORY:
                    report.missed.append(f"{name}: {PROMISED_MEMORY} x the files' size resident")
    columns = ("", "reading once, s", "loading, s", "ratio of times", "of CPU times", "peak resident / size")
    note = "Medians; ratios are of each round's own pair."
    table = Table(f"Loading {size / 2**30:.2f} GiB of float32", columns, rows, note)
    report.tables.append(table)
    return emit(report, options, bars(table, ""))


if __name__ == "__main__":
    sys.exit(main())
