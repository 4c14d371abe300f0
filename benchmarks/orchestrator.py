"""What the host can do when the engine costs nothing: messages per second, CPU time per token and per step, idle cost.

``python -m benchmarks.orchestrator`` runs two servers, each in a process of its own: Preheat's gRPC server with its
orchestrator on an engine of no cost (``benchmarks/free_engine.py``), and a bare ``grpc.aio`` server that streams a
ready-made message of the same size over and over. A client reads 64 streams of one, then of the other, round after
round. It does not parse what it reads, so that the servers are what is measured. The promise: at least half the bare
server's messages per second.

A stream that lags gets several tokens in one message, so messages and tokens are counted apart, and the engine runs at
three paces: as many tokens per second as 0.6 of the bare server's messages, so that a server that keeps up sends one
token a message; that of a fast device (2 ms a step); and as fast as it goes. The CPU time of a step is that of the
generate thread, which is what a device would wait for if it were not one step ahead. Afterwards
nothing is asked for 10 seconds, and the process must use less than 0.1 s of CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import math
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from benchmarks.free_engine import TOKEN, FreeEngine
from benchmarks.output import Report, Table, add_options, bars, conditions, emit
from benchmarks.server_process import cpu_seconds
from protos import orchestrator_pb2, orchestrator_pb2_grpc
from protos.orchestrator_pb2 import DecodeRequest, DecodeResponse
from server.client import decode_request

PROMISED_SHARE = 0.5  # of the bare server's messages per second
IDLE_SECONDS = 10.0
PROMISED_IDLE = 0.1  # seconds of CPU time
PROMPT = 16
STEP_SECONDS = 0.002  # of the paced engine: 32,000 tokens per second with 64 streams
OFFERED_SHARE = 0.6  # of the bare server's messages per second
DECODE = "/jetstream_proto.Orchestrator/Decode"


# --- the servers, each in a process of its own ----------------------------------------------------------------------


def serve_orchestrator(streams: int, max_len: int, step_seconds: float) -> None:
    from server.grpc.server import GrpcServer
    from server.orchestrator.orchestrator import Orchestrator
    from server.orchestrator.validation import ModelLimits
    from server.telemetry.metrics import Metrics
    from server.text.tokenizers import ByteTokenizer

    engine, metrics, tokenizer = FreeEngine(streams, max_len, step_seconds=step_seconds), Metrics(), ByteTokenizer()
    orchestrator = Orchestrator(engine, tokenizer, metrics=metrics, max_queue=streams)
    server = GrpcServer("free", metrics=metrics, slots=streams)
    server.start()
    orchestrator.start()
    server.attach(
        orchestrator, tokenizer, ModelLimits("free", max_len, engine.model.vocab_size, tokenizer.eos_token_ids)
    )
    orchestrator.open()
    print(server.port, flush=True)
    for _ in sys.stdin:  # each line asks for the figures so far
        print(json.dumps({"steps": engine.steps, "threads": _thread_seconds()}), flush=True)
    orchestrator.close()
    server.stop()


def serve_bare() -> None:
    class Bare(orchestrator_pb2_grpc.OrchestratorServicer):
        async def HealthCheck(  # noqa: N802
            self,
            request: orchestrator_pb2.HealthCheckRequest,
            context: grpc.aio.ServicerContext[orchestrator_pb2.HealthCheckRequest, orchestrator_pb2.HealthCheckResponse],
        ) -> orchestrator_pb2.HealthCheckResponse:
            return orchestrator_pb2.HealthCheckResponse(is_live=True)

        async def Decode(  # noqa: N802
            self, request: DecodeRequest, context: grpc.aio.ServicerContext[DecodeRequest, DecodeResponse]
        ) -> AsyncIterator[DecodeResponse]:
            sample = DecodeResponse.StreamContent.Sample(text=chr(TOKEN), token_ids=[TOKEN])
            message = DecodeResponse(stream_content=DecodeResponse.StreamContent(samples=[sample]))
            for _ in range(request.max_tokens):
                yield message

    async def serve() -> None:
        server = grpc.aio.server()
        orchestrator_pb2_grpc.add_OrchestratorServicer_to_server(Bare(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        print(port, flush=True)
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps({"steps": 0, "threads": _thread_seconds()}), flush=True)
        await server.stop(None)

    asyncio.run(serve())


def _thread_seconds() -> dict[str, float]:
    """CPU time of each Python thread of this process (Linux)."""
    return {
        thread.name: cpu_seconds(f"self/task/{thread.native_id}")
        for thread in threading.enumerate()
        if thread.native_id
    }


class Child:
    """A server process; a context."""

    def __init__(self, kind: str, streams: int, max_len: int, step_seconds: float = 0.0):
        child = ["--child", kind, str(streams), str(max_len), str(step_seconds)]
        command = [sys.executable, "-m", "benchmarks.orchestrator", *child]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Child:
        assert self.process.stdout is not None
        port = self.process.stdout.readline().strip()
        if not port:
            raise SystemExit("a server of the benchmark did not start; its error is above")
        self.address = f"127.0.0.1:{port}"
        return self

    def figures(self) -> dict[str, Any]:
        """``steps`` and CPU seconds of ``threads`` so far."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        figures: dict[str, Any] = json.loads(self.process.stdout.readline())
        return figures

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.process.pid)

    def __exit__(self, *exc: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()


# --- the client -----------------------------------------------------------------------------------------------------


async def read_streams(address: str, streams: int, tokens: int) -> tuple[int, float]:
    """Messages of all streams together, and seconds from the first request to the last message."""
    request = decode_request([TOKEN] * PROMPT, max_tokens=tokens, ignore_eos=True)
    async with grpc.aio.insecure_channel(address) as channel:
        decode = channel.unary_stream(DECODE, DecodeRequest.SerializeToString, None)

        async def read() -> int:
            call, count = decode(request), 0
            while isinstance(await call.read(), bytes):  # else it is grpc's EOF
                count += 1
            return count

        await channel.channel_ready()
        began = time.perf_counter()
        counts = await asyncio.gather(*(read() for _ in range(streams)))
        return sum(counts), time.perf_counter() - began


OFFERED = f"Preheat, offered {OFFERED_SHARE:g} of bare"
PACED, FLAT_OUT, BARE = f"Preheat, {1e3 * STEP_SECONDS:g} ms a step", "Preheat, flat out", "bare grpc.aio"


@dataclasses.dataclass
class Measured:
    """``rounds`` are (messages/s, tokens/s, CPU us per token) by server; ``threads`` the CPU us of the paced
    orchestrator's threads per step, of ``rows`` on average; ``idle`` the CPU seconds of its idle process."""

    rounds: dict[str, list[tuple[float, float, float]]]
    threads: list[tuple[str, float]]
    rows: float
    idle: float


def measure(streams: int, tokens: int, rounds: int, idle: float) -> Measured:
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in (OFFERED, PACED, FLAT_OUT, BARE)}
    length = PROMPT + tokens
    with contextlib.ExitStack() as stack:
        bare = stack.enter_context(Child("bare", streams, length))
        asyncio.run(read_streams(bare.address, streams, tokens))  # the first is slower
        messages, seconds = asyncio.run(read_streams(bare.address, streams, tokens))
        paces = {OFFERED: streams * seconds / messages / OFFERED_SHARE, PACED: STEP_SECONDS, FLAT_OUT: 0.0}
        children = {
            name: stack.enter_context(Child("orchestrator", streams, length, pace)) for name, pace in paces.items()
        }
        children[BARE], ours = bare, children[PACED]
        for child in children.values():
            asyncio.run(read_streams(child.address, streams, max(1, tokens // 10)))
        before = ours.figures()
        for _ in range(rounds):
            for name, child in children.items():
                cpu = child.cpu_seconds()
                messages, seconds = asyncio.run(read_streams(child.address, streams, tokens))
                total = streams * tokens
                cost = (child.cpu_seconds() - cpu) / total
                found[name].append((messages / seconds, total / seconds, 1e6 * cost))
        after = ours.figures()
        cpu = ours.cpu_seconds()
        threading.Event().wait(idle)
        idle_cpu = ours.cpu_seconds() - cpu
    steps = after["steps"] - before["steps"]
    threads = [
        (name, 1e6 * (seconds - before["threads"].get(name, 0.0)) / steps) for name, seconds in after["threads"].items()
    ]
    return Measured(found, threads, rounds * streams * tokens / steps, idle_cpu)


def run(streams: int, tokens: int, rounds: int, idle: float) -> Report:
    report = Report("benchmarks.orchestrator", conditions())
    measured = measure(streams, tokens, rounds, idle)
    columns = ("server", "messages/s", "tokens/s", "CPU us per token", "messages/s of bare", "tokens/s of bare")
    rows, shares = [], {}
    for name, figures in measured.rounds.items():
        pairs = list(zip(figures, measured.rounds[BARE], strict=True))
        shares[name] = [statistics.median(ours[place] / bare[place] for ours, bare in pairs) for place in (0, 1)]
        rows.append((name, *(statistics.median(values) for values in zip(*figures, strict=True)), *shares[name]))
    note = (
        f"Medians of {rounds} interleaved rounds of {streams} streams of {tokens} tokens. "
        f"Promised: at least {PROMISED_SHARE} of the bare server's messages/s."
    )
    report.tables.append(Table(f"{streams} streams without an engine's cost", columns, rows, note))
    share = max(shares[name][0] for name in shares if name != BARE)
    steps = [(name, cost, cost / measured.rows) for name, cost in measured.threads if cost >= 1]
    report.tables.append(
        Table(
            "Host cost of a decode step", ("thread", f"CPU us per step of {measured.rows:.0f} rows", "per token"), steps
        )
    )
    idle_cpu = measured.idle
    generate = Table(
        "Host cost of a decode step by rows",
        ("rows", "generate thread, CPU us per step"),
        [_step_cost(rows, tokens) for rows in (sorted({1, 8, streams}) if streams > 8 else [streams])],
        "The device is one step ahead: it waits for this only where a step is shorter.",
    )
    report.tables.append(generate)
    nothing = [(f"{idle:.0f} s without a request", idle_cpu)]
    report.tables.append(
        Table("Idle", ("", "CPU s of the process"), nothing, f"Promised: under {PROMISED_IDLE} s in 10 s.")
    )
    if share < PROMISED_SHARE:
        report.missed.append(f"{share:.2f} of the bare server's messages per second, not {PROMISED_SHARE}")
    if idle_cpu >= PROMISED_IDLE:
        report.missed.append(f"an idle process used {idle_cpu:.2f} s of CPU time in {idle:.0f} s")
    return report


def _step_cost(rows: int, tokens: int) -> tuple[int, float]:
    """CPU microseconds of the generate thread per step of so many rows."""
    with Child("orchestrator", rows, PROMPT + tokens) as child:
        asyncio.run(read_streams(child.address, rows, max(1, tokens // 10)))
        before = child.figures()
        for _ in range(max(1, math.ceil(8 / rows))):  # enough for the clock's ticks
            asyncio.run(read_streams(child.address, rows, tokens))
        after = child.figures()
    seconds = after["threads"]["preheat-generate"] - before["threads"]["preheat-generate"]
    return rows, 1e6 * seconds / (after["steps"] - before["steps"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1000, help="of each stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", nargs=4, metavar=("KIND", "STREAMS", "MAX_LEN", "STEP"), help=argparse.SUPPRESS)
    add_options(parser)
    parsed = parser.parse_args(arguments)
    if parsed.child:
        kind, streams, max_len, step = parsed.child
        serve_bare() if kind == "bare" else serve_orchestrator(int(streams), int(max_len), float(step))
        return 0
    if parsed.quick:
        report = run(4, 20, 1, 0.2)
    else:
        report = run(parsed.streams, parsed.tokens, parsed.rounds, IDLE_SECONDS)
    return emit(report, parsed, bars(report.tables[0], "per second; microseconds"))


if __name__ == "__main__":
    sys.exit(main())
