"""The mock engine by hand: rules, pages, ownership and misuse."""

import collections
import math
import threading

import numpy as np
import pytest

from engine.api import Row, SamplingParams
from engine.mock import Misuse, MockEngine, Script, Table, digest, mock_config
from engine.mock_rules import choose

GREEDY = SamplingParams()


def tokens(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def start(engine: MockEngine, text: str, slot: int, pages: list[int], sampling: SamplingParams = GREEDY) -> int:
    """Prefill and insert of one prompt; returns its first token."""
    prefix = engine.acquire_prefix()
    first = engine.prefill(prefix, tokens(text), 0, sampling, last=True)
    engine.insert(prefix, first, slot, np.array(pages), len(text), sampling)
    engine.release_prefix(prefix)
    return int(engine.read(first).tokens[0])


def test_successor_over_a_page_border():
    engine = MockEngine()
    assert start(engine, "abc", 2, [5]) == ord("d")
    got = [int(engine.read(engine.generate([Row(2, page)])).tokens[0]) for page in (5, 7, 7)]
    assert bytes(got) == b"efg"
    assert engine.violations == []


def test_two_rows_keep_to_their_pages():
    engine = MockEngine(digest)
    first = start(engine, "ab", 0, [1])
    assert first == 97 + (97 * 31 + 98) % 1009 % 26
    start(engine, "xyz", 1, [2])
    step = engine.read(engine.generate([Row(1, 2), Row(0, 1)]))
    second = 97 + (97 * 31**2 + 98 * 31 + first) % 1009 % 26
    assert int(step.tokens[1]) == second


def test_a_page_given_away_too_early_is_seen():
    engine = MockEngine(digest)
    start(engine, "abcd", 0, [1])
    start(engine, "xyz", 1, [1])
    with pytest.raises(Misuse, match="another sequence"):
        engine.generate([Row(0, 3)])
    assert len(engine.violations) == 1


def test_wrong_page_table_is_seen():
    engine = MockEngine()
    start(engine, "ab", 0, [1])
    with pytest.raises(Misuse, match="is in page 1, not 2"):
        engine.generate([Row(0, 2)])


def test_fetch_brings_pages_back_and_checks_their_content():
    engine = MockEngine()
    start(engine, "abcdefgh", 0, [1, 2])
    prefix = engine.acquire_prefix()
    engine.fetch(prefix, np.array([1, 2]), tokens("abcdefgh"), slot=0)
    first = engine.prefill(prefix, tokens("i"), 8, GREEDY, last=True)
    engine.insert(prefix, first, 1, np.array([1, 2, 3]), 9, GREEDY, shared_pages=2)
    assert engine.read(engine.generate([Row(1, 3)])).tokens[0] == ord("k")
    with pytest.raises(Misuse, match="fetched page 1"):
        engine.fetch(engine.acquire_prefix(), np.array([1]), tokens("abcx"), slot=0)


def test_missing_fetch_is_seen():
    engine = MockEngine()
    with pytest.raises(Misuse, match="the prefix holds 0"):
        engine.prefill(engine.acquire_prefix(), tokens("e"), 4, GREEDY, last=True)


def test_logprobs_are_the_rules():
    engine = MockEngine(Table({ord("a"): {ord("b"): 0.75, ord("c"): 0.25}}))
    prefix = engine.acquire_prefix()
    step = engine.prefill(prefix, tokens("ab"), 0, GREEDY, last=True, prompt_logprobs=True)
    prompt = engine.read_prompt(step)
    assert prompt.tokens.tolist() == [ord("b"), -1]
    assert math.isclose(prompt.logprobs[0], math.log(0.75), abs_tol=1e-6)
    assert prompt.top_tokens[0, :2].tolist() == [ord("b"), ord("c")]
    assert math.isclose(prompt.top_logprobs[0, 1], math.log(0.25), abs_tol=1e-6)
    assert engine.read(step).tokens[0] == 257
    assert abs(engine.read(step).logprobs[0]) < 1e-5


def test_sampling_is_reproducible_and_follows_its_options():
    rule = Table({}, otherwise={ord("a"): 0.4, ord("b"): 0.3, ord("c"): 0.2, ord("d"): 0.1})

    def draw(rule=rule, **options) -> set[int]:
        found = set()
        for seed in range(60):
            engine = MockEngine(rule)
            sampling = SamplingParams(temperature=1.0, seed=seed, **options)
            chosen = {start(engine, "x", slot, [slot + 1], sampling) for slot in (0, 1)}
            assert len(chosen) == 1
            found |= chosen
        return found

    assert draw() == set(b"abcd")
    assert draw(top_k=2) == set(b"ab")
    assert draw(top_p=0.5) == set(b"ab")
    assert draw(min_p=0.5) == set(b"abc")
    assert draw(logit_bias=((ord("z"), 100.0),)) == set(b"z")
    assert draw(min_tokens=1, suppressed=tuple(b"abc")) == set(b"d")
    equal = Table({}, otherwise={ord(letter): 0.25 for letter in "dcba"})
    assert [draw(equal, **options) for options in ({"top_k": 1}, {"top_k": 3}, {"top_p": 0.4}, {"min_p": 1.0})] == [
        set(b"a"), set(b"abc"), set(b"ab"), set(b"abcd")
    ]  # fmt: skip


def test_penalties_count_generated_tokens():
    engine = MockEngine(Table({}, otherwise={ord("a"): 0.6, ord("b"): 0.4}))
    sampling = SamplingParams(presence_penalty=1.0)
    assert start(engine, "x", 0, [1], sampling) == ord("a")
    assert engine.read(engine.generate([Row(0, 1)])).tokens[0] == ord("b")  # log 0.6 - 1 < log 0.4


def test_top_n_sigma_is_of_the_logits():
    """Of 0, -1, -2, -3 the standard deviation is sqrt(5) / 2 = 1.118; what cannot be chosen does not count."""

    def kept(n: float, temperature: float = 1.0) -> set[int]:
        logits = np.array([-np.inf, 0.0, -1.0, -2.0, -3.0])
        options = [SamplingParams(temperature=temperature, top_n_sigma=n, seed=seed) for seed in range(300)]
        return {choose(logits, [0], one, collections.Counter(), 0, None) for one in options}

    assert [kept(n) for n in (-1, 0, 0.8, 1.0, 1.8)] == [{1, 2, 3, 4}, {1, 2, 3, 4}, {1}, {1, 2}, {1, 2, 3}]
    assert kept(1.0, 3.0) == {1, 2}


def test_repetition_comes_before_presence():
    """2 log 0.8 - 1 = -1.45 is more than log 0.2 = -1.61; 2 (log 0.8 - 1) = -2.45 would be less."""
    engine = MockEngine(Table({}, otherwise={ord("a"): 0.8, ord("b"): 0.2}))
    assert start(engine, "x", 0, [1], SamplingParams(repetition_penalty=2.0, presence_penalty=1.0)) == ord("a")
    assert engine.read(engine.generate([Row(0, 1)])).tokens[0] == ord("a")


def test_mask_restricts_a_slot():
    engine = MockEngine()
    start(engine, "a", 0, [1])
    mask = np.zeros(10, np.uint32)
    mask[ord("z") // 32] = np.uint32(1 << (ord("z") % 32))
    engine.set_mask(0, mask)
    assert engine.read(engine.generate([Row(0, 1)])).tokens[0] == ord("z")


def test_script_ends_with_eos():
    engine = MockEngine(Script({tuple(b"hi"): b"yo"}))
    assert start(engine, "hi", 0, [1]) == ord("y")
    assert [int(engine.read(engine.generate([Row(0, page)])).tokens[0]) for page in (1, 1)] == [ord("o"), 257]


def test_state_has_one_owner():
    engine = MockEngine()
    start(engine, "a", 0, [1])
    seen = []

    def intrude():
        try:
            engine.generate([Row(0, 1)])
        except Misuse as error:
            seen.append(str(error))

    thread = threading.Thread(target=intrude, name="intruder")
    thread.start()
    thread.join(10)
    assert seen == ["generate from a second thread: intruder"]


def test_prefixes_are_counted():
    engine = MockEngine(config=mock_config(prefixes=1))
    prefix = engine.acquire_prefix()
    with pytest.raises(LookupError):
        engine.acquire_prefix()
    engine.release_prefix(prefix)
    with pytest.raises(Misuse, match="twice"):
        engine.release_prefix(prefix)


def test_gates_hold_and_faults_strike():
    engine = MockEngine()
    engine.fault("prefill", RuntimeError("boom"), when=lambda call: call.tokens == tuple(b"bad"))
    prefix = engine.acquire_prefix()
    with pytest.raises(RuntimeError, match="boom"):
        engine.prefill(prefix, tokens("bad"), 0, GREEDY, last=True)
    step = engine.prefill(prefix, tokens("bad"), 0, GREEDY, last=True)
    gate = engine.gate("read")
    got = []
    thread = threading.Thread(target=lambda: got.append(engine.read(step).tokens[0]))
    thread.start()
    assert gate.arrived()
    assert got == []
    gate.open()
    thread.join(10)
    assert got == [ord("e")]


def test_time_is_injected():
    slept = []
    engine = MockEngine(step_seconds=0.25, sleep=slept.append)
    start(engine, "a", 0, [1])
    assert slept == [0.25]
