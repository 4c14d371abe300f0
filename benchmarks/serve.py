"""A load generator: what clients of a server see.

``python -m benchmarks.serve [options of preheat serve]`` starts a server and loads it; with ``--url`` or ``--grpc`` it
loads one that is there (``--url`` may be any server with OpenAI's ``/v1/completions``). Requests are 128 random tokens
long and ask for 64, or come from a file (``--prompts``). They come from so many clients that each wait for their answer
(``--clients 1,8``: one run for each number), or at random at a rate (``--rate``, Poisson).

Reported for each run: time to first token, time per output token after the first, time between the messages of a stream
(a message is a token, unless the client or the server lags), and tokens per second. ``--idle`` then leaves the server
that was started alone for 10 seconds and reports the CPU time it used.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.load import (
    Door,
    GrpcDoor,
    HttpDoor,
    Prompt,
    Summary,
    closed_loop,
    file_prompts,
    milliseconds,
    poisson,
    synthetic_prompts,
)
from benchmarks.output import Cell, Report, Table, add_options, conditions, emit
from benchmarks.server_process import BenchServer, cpu_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = (
    "run", "requests", "errors", "requests/s", "tokens/s", "TTFT p50 ms", "TTFT p99 ms",
    "per token p50 ms", "per token p99 ms", "gap p50 ms", "gap p99 ms",
)  # fmt: skip
IDLE_SECONDS = 10.0
PROMISED_IDLE = 0.1  # seconds of CPU time


def row(name: str, summary: Summary) -> tuple[Cell, ...]:
    return (
        name, summary.requests, summary.errors, summary.requests_per_second, summary.tokens_per_second,
        *(milliseconds(times, percentile)
          for times in (summary.first_token, summary.per_token, summary.gaps) for percentile in (50, 99)),
    )  # fmt: skip


async def load_through(
    make: Callable[[], Door], parsed: argparse.Namespace, clients: int | None, prompts: Sequence[Prompt]
) -> Summary:
    """As `load`, through a door that is made in the event loop."""
    return await load(make(), parsed, clients, prompts)


async def load(door: Door, parsed: argparse.Namespace, clients: int | None, prompts: Sequence[Prompt]) -> Summary:
    """One run; the first requests only warm up connections."""
    try:
        await closed_loop(door, prompts[:2], min(4, parsed.new_tokens), 1)
        if clients is None:
            return Summary.of(await poisson(door, prompts[2:], parsed.new_tokens, parsed.rate, parsed.seed))
        return Summary.of(await closed_loop(door, prompts[2:], parsed.new_tokens, clients))
    finally:
        await door.close()


def doors(parsed: argparse.Namespace, http: str | None, grpc: str | None) -> Iterator[tuple[str, str]]:
    """(kind, address) of those that are asked for and there."""
    for kind, address in (("HTTP", http), ("gRPC", grpc)):
        if address and parsed.door in ("both", kind.lower()):
            yield kind, address


def run(parsed: argparse.Namespace, http: str | None, grpc: str | None) -> tuple[Report, dict[str, Summary]]:
    report = Report("benchmarks.serve", conditions())
    summaries = {}
    loads = [None] if parsed.rate else [int(clients) for clients in parsed.clients.split(",")]
    seed = parsed.seed
    for clients in loads:
        for kind, address in doors(parsed, http, grpc):
            count = parsed.requests or 4 * (clients or 8)
            if parsed.prompts:
                prompts: Sequence[Prompt] = file_prompts(parsed.prompts, count + 2)
            else:
                seed += 1  # each run has prompts of its own: none is in a prefix cache
                prompts = synthetic_prompts(count + 2, parsed.prompt_tokens, parsed.vocab, seed)
            name = f"{kind}, {parsed.rate:g} requests/s" if clients is None else f"{kind}, {clients} clients"

            door = functools.partial(HttpDoor if kind == "HTTP" else GrpcDoor, address, api_key=parsed.api_key)
            summaries[name] = asyncio.run(load_through(door, parsed, clients, prompts))
    source = str(parsed.prompts) if parsed.prompts else f"{parsed.prompt_tokens} random tokens"
    title = f"{source}, {parsed.new_tokens} new tokens"
    report.tables.append(Table(title, COLUMNS, [row(name, summary) for name, summary in summaries.items()]))
    if any(summary.errors for summary in summaries.values()):
        report.missed.append("requests failed")
    return report, summaries


def idle(server: BenchServer, seconds: float) -> Table:
    before = {name: cpu_seconds(pid) for name, pid in server.pids().items()}
    threading.Event().wait(seconds)
    rows = [(name, cpu_seconds(pid) - before[name]) for name, pid in server.pids().items()]
    return Table(f"Idle for {seconds:g} s", ("process", "CPU s"), rows, f"Promised: under {PROMISED_IDLE} s in 10 s.")


def draw(summaries: dict[str, Summary]) -> Callable[[Figure], None]:
    """Distributions of time to first token and of gaps: what share took at most so long."""

    def fill(figure: Figure) -> None:
        for place, (title, name) in enumerate(
            (("time to first token", "first_token"), ("gap between messages", "gaps"))
        ):
            axes = figure.add_subplot(1, 2, place + 1)
            for label, summary in summaries.items():
                times = np.sort(1e3 * getattr(summary, name))
                axes.step(times, np.arange(1, len(times) + 1) / max(1, len(times)), where="post", label=label)
            axes.set_xlabel(f"{title}, ms")
            axes.set_ylabel("share")
            axes.set_xlim(left=0)
            axes.legend()

    return fill


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="base URL of a server that is there")
    parser.add_argument("--grpc", help="host:port of a server that is there")
    parser.add_argument("--api-key")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="of the server that is started")
    parser.add_argument("--door", choices=("both", "http", "grpc"), default="both")
    parser.add_argument("--clients", default="1,8", help="comma-separated; a run for each number")
    parser.add_argument("--rate", type=float, help="requests per second, instead of clients")
    parser.add_argument("--requests", type=int, help="in each run (default 4 for each client, 32 with --rate)")
    parser.add_argument("--prompts", type=Path, help="a file of prompts, one in each line")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=256, help="token ids of random prompts are below this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--idle", action="store_true", help="also the CPU time of the server while nothing is asked")
    add_options(parser)
    parsed, more = parser.parse_known_args(arguments)
    if parsed.quick:
        parsed.clients, parsed.requests, parsed.prompt_tokens, parsed.new_tokens = "2", 4, 8, 8
    with contextlib.ExitStack() as stack:
        server = None
        if parsed.url is None and parsed.grpc is None:
            server = stack.enter_context(BenchServer(parsed.model, *more))
            parsed.url, parsed.grpc = server.http, server.grpc
        elif more:
            parser.error(f"{more[0]}: options of a server are of no use with --url or --grpc")
        report, summaries = run(parsed, parsed.url, parsed.grpc)
        if parsed.idle and server is not None:
            table = idle(server, 0.2 if parsed.quick else IDLE_SECONDS)
            report.tables.append(table)
            used = sum(float(line[1] or 0) for line in table.rows)
            if used >= PROMISED_IDLE:
                report.missed.append(f"the idle server used {used:.2f} s of CPU time, not under {PROMISED_IDLE}")
    return emit(report, parsed, draw(summaries))


if __name__ == "__main__":
    sys.exit(main())
