"""Time to first token of a prompt whose beginning is in the prefix cache, against one whose beginning is not.

``python -m benchmarks.prefix_cache [--model M] [options of preheat serve]`` serves the model and sends pairs of
prompts: a beginning of 1,000 tokens that nobody has sent before with one question behind it (a miss), then the same
beginning with another question (a hit). Misses and hits alternate, so that a busy machine slows both. The promise: a
hit is at least 5 times as fast, by the median of the pairs' ratios.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence

from benchmarks.output import Report, Table, add_options, bars, conditions, emit
from benchmarks.server_process import BenchServer
from server.client import Client, decode_request

PROMISE = 5.0
VOCAB = 256  # ids of the prompts; every tokenizer has so many


def first_token(client: Client, prompt: Sequence[int]) -> tuple[float, int]:
    """Seconds to the first token, as a client sees them, and how much of the prompt was cached."""
    began = time.perf_counter()
    seconds = cached = None
    for message in client.decode(decode_request(prompt, max_tokens=4, ignore_eos=True)):
        if seconds is None and message.stream_content.samples and message.stream_content.samples[0].token_ids:
            seconds = time.perf_counter() - began
        if message.HasField("usage"):
            cached = message.usage.cached_tokens
    assert seconds is not None and cached is not None
    return seconds, cached


def measure(client: Client, pairs: int, shared: int, question: int, seed: int = 0) -> list[tuple[float, float]]:
    """(seconds of a miss, seconds of a hit) of each pair."""
    draw = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(VOCAB) for _ in range(count)]

    found = []
    for _ in range(pairs):
        beginning = tokens(shared)
        miss, nothing = first_token(client, beginning + tokens(question))
        hit, cached = first_token(client, beginning + tokens(question))
        assert nothing < shared / 10 and cached > 0.9 * shared, (nothing, cached)
        found.append((miss, hit))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--shared", type=int, default=1000, help="tokens of the shared beginning")
    parser.add_argument("--question", type=int, default=16, help="tokens behind it")
    add_options(parser)
    parsed, more = parser.parse_known_args(arguments)
    pairs = 2 if parsed.quick else parsed.pairs
    report = Report("prefix_cache", conditions(model=parsed.model, shared=parsed.shared, pairs=pairs))
    with BenchServer(parsed.model, *more) as server, Client(server.grpc) as client:
        measure(client, 1, parsed.shared, parsed.question, seed=1)
        found = measure(client, pairs, parsed.shared, parsed.question)
    rows = []
    for name, times in zip(("miss", "hit"), zip(*found, strict=True), strict=True):
        rows.append((name, *(1000 * seconds for seconds in (statistics.median(times), min(times), max(times)))))
    ratio = statistics.median(miss / hit for miss, hit in found)
    table = Table(
        f"Time to first token, {parsed.shared} + {parsed.question} tokens, ms",
        ("", "median", "fastest", "slowest"),
        rows,
        f"A hit is {ratio:.1f} x as fast, by the median of the pairs' ratios.",
    )
    report.tables.append(table)
    if ratio < PROMISE:
        report.missed.append(f"a hit {PROMISE:.0f} x as fast")
    return emit(report, parsed, bars(table, "ms"))


if __name__ == "__main__":
    sys.exit(main())
