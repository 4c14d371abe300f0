"""Everything that ``docs/performance.md`` reports, in one run of about a quarter of an hour.

``python -m benchmarks.performance [--out FOLDER] [--transformers-python P] [--llama-cpp-python P] [--llama-server
BINARY]`` runs the other benchmarks one after the other, each in a process of its own, and prints their tables; JSON and
charts go to ``FOLDER``. Nothing else should run on the machine meanwhile. It goes on when one of them misses a promise,
and then ends with 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

MODELS = ("llama-125m", "smollm2-135m-instruct")


def commands(parsed: argparse.Namespace) -> dict[str, list[str]]:
    """Name of the files -> module and options."""
    peers = []
    for option in ("transformers_python", "llama_cpp_python", "llama_server"):
        if (value := getattr(parsed, option)) is not None:
            peers += [f"--{option.replace('_', '-')}", value]
    work = ["--work", str(parsed.work)] if parsed.work else []
    return {
        "engine": ["benchmarks.engine", "--models", ",".join(MODELS), "--rounds", "3"],
        "orchestrator": ["benchmarks.orchestrator", "--rounds", "3"],
        "serve": ["benchmarks.serve", "--idle", "--warmup", "aot"],
        **{
            f"peers-{model}": ["benchmarks.peers", "--model", model, *peers, *work, "--warmup", "aot"]
            for model in MODELS
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for JSON and charts")
    parser.add_argument("--transformers-python", metavar="P", help="an interpreter that has transformers and torch")
    parser.add_argument("--llama-cpp-python", metavar="P", help="an interpreter that has llama_cpp")
    parser.add_argument("--llama-server", metavar="BINARY")
    parser.add_argument("--work", type=Path, help="folder that keeps the float32 files of the peers")
    parser.add_argument("--only", help="comma-separated names of what is to run")
    parser.add_argument("--quick", action="store_true")
    parsed = parser.parse_args(arguments)
    chosen = commands(parsed)
    if parsed.only:
        chosen = {name: chosen[name] for name in parsed.only.split(",")}
    if parsed.out:
        parsed.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name, command in chosen.items():
        began = time.monotonic()
        files = (
            ["--json", str(parsed.out / f"{name}.json"), "--png", str(parsed.out / f"{name}.png")] if parsed.out else []
        )
        quick = ["--quick"] if parsed.quick else []
        print(f"## python -m {' '.join(command)}\n", flush=True)
        if subprocess.run([sys.executable, "-m", *command, *files, *quick]).returncode:
            failed.append(name)
        print(f"\n({time.monotonic() - began:.0f} s)\n", flush=True)
    if failed:
        print(f"promises missed, or failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
