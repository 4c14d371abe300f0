"""What it is worth to send requests that begin alike to the same replica: a simulation, without model, network or clock.

``python -m benchmarks.fleet`` plays a trace to N replicas behind one proxy, once for each way of choosing. Prefix affinity is
`server.proxy.policy.Policy`, the object that the proxy uses. Everything follows from ``--seed``; the same command prints the same.

**Requests.** Lengths of prompts and answers are those of the Azure LLM inference trace 2023 (Patel et al., "Splitwise", ISCA 2024;
github.com/Azure/AzurePublicDataset, CC-BY), by the quantiles of its 19,366 conversations and 8,819 code completions below. Gaps between
arrivals are exponential (Poisson), or gamma with a coefficient of variation of 5 (bursty): in the trace it is 1.1 for conversations
and 13 for code. The trace does not say what prompts have in common, so that is an assumption: each begins like one of
``--beginnings`` others, of popularity 1 / rank (Zipf); beginnings are as long as prompts are, but at most 4/5 of the prompt.

**Replicas.** Llama-3-8B in bfloat16 on one TPU v6e, by arithmetic (918 TFLOP/s, 1.64 TB/s, 32 GiB): prefill at 40 % of the peak is 23,000
tokens a second; a decode step reads 15 GiB of weights at 70 % of the bandwidth, 14 ms, and 0.13 ms of keys and values for each row of
1,300 tokens; behind weights, 12 GiB hold 98,000 tokens. As in Preheat, one chunk of at most 512 tokens is prefilled between two steps,
first come first served, and full pages of 32 tokens stay cached until their room is needed, least recently used first.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import heapq
import itertools
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from benchmarks.output import Report, Table, add_options, bars, emit
from server.proxy.policy import (
    BLOCK_TOKENS,
    Assignment,
    Policy,
    Prompt,
    Replica,
    describe,
)

PREFILL_RATE = 23_000.0  # tokens a second
STEP, STEP_PER_ROW = 0.014, 0.00013  # seconds
CHUNK = 512  # tokens
SLOTS = 32
POOL = 98_000  # tokens of keys and values
BURSTY = 5.0  # coefficient of variation of the gaps

QUANTILES = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


@dataclasses.dataclass(frozen=True)
class Workload:
    """Tokens of prompts and answers at `QUANTILES`; ``rate``: requests a second for each replica."""

    name: str
    prompts: tuple[int, ...]
    answers: tuple[int, ...]
    rate: float


WORKLOADS = (
    Workload(
        "conversation", (2, 181, 207, 396, 1020, 1189, 2734, 4083, 4142, 14050),
        (7, 41, 54, 85, 129, 395, 424, 451, 601, 1000), 3.5,
    ),
    Workload(
        "code", (3, 75, 147, 578, 1469, 2745, 5186, 7302, 7436, 7437), (6, 6, 7, 9, 13, 24, 55, 90, 252, 1899), 6.0
    ),
)  # fmt: skip


def draw(random_: random.Random, values: Sequence[int]) -> int:
    """A length by its quantiles, linear between them."""
    place = random_.random()
    upper = next(index for index, quantile in enumerate(QUANTILES) if place <= quantile or quantile == 1.0)
    upper = max(upper, 1)
    low, high = QUANTILES[upper - 1], QUANTILES[upper]
    return round(values[upper - 1] + (values[upper] - values[upper - 1]) * (place - low) / (high - low))


@dataclasses.dataclass(eq=False)
class Request:
    at: float  # seconds
    prompt: Prompt
    answer: int  # tokens
    first: float = 0.0  # when its first token came
    cached: int = 0  # prompt tokens taken from a replica's cache


def trace(workload: Workload, *, replicas: int, seconds: float, beginnings: int, cv: float, seed: int) -> list[Request]:
    """Requests in the order of arrival. ``cv``: the coefficient of variation of the gaps, 1 for Poisson."""
    random_ = random.Random(f"{workload.name} {cv} {seed}")
    lengths = [max(BLOCK_TOKENS, draw(random_, workload.prompts)) for _ in range(beginnings)]
    popularity = list(itertools.accumulate(1 / rank for rank in range(1, beginnings + 1)))
    fresh = itertools.count(beginnings * 20_000)  # token ids that nobody has used
    mean, shape = 1 / (workload.rate * replicas), 1 / cv**2
    requests, now = [], 0.0
    while (now := now + random_.gammavariate(shape, mean / shape)) < seconds:
        length = max(1, draw(random_, workload.prompts))
        (rank,) = random_.choices(range(beginnings), cum_weights=popularity)
        shared = min(lengths[rank], length * 4 // 5)
        ids = [*range(rank * 20_000, rank * 20_000 + shared), *itertools.islice(fresh, length - shared)]
        requests.append(Request(now, describe(ids), max(1, draw(random_, workload.answers))))
    return requests


class Simulated:
    """A replica: slots, a queue, a prefix cache. `step` is one chunk of prefill and one decode step."""

    def __init__(self) -> None:
        self.queue: collections.deque[Request] = collections.deque()
        self.rows: list[tuple[int, int, Request]] = []  # heap: number of the step that ends it, serial
        self.prefilling: Request | None = None
        self.left = 0  # tokens of its prompt to compute
        self.steps = 0
        self.pages: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        self.held = 0  # tokens of running sequences beyond cached pages
        self.serial = itertools.count()

    @property
    def idle(self) -> bool:
        return not (self.queue or self.rows or self.prefilling)

    def admit(self) -> None:
        if self.prefilling is None and self.queue and len(self.rows) < SLOTS:
            request = self.prefilling = self.queue.popleft()
            blocks = request.prompt.blocks
            hit = next((index for index, block in enumerate(blocks) if block not in self.pages), len(blocks))
            request.cached = min(hit * BLOCK_TOKENS, request.prompt.tokens - 1)
            self.left = request.prompt.tokens - request.cached
            self.held += request.answer + BLOCK_TOKENS
            self.keep(blocks)

    def keep(self, blocks: Sequence[bytes]) -> None:
        for block in reversed(blocks):
            self.pages[block] = None
            self.pages.move_to_end(block)
        while self.pages and len(self.pages) * BLOCK_TOKENS + self.held > POOL:
            self.pages.popitem(last=False)

    def step(self, now: float) -> tuple[float, list[Request], list[Request]]:
        """When it ends, who has its first token then, and who has its last."""
        self.admit()
        begun: list[Request] = []
        end = now
        if self.prefilling is not None:
            chunk = min(CHUNK, self.left)
            end += chunk / PREFILL_RATE
            self.left -= chunk
        if self.rows:
            end += STEP + STEP_PER_ROW * len(self.rows)
            self.steps += 1
        if self.prefilling is not None and not self.left:
            begun.append(self.prefilling)
            # The first token comes from the prefill, so one step less.
            heapq.heappush(self.rows, (self.steps + self.prefilling.answer - 1, next(self.serial), self.prefilling))
            self.prefilling = None
        ended = []
        while self.rows and self.rows[0][0] <= self.steps:
            request = heapq.heappop(self.rows)[2]
            self.held -= request.answer + BLOCK_TOKENS
            ended.append(request)
        return end, begun, ended


class Chooser(Protocol):
    """A way of choosing. Hears of first tokens and ends, as a proxy does."""

    def choose(self, request: Request) -> int: ...

    def begun(self, request: Request) -> None: ...

    def ended(self, request: Request) -> None: ...


class RoundRobin:
    def __init__(self, replicas: int):
        self._turn = itertools.cycle(range(replicas))

    def choose(self, request: Request) -> int:
        return next(self._turn)

    def begun(self, request: Request) -> None:
        pass

    def ended(self, request: Request) -> None:
        pass


class LeastOutstanding:
    """The fewest requests in progress; of equals, each in turn."""

    def __init__(self, replicas: int):
        self._counts = [0] * replicas
        self._turns = [0] * replicas
        self._turn = itertools.count(1)
        self._where: dict[Request, int] = {}

    def choose(self, request: Request) -> int:
        best = min(range(len(self._counts)), key=lambda number: (self._counts[number], self._turns[number]))
        self._counts[best] += 1
        self._turns[best] = next(self._turn)
        self._where[request] = best
        return best

    def begun(self, request: Request) -> None:
        pass

    def ended(self, request: Request) -> None:
        self._counts[self._where.pop(request)] -= 1


class Affinity:
    """The proxy's policy."""

    def __init__(self, replicas: int):
        self._replicas = [Replica(f"replica-{number}:9000") for number in range(replicas)]
        for replica in self._replicas:
            replica.state = "ready"
            replica.heard(0, 0, SLOTS, POOL // BLOCK_TOKENS)
        self._numbers = {replica.address: number for number, replica in enumerate(self._replicas)}
        self._policy = Policy()
        self._assignments: dict[Request, Assignment] = {}

    def choose(self, request: Request) -> int:
        prompt = self._known(request.prompt)
        replica = self._pick(prompt, request.at)
        self._assignments[request] = Assignment(replica, prompt)
        return self._numbers[replica.address]

    def _known(self, prompt: Prompt) -> Prompt:
        return prompt

    def _pick(self, prompt: Prompt, now: float) -> Replica:
        replica = self._policy.choose(self._replicas, prompt, now)
        assert replica is not None
        return replica

    def begun(self, request: Request) -> None:
        self._assignments[request].answered()

    def ended(self, request: Request) -> None:
        self._assignments.pop(request).end()


class LeastWork(Affinity):
    """The proxy's policy where no two prompts have anything in common, as far as it knows."""

    def _known(self, prompt: Prompt) -> Prompt:
        return dataclasses.replace(prompt, blocks=())


class HashOnly(Affinity):
    """The same beginning always to the same replica, whatever its load: what affinity is without the rest."""

    def _pick(self, prompt: Prompt, now: float) -> Replica:
        return self._replicas[int.from_bytes(prompt.blocks[0] if prompt.blocks else b"") % len(self._replicas)]


WAYS: dict[str, Callable[[int], Chooser]] = {
    "round robin": RoundRobin,
    "least outstanding": LeastOutstanding,
    "least outstanding work": LeastWork,
    "hash of the beginning": HashOnly,
    "prefix affinity": Affinity,
}


def play(requests: Sequence[Request], chooser: Chooser, replicas: int) -> None:
    """Fills in ``first`` and ``cached`` of the requests."""
    fleet = [Simulated() for _ in range(replicas)]
    order = itertools.count()
    # (time, serial, replica or None for an arrival, first tokens and last tokens that a step brings at that time)
    events: list[tuple[float, int, int | None, list[Request], list[Request]]] = []
    arrivals = iter(requests)
    running: set[int] = set()  # replicas in a step

    def arrive() -> None:
        if (request := next(arrivals, None)) is not None:
            heapq.heappush(events, (request.at, next(order), None, [request], []))

    def run(number: int, now: float) -> None:
        end, begun, ended = fleet[number].step(now)
        heapq.heappush(events, (end, next(order), number, begun, ended))

    arrive()
    while events:
        now, _, number, begun, ended = heapq.heappop(events)
        if number is None:
            (request,) = begun
            chosen = chooser.choose(request)
            fleet[chosen].queue.append(request)
            if chosen not in running:
                running.add(chosen)
                run(chosen, now)
            arrive()
            continue
        for request in begun:
            request.first = now
            chooser.begun(request)
        for request in ended:
            chooser.ended(request)
        if fleet[number].idle:
            running.discard(number)
        else:
            run(number, now)


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest rank."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def row(name: str, requests: Sequence[Request], after: float) -> tuple[str, float, float, float]:
    """Name, ms to the first token (half of the requests, 99 of 100), percent of prompt tokens that were cached. Counted are requests
    that came ``after`` so many seconds, when caches are filled."""
    counted = [request for request in requests if request.at >= after]
    waits = [1000 * (request.first - request.at) for request in counted]
    hits = sum(request.cached for request in counted) / sum(request.prompt.tokens for request in counted)
    return name, percentile(waits, 0.5), percentile(waits, 0.99), 100 * hits


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=300.0, help="of the trace; its first fifth is not counted")
    parser.add_argument("--beginnings", type=int, default=500)
    parser.add_argument("--load", type=float, default=1.0, help="times the requests a second of each workload")
    parser.add_argument("--seed", type=int, default=0)
    add_options(parser)
    parsed = parser.parse_args(arguments)
    seconds = 20.0 if parsed.quick else parsed.seconds
    report = Report("fleet", {name: getattr(parsed, name) for name in ("replicas", "beginnings", "load", "seed")} | {"seconds": seconds})
    for workload in WORKLOADS:
        workload = dataclasses.replace(workload, rate=workload.rate * parsed.load)
        for arrivals, cv in (("Poisson", 1.0), ("bursty", BURSTY)):
            requests = trace(
                workload, replicas=parsed.replicas, seconds=seconds, beginnings=parsed.beginnings, cv=cv, seed=parsed.seed
            )
            rows = []
            for name, way in WAYS.items():
                play(requests, way(parsed.replicas), parsed.replicas)
                rows.append(row(name, requests, seconds / 5))
            mean = statistics.mean(request.prompt.tokens for request in requests)
            title = f"{workload.name}, {arrivals}: time to first token, ms"
            note = f"{len(requests)} requests, {workload.rate:g} a second for each replica, {mean:.0f} prompt tokens each on average."
            report.add(Table(title, ("", "p50", "p99", "cached, % of prompt tokens"), rows, note))
    return emit(report, parsed, bars(report.tables[0], "ms"))


if __name__ == "__main__":
    sys.exit(main())
