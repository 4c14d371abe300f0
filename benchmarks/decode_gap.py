"""How long running streams wait for their next token while a long prompt arrives.

``python -m benchmarks.decode_gap [--model M] [options of preheat serve]`` serves the model. In each round the prompt
is first sent alone, which tells what one chunk of it costs (time to first token by the number of chunks); then
streams run for a while, which tells what a step costs (median gap between their tokens); then a prompt of 2,000
tokens arrives beside them, and the gaps between their tokens are taken until its first token is there. The promise:
the 99th percentile of these gaps is at most 1.3 times (one chunk + one step).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import sys
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.output import Report, Table, add_options, bars, conditions, emit
from benchmarks.server_process import BenchServer
from server.client import AsyncClient, decode_request

PROMISE = 1.3
VOCAB = 256  # ids of the prompts; every tokenizer has so many
QUIET_GAPS = 16  # of each stream, before the prompt arrives


@dataclasses.dataclass
class Round:
    """Seconds."""

    alone: float  # time to first token of the prompt with nothing beside it
    beside: float = 0.0  # and beside the streams
    quiet: list[float] = dataclasses.field(default_factory=list)
    busy: list[float] = dataclasses.field(default_factory=list)


class Stream:
    """One running stream and when its messages came."""

    def __init__(self, client: AsyncClient, prompt: Sequence[int], max_tokens: int):
        self.times: list[float] = []
        self._messages = client.decode(decode_request(prompt, max_tokens=max_tokens, ignore_eos=True))
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._messages:
            if message.stream_content.samples[0].token_ids:
                self.times.append(time.perf_counter())
                self._news.set()

    async def has(self, count: int) -> None:
        """Waits for so many messages."""
        while len(self.times) < count:
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), 60)

    def gaps(self, since: float, until: float) -> list[float]:
        """Gaps that overlap a span of time."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [after - before for before, after in pairs if after > since and before < until]

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._messages.aclose()


async def first_token(client: AsyncClient, prompt: Sequence[int]) -> float:
    """Seconds to the first and only token."""
    began = time.perf_counter()
    await client.generate(prompt, max_tokens=1, ignore_eos=True)
    return time.perf_counter() - began


async def measure(address: str, rounds: int, streams: int, length: int, seed: int = 0) -> list[Round]:
    draw = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(VOCAB) for _ in range(count)]

    found = []
    async with AsyncClient(address) as client:
        for _ in range(rounds):
            measured = Round(await first_token(client, tokens(length)))
            running = [Stream(client, tokens(8), 400) for _ in range(streams)]
            await asyncio.gather(*(stream.has(QUIET_GAPS) for stream in running))
            begun = max(stream.times[2] for stream in running)
            arrival = time.perf_counter()
            measured.beside = await first_token(client, tokens(length))
            there = time.perf_counter()
            await asyncio.gather(*(stream.has(len(stream.times) + 1) for stream in running))
            for stream in running:
                measured.quiet += stream.gaps(begun, arrival)[:-1]
                measured.busy += stream.gaps(arrival, there)
            await asyncio.gather(*(stream.stop() for stream in running))
            found.append(measured)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of the prompt that arrives")
    parser.add_argument("--prefill-chunk", type=int, default=512)
    add_options(parser)
    parsed, more = parser.parse_known_args(arguments)
    rounds = 1 if parsed.quick else parsed.rounds
    report = Report(
        "decode_gap",
        conditions(model=parsed.model, streams=parsed.streams, rounds=rounds, prompt=parsed.prompt, chunk=parsed.prefill_chunk),
    )
    with BenchServer(parsed.model, "--prefill-chunk", str(parsed.prefill_chunk), *more) as server:
        found = asyncio.run(measure(server.grpc, 1 + rounds, parsed.streams, parsed.prompt))[1:]
    chunks = -(-parsed.prompt // parsed.prefill_chunk)
    chunk = float(np.median([measured.alone for measured in found])) / chunks
    step = float(np.median([gap for measured in found for gap in measured.quiet]))
    busy = [gap for measured in found for gap in measured.busy]
    p99 = float(np.percentile(busy, 99))
    ratio = p99 / (chunk + step)
    rows = {
        "one chunk of the prompt alone": chunk,
        "one step of the streams alone": step,
        "gaps beside the prompt: median": float(np.median(busy)),
        "gaps beside the prompt: 99th percentile": p99,
        "gaps beside the prompt: longest": max(busy),
        "time to first token alone": float(np.median([measured.alone for measured in found])),
        "time to first token beside the streams": float(np.median([measured.beside for measured in found])),
    }
    table = Table(
        f"{parsed.streams} streams beside prompts of {parsed.prompt} tokens in {chunks} chunks",
        ("", "ms"),
        [(name, 1000 * seconds) for name, seconds in rows.items()],
        f"The 99th percentile is {ratio:.2f} x (one chunk + one step).",
    )
    report.tables.append(table)
    if ratio > PROMISE:
        report.missed.append(f"a 99th percentile of at most {PROMISE} x (one chunk + one step)")
    return emit(report, parsed, bars(table, "ms"))


if __name__ == "__main__":
    sys.exit(main())
