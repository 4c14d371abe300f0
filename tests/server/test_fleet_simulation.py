"""``benchmarks.fleet``: its replica by hand, its trace against the published one, its outcome the same each time."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics

import pytest

from benchmarks import fleet
from benchmarks.fleet import (
    BURSTY,
    CHUNK,
    PREFILL_RATE,
    QUANTILES,
    STEP,
    STEP_PER_ROW,
    WORKLOADS,
    Affinity,
    Request,
    RoundRobin,
    play,
    trace,
)
from server.proxy.policy import describe


def request(at, tokens, answer=5):
    return Request(at, describe(tokens), answer)


def test_a_replica_by_hand():
    first, same, long = request(0.0, range(1000)), request(10.0, range(1000)), request(20.0, range(5000, 6000), 100)
    beside = request(20.0, range(9000, 9064))
    play([first, same, long, beside], RoundRobin(1), 1)
    assert first.first == pytest.approx(1000 / PREFILL_RATE)  # 512 + 488, and nobody decodes
    assert (first.cached, same.cached) == (0, 31 * 32)
    assert same.first - same.at == pytest.approx(8 / PREFILL_RATE)
    # First come, first served; between the chunks one row decodes.
    assert long.first - long.at == pytest.approx(1000 / PREFILL_RATE)
    assert beside.first - beside.at == pytest.approx(1064 / PREFILL_RATE + STEP + STEP_PER_ROW)


def test_a_full_replica_makes_wait():
    many = [request(0.0, range(100 * number, 100 * number + 10), answer=3) for number in range(fleet.SLOTS + 1)]
    play(many, RoundRobin(1), 1)
    assert all(one.first > 0 for one in many)
    # Each is prefilled beside the rows before it, which end after two steps: never more than three at once, so nobody waits for a slot.
    assert many[-1].first == pytest.approx(33 * 10 / PREFILL_RATE + 32 * STEP + (1 + 31 * 2) * STEP_PER_ROW)


@pytest.mark.parametrize(("workload", "prompt", "answer"), [(WORKLOADS[0], 1020, 129), (WORKLOADS[1], 1469, 13)])
def test_lengths_are_those_of_the_published_trace(workload, prompt, answer):
    made = trace(workload, replicas=8, seconds=40, beginnings=50, cv=1.0, seed=3)
    assert statistics.median(one.prompt.tokens for one in made) == pytest.approx(prompt, rel=0.1)
    assert statistics.median(one.answer for one in made) == pytest.approx(answer, rel=0.15)
    gaps = [after.at - before.at for before, after in itertools.pairwise(made)]
    assert statistics.mean(gaps) == pytest.approx(1 / (8 * workload.rate), rel=0.1)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(1, rel=0.1)  # exponential


def test_bursts():
    short = dataclasses.replace(WORKLOADS[0], prompts=(1,) * len(QUANTILES))
    bursty = trace(short, replicas=8, seconds=600, beginnings=2, cv=BURSTY, seed=3)
    gaps = [after.at - before.at for before, after in itertools.pairwise(bursty)]
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(5, rel=0.1)
    assert statistics.mean(gaps) == pytest.approx(1 / (8 * short.rate), rel=0.1)


def test_affinity_finds_more_in_the_caches():
    """Ten beginnings of three chunks on four replicas, far apart in time: in turn each is computed everywhere, else once."""
    made = [request(number, [*range(10_000 * (number % 10), 10_000 * (number % 10) + 3 * CHUNK), 10**6 + number]) for number in range(80)]
    play(made, Affinity(4), 4)
    assert sum(one.cached == 0 for one in made) == 10
    play(made, RoundRobin(4), 4)
    assert sum(one.cached == 0 for one in made) == 20  # 80 in turn: beginning n is at n mod 4 and (n + 10) mod 4


def test_the_command_prints_the_same_each_time(tmp_path, capsys):
    for name in ("one", "two"):
        assert fleet.main(["--quick", "--json", str(tmp_path / name)]) == 0
    assert (tmp_path / "one").read_text() == (tmp_path / "two").read_text()
    tables = json.loads((tmp_path / "one").read_text())["tables"]
    assert len(tables) == 4 and all([line[0] for line in table["rows"]] == list(fleet.WAYS) for table in tables)
    assert "prefix affinity" in capsys.readouterr().out
