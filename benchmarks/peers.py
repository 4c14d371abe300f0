"""Preheat against what people would use instead: same float32 weights, same prompts, in turn on the same cores.

``python -m benchmarks.peers [--model M] [--transformers-python P] [--llama-cpp-python P] [--llama-server BINARY]``
compares, in rounds in which each runs once:

* decode steps at batch 1, 8 and 32 (128 prompt + 64 new tokens) and prefill of 512: Preheat's engine, Hugging Face
  transformers, llama.cpp;
* whole requests over HTTP with 1 and 8 clients: Preheat's server with 8 slots and with 1, ``llama-server``;
* Preheat's engine alone at 8 rows against the same through gRPC and through HTTP with server-sent events, while all 8
  streams run.

``P`` are interpreters that can import transformers with torch, and llama_cpp; a peer that is not there is named and
left out. ``--model`` is a .gguf file or a name of ``benchmarks.bare_engine.SHAPES``; ``benchmarks.f32_gguf`` makes of
it the one file that all read, in ``--work``. Every ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from benchmarks import f32_gguf
from benchmarks.bare_engine import SHAPES, BareEngine, layout, make_engine, model_config
from benchmarks.load import Door, GrpcDoor, HttpDoor, Summary, closed_loop, steady_tokens_per_second, synthetic_prompts
from benchmarks.output import Report, Table, add_options, bars, conditions, emit
from benchmarks.peer_worker import THREADS, Absent, Peer, Worker
from benchmarks.server_process import BenchServer
from server.start.model_files import resolve_model

PROMPT, NEW = 128, 64
BUCKET = 512  # tokens of the prefill
START_SECONDS = 120.0
PROMISED: dict[tuple[object, object], float] = {  # of a peer's tokens per second
    ("transformers", 1): 1.15, ("transformers", 8): 2.0, ("transformers", 32): 1.5,
    ("llama.cpp", 1): 1.0, ("llama.cpp", 8): 1.0, ("llama.cpp", 32): 1.0, ("llama.cpp", "prefill"): 1.0,
    ("llama-server", 1): 1.0, ("llama-server", 8): 1.0, ("Preheat, 1 slot", 1): 0.95,
    ("gRPC", "of the engine"): 0.95, ("HTTP", "of the engine"): 0.90,
}  # fmt: skip


class Preheat:
    """The engine in this process, as a `Peer`."""

    def __init__(self, path: Path, batches: Sequence[int], bucket: int):
        model = model_config(str(path))
        config = layout(
            model, slots=batches[-1], max_len=max(PROMPT + NEW, bucket) + 1, batch_sizes=tuple(batches),
            prefill_buckets=tuple(sorted({PROMPT, bucket})), prefill_chunk=max(PROMPT, bucket),
        )  # fmt: skip
        self.bare: BareEngine = make_engine(model, config, checkpoint=str(path))

    def decode(self, prompts: Sequence[Sequence[int]], new: int) -> tuple[float, list[list[int]]]:
        first = [self.bare.start(np.array(prompt, np.int32), slot) for slot, prompt in enumerate(prompts)]
        seconds, rest = self.bare.decode(len(prompts), new - 1)
        return seconds, [[token, *more] for token, more in zip(first, rest, strict=True)]

    def prefill(self, prompt: Sequence[int]) -> float:
        return self.bare.prefill(np.array(prompt, np.int32))


class LlamaServer:
    """A ``llama-server`` process; a context."""

    def __init__(self, binary: str, model: Path, slots: int):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.http = f"http://127.0.0.1:{port}"
        context = slots * -(-(PROMPT + NEW) // 256) * 256
        command = [
            binary, "--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--parallel", str(slots),
            "--ctx-size", str(context), "--threads", str(THREADS), "--cache-type-k", "f32", "--cache-type-v", "f32",
        ]  # fmt: skip
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        try:
            self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        except OSError as error:
            raise Absent(f"{binary}: {error.strerror}") from None

    def __enter__(self) -> LlamaServer:
        pause = threading.Event()
        for _ in range(int(START_SECONDS / 0.2)):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.http}/health", timeout=5):
                return self
            if self._process.poll() is not None:
                break
            pause.wait(0.2)
        self._log.seek(0)
        text = self._log.read().decode(errors="replace")[-2000:]
        self.__exit__()
        raise SystemExit(f"llama-server did not become ready:\n{text}")

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def version_of(binary: str) -> str:
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=60)
    except OSError as error:
        raise Absent(f"{binary}: {error.strerror}") from None
    found = re.search(r"version: (.+)", done.stdout + done.stderr)
    return f"llama-server {found.group(1) if found else ''}".strip()


class Comparison:
    """Figures of contestants by case, from rounds in which each contestant was measured once; the first is ours."""

    def __init__(self) -> None:
        self._found: dict[object, dict[str, list[float]]] = {}

    def add(self, case: object, name: str, figure: float) -> None:
        self._found.setdefault(case, {}).setdefault(name, []).append(figure)

    def table(self, title: str, unit: str, ours: str, note: str = "") -> tuple[Table, list[str]]:
        """Medians, the ratios of ours to each of the others, and promises that were missed."""
        names = list(dict.fromkeys(name for figures in self._found.values() for name in figures))
        others = [name for name in names if name != ours]
        rows, missed = [], []
        for case, figures in self._found.items():
            ratios: list[float | None] = []
            for other in others:
                if other not in figures:
                    ratios.append(None)
                    continue
                pairs = zip(figures[ours], figures[other], strict=True)
                ratio = statistics.median(mine / theirs for mine, theirs in pairs)
                ratios.append(ratio)
                promised = PROMISED.get((other, case))
                if promised is not None and ratio < promised:
                    missed.append(f"{title}: {case}: {ratio:.2f} x {other}, not {promised} x")
            medians = [statistics.median(figures[name]) if name in figures else None for name in names]
            rows.append((str(case), *medians, *ratios))
        columns = ("", *(f"{name}, {unit}" for name in names), *(f"{ours} / {other}" for other in others))
        return Table(title, columns, rows, note), missed


def compare_engines(
    peers: dict[str, Peer], batches: Sequence[int], rounds: int, vocab: int, sizes: tuple[int, int, int]
) -> tuple[Comparison, str]:
    """Decode and prefill, in tokens per second; and whether all chose the same tokens at batch 1."""
    prompt, new, bucket = sizes
    found = Comparison()
    first: dict[tuple[int, int], dict[str, list[int]]] = {}
    for number in range(rounds):
        for batch in batches:
            prompts = synthetic_prompts(batch, prompt, vocab, seed=number)
            for name, peer in peers.items():
                seconds, tokens = peer.decode(prompts, new)
                found.add(batch, name, batch * (new - 1) / seconds)
                first.setdefault((number, batch), {})[name] = tokens[0]
        long = synthetic_prompts(1, bucket, vocab, seed=1000 + number)[0]
        for name, peer in peers.items():
            found.add("prefill", name, bucket / peer.prefill(long))
    agree = [
        len({tuple(tokens) for tokens in chosen.values()}) == 1 for (_, batch), chosen in first.items() if batch == 1
    ]
    return found, f"{sum(agree)} of {len(agree)} answers at batch 1 are the same from all, token by token."


def request_rate(url: str, clients: int, requests: int, vocab: int, seed: int, sizes: tuple[int, int, int]) -> float:
    """Tokens per second of whole requests over HTTP."""
    prompts = synthetic_prompts(requests, sizes[0], vocab, seed)

    async def go() -> Summary:
        return Summary.of(await closed_loop(HttpDoor(url), prompts, sizes[1], clients))

    summary = asyncio.run(go())
    if summary.errors:
        raise SystemExit(f"{summary.errors} requests to {url} failed")
    return summary.tokens_per_second


def door_rate(make: Callable[[], Door], slots: int, vocab: int, seed: int, sizes: tuple[int, int, int]) -> float:
    """Tokens per second while all slots are full, through a door."""
    prompts = synthetic_prompts(slots, sizes[0], vocab, seed)

    async def go() -> float:
        door = make()
        try:
            return steady_tokens_per_second(await closed_loop(door, prompts, 2 * sizes[1], slots))
        finally:
            await door.close()

    return asyncio.run(go())


def start_peers(
    parsed: argparse.Namespace, stack: contextlib.ExitStack, path: Path, batches: Sequence[int], bucket: int
) -> tuple[dict[str, Peer], list[str], list[str]]:
    """The peers that are there; their versions; and why the others are not."""
    peers: dict[str, Peer] = {"Preheat": Preheat(path, batches, bucket)}
    versions, absent = [], []
    for name, python, option, module in (
        ("transformers", parsed.transformers_python, "--transformers-python", "benchmarks.peer_transformers"),
        ("llama.cpp", parsed.llama_cpp_python, "--llama-cpp-python", "benchmarks.peer_llama_cpp"),
    ):
        try:
            if python is None:
                raise Absent(f"{option} was not given")
            worker = stack.enter_context(Worker(python, module, path))
            peers[name] = worker
            versions.append(worker.version)
        except Absent as error:
            absent.append(f"{name}: {error}")
    return peers, versions, absent


def run(parsed: argparse.Namespace) -> Report:
    batches: tuple[int, ...] = (1, 8, 32)
    slots, rounds, sizes = 8, parsed.rounds, (PROMPT, NEW, BUCKET)
    if parsed.quick:
        batches, slots, rounds, sizes = (1, 2), 2, 1, (8, 64, 16)
    report = Report("benchmarks.peers", conditions(device=jax.devices()[0].device_kind, model=parsed.model))
    with contextlib.ExitStack() as stack:
        path = gguf_file(parsed, stack)
        vocab = min(model_config(str(path)).vocab_size, 30_000)
        peers, versions, absent = start_peers(parsed, stack, path, batches, sizes[2])
        for peer in peers.values():  # what runs for the first time
            peer.decode([[3, 4, 5]], 2)
        found, agreement = compare_engines(peers, batches, rounds, vocab, sizes)
        note = f"Medians of {rounds} rounds, float32. {'; '.join(versions)}. {agreement}"
        table, missed = found.table(f"Decode by batch and prefill of {sizes[2]}", "tokens/s", "Preheat", note)
        report.add(table, missed)
        bare = peers["Preheat"]
        for peer in peers.values():
            if isinstance(peer, Worker):
                peer.close()

        options = ("--max-len", str(max(sizes[0] + 2 * sizes[1], sizes[2])), "--prefill-chunk", str(sizes[2]), *parsed.server_options)
        ours = stack.enter_context(BenchServer(str(path), "--slots", str(slots), *options))
        single = stack.enter_context(BenchServer(str(path), "--slots", "1", *options))
        servers = {"Preheat": ours.http, "Preheat, 1 slot": single.http}
        versions = []
        try:
            if parsed.llama_server is None:
                raise Absent("--llama-server was not given")
            versions.append(version_of(parsed.llama_server))
            servers["llama-server"] = stack.enter_context(LlamaServer(parsed.llama_server, path, slots)).http
        except Absent as error:
            absent.append(f"llama-server: {error}")
        requests, doors = Comparison(), Comparison()
        for number in range(rounds + 1):
            for clients in (1, slots):
                for name, url in servers.items():
                    if name != "Preheat, 1 slot" or clients == 1:
                        rate = request_rate(url, clients, 2 * clients, vocab, 17 * number + clients, sizes)
                        if number:  # the first round warms up
                            requests.add(clients, name, rate)
            seconds, _ = bare.decode(synthetic_prompts(slots, sizes[0], vocab, number), 2 * sizes[1])
            rates = {
                "gRPC": door_rate(lambda: GrpcDoor(ours.grpc), slots, vocab, 100 + number, sizes),
                "HTTP": door_rate(lambda: HttpDoor(ours.http), slots, vocab, 200 + number, sizes),
            }
            if number:
                engine = slots * (2 * sizes[1] - 1) / seconds
                for name, rate in rates.items():
                    doors.add(name, "through it", rate)
                    doors.add(name, "engine", engine)
        table, missed = requests.table(
            "Whole requests over HTTP by clients", "tokens/s", "Preheat", "; ".join(versions)
        )
        report.tables.append(table)
        report.missed += missed
        table, _ = doors.table(f"Through the doors, {slots} streams", "tokens/s", "through it")
        report.tables.append(table)
        for door, *_, found_ratio in table.rows:
            ratio, promised = float(found_ratio or 0), PROMISED[door, "of the engine"]
            if ratio < promised:
                report.missed.append(f"{door}: {ratio:.2f} of the engine's tokens/s, not {promised}")
    if absent:
        report.tables.append(
            Table("Not compared with", ("peer", "why"), [tuple(line.split(": ", 1)) for line in absent])
        )
    return report


def gguf_file(parsed: argparse.Namespace, stack: contextlib.ExitStack) -> Path:
    """The file that all peers read; made once for each model where ``--work`` says where to keep it."""
    work = parsed.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
    source = parsed.model if parsed.model in SHAPES else str(resolve_model(parsed.model))
    path = work / f"{Path(source).stem}-f32.gguf"
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        f32_gguf.write(source, path)
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--transformers-python", metavar="P", help="an interpreter that has transformers and torch")
    parser.add_argument("--llama-cpp-python", metavar="P", help="an interpreter that has llama_cpp")
    parser.add_argument("--llama-server", metavar="BINARY")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, help="folder that keeps the float32 files (default: a temporary one)")
    add_options(parser)
    parsed, server_options = parser.parse_known_args(arguments)
    parsed.server_options = server_options
    if parsed.quick:
        parsed.model = "llama-tiny"
    report = run(parsed)
    return emit(report, parsed, bars(report.tables[0], "tokens/s; ratios"))


if __name__ == "__main__":
    sys.exit(main())
