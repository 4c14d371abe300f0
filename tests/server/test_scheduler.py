"""The scheduler without threads: by hand, and driven against the mock engine's pages with random traffic."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestrator_harness import letters

from engine.api import Row, SamplingParams
from engine.mock import MockEngine, digest, mock_config
from server.orchestrator.scheduler import Scheduler
from server.orchestrator.sequence import Rank, Sequence, Stage

GREEDY = SamplingParams()


def sequence(
    arrival: int, prompt: bytes, max_tokens: int = 4, *, sample: int = 0, priority: int = 0, adapter: int = 0, **fields
) -> Sequence:
    sampling = SamplingParams(adapter=adapter)
    return Sequence(Rank(priority, arrival, sample), list(prompt), sampling, max_tokens, **fields)


def prefill(scheduler: Scheduler, admitted: Sequence, token: int = 1) -> None:
    """Every chunk, the first token, and the insert."""
    while not scheduler.next_chunk(admitted).last:
        pass
    assert scheduler.commit(admitted, admitted.epoch, token)
    scheduler.inserted(admitted)
    scheduler.prefix_returned()


def test_first_in_first_out_and_priority_before_it():
    scheduler = Scheduler(mock_config(slots=4, prefixes=4))
    late_but_urgent = sequence(3, b"c", priority=-1)
    for waiting in (sequence(1, b"a"), sequence(2, b"b"), late_but_urgent):
        scheduler.add(waiting)
    assert [scheduler.admit().rank.arrival for _ in range(3)] == [3, 1, 2]
    assert scheduler.admit() is None


def test_admission_by_slots_and_prefixes():
    scheduler = Scheduler(mock_config(slots=2, prefixes=1))
    for arrival in range(3):
        scheduler.add(sequence(arrival, bytes([97 + arrival])))
    first = scheduler.admit()
    assert scheduler.admit() is None  # the only prefix is out
    prefill(scheduler, first)
    second = scheduler.admit()
    prefill(scheduler, second)
    assert scheduler.admit() is None  # both slots are taken
    assert {first.slot, second.slot} == {0, 1}
    scheduler.end(first)
    assert scheduler.admit().slot == 0


def test_the_head_of_the_queue_is_not_overtaken_for_lack_of_pages():
    scheduler = Scheduler(mock_config(slots=4, prefixes=4, page_size=4, kv_pages=7, max_len=24))
    running = sequence(0, b"a" * 9)
    scheduler.add(running)
    assert scheduler.admit() is running  # 3 of 6 pages
    scheduler.add(sequence(1, b"b" * 12))
    scheduler.add(sequence(2, b"c"))
    assert scheduler.admit() is None
    scheduler.end(running)
    assert scheduler.admit().rank.arrival == 1


def test_chunks_of_a_prompt():
    scheduler = Scheduler(mock_config(prefill_chunk=4))
    long = sequence(0, b"abcdefghij")
    scheduler.add(long)
    scheduler.admit()
    chunks = [scheduler.next_chunk(long) for _ in range(3)]
    assert [bytes(chunk.tokens.tolist()) for chunk in chunks] == [b"abcd", b"efgh", b"ij"]
    assert [chunk.start for chunk in chunks] == [0, 4, 8]
    assert [chunk.last for chunk in chunks] == [False, False, True]
    assert [chunk.next_token for chunk in chunks] == [ord("e"), ord("i"), -1]
    assert chunks[0].tokens.dtype == np.int32


def test_a_page_is_taken_when_a_position_needs_it():
    scheduler = Scheduler(mock_config(page_size=4))
    growing = sequence(0, b"abc", 4)
    scheduler.add(growing)
    scheduler.admit()
    prefill(scheduler, growing)
    assert len(growing.pages) == 1
    (row,) = scheduler.plan()  # position 3
    assert (row.slot, row.page) == (growing.slot, growing.pages[0])
    assert len(growing.pages) == 1
    (row,) = scheduler.plan()  # position 4, although the step before was not read
    assert row.page == growing.pages[1]
    scheduler.plan()
    assert growing.planned == 4
    assert scheduler.plan() == []  # never past max_tokens
    assert not scheduler.has_rows


def test_the_youngest_is_put_back_and_keeps_its_tokens():
    scheduler = Scheduler(mock_config(slots=2, page_size=2, kv_pages=6, max_len=10), prefix_cache=False)
    old, young = sequence(0, b"ab", 8), sequence(1, b"cd", 8)
    for each in (old, young):
        scheduler.add(each)
        assert scheduler.admit() is each
        prefill(scheduler, each)
    scheduler.plan()
    scheduler.plan()  # two pages each
    scheduler.plan()  # the fifth page is the elder's; the younger has none left for position 4
    assert (old.stage, young.stage) == (Stage.DECODE, Stage.WAITING)
    assert young.tokens == [*b"cd", 1]
    assert (young.planned, young.pages, young.slot) == (1, [], None)
    assert scheduler.pages_used == 3
    assert scheduler.commit(young, 0, 5) is False  # what was on its way is dropped
    assert scheduler.commit(old, 0, 5) is True
    assert scheduler.admit() is None  # two pages are there, but one is for the elder's next position
    scheduler.end(old)
    assert scheduler.admit() is young
    assert young.prefill_length == 3
    assert bytes(scheduler.next_chunk(young).tokens.tolist()) == b"cd\x01"


def test_samples_wait_for_the_pages_of_the_first_and_share_them():
    scheduler = Scheduler(mock_config(slots=4, prefixes=4, page_size=4))
    samples = [sequence(0, b"abcdefghi", sample=sample) for sample in range(2)]
    other = sequence(1, b"zzzzzzzzz")
    for each in (*samples, other):
        scheduler.add(each)
    assert scheduler.admit() is samples[0]
    assert scheduler.admit() is other  # does not wait behind sample 1
    prefill(scheduler, samples[0])
    assert scheduler.admit() is samples[1]
    assert samples[1].pages[:2] == samples[0].pages[:2]
    assert scheduler.next_chunk(samples[1]).start == 8
    assert scheduler.pages_used == 3 + 3 + 1


def test_a_conversation_finds_its_last_turn():
    scheduler = Scheduler(mock_config(page_size=2))
    turn = sequence(0, b"ab", 4)
    scheduler.add(turn)
    scheduler.admit()
    prefill(scheduler, turn, ord("c"))
    for token in b"def":
        (row,) = scheduler.plan()
        scheduler.commit(turn, row.epoch, token)
    scheduler.end(turn)
    following = sequence(1, b"abcdefgh")
    scheduler.add(following)
    scheduler.admit()
    assert following.shared_pages == 2  # abcd; f was never an input, so the page of ef is not full


def test_what_can_never_fit_is_named():
    scheduler = Scheduler(mock_config(slots=1, page_size=4, kv_pages=4, max_len=64))
    assert "prompt of 60 tokens + max_tokens 5 = 65" in scheduler.misfit(60, 5)
    assert "needs 4 KV pages" in scheduler.misfit(12, 2)
    assert scheduler.misfit(12, 1) is None
    assert scheduler.misfit(64, 0) is None  # scoring needs no pages


def test_scoring_needs_a_prefix_only():
    scheduler = Scheduler(mock_config(slots=1))
    busy = sequence(0, b"ab")
    scheduler.add(busy)
    scheduler.admit()
    scheduler.add(sequence(1, b"cd", 0))
    scored = scheduler.admit()
    assert scored.rank.arrival == 1
    assert scored.slot is None and scored.pages == []


def test_groups_are_filled_evenly_and_have_their_own_pages():
    """Five pages in each of two groups; slots 0 and 2 are the first one's."""
    scheduler = Scheduler(mock_config(slots=4, prefixes=4, page_size=4, kv_pages=6, max_len=16, dp=2))
    admitted = []
    for arrival, prompt in enumerate((b"aaaaa", b"bbbbb", b"ccccc", b"ddddd")):
        scheduler.add(sequence(arrival, prompt, 8))
        admitted.append(scheduler.admit())
        prefill(scheduler, admitted[-1])
    assert [each.slot for each in admitted] == [0, 1, 2, 3]
    assert [each.pages for each in admitted] == [[1, 2], [1, 2], [3, 4], [3, 4]]
    assert (scheduler.pages_used, scheduler.pages_total) == (8, 10)
    for _ in range(3):
        scheduler.plan()
    assert [row.slot for row in scheduler.plan()] == [0, 1]  # the younger of each group is put back for the elder's third page
    assert [each.pages for each in admitted] == [[1, 2, 5], [1, 2, 5], [], []]


def test_a_cached_prompt_draws_to_its_group_unless_that_is_too_full():
    scheduler = Scheduler(mock_config(slots=16, prefixes=8, page_size=4, dp=2))
    groups = []
    for arrival, prompt in enumerate((b"xx", b"same prompt", b"yy", *[b"same prompt"] * 6)):
        scheduler.add(each := sequence(arrival, prompt, 16))
        assert scheduler.admit() is each
        groups.append(each.slot % 2)
        prefill(scheduler, each)
    # Cached in group 1, which may have two sequences (a quarter of its slots) more than group 0. Then it is cached in both.
    assert groups == [0, 1, 0, 1, 1, 1, 1, 0, 0]


class Driver:
    """Scheduler and mock engine in one thread, one step ahead like the real loop."""

    def __init__(self, config, prefix_cache: bool):
        self.scheduler = Scheduler(config, prefix_cache=prefix_cache)
        self.engine = MockEngine(digest, config=config)
        self.pending = None

    def turn(self) -> None:
        admitted = self.scheduler.admit()
        if admitted is not None:
            self._prefill(admitted)
        rows = self.scheduler.plan()
        step = self.engine.generate([Row(row.slot, row.page) for row in rows]) if rows else None
        if self.pending is not None:
            before, results = self.pending[0], self.engine.read(self.pending[1])
            for index, row in enumerate(before):
                if self.scheduler.commit(row.sequence, row.epoch, int(results.tokens[index])):
                    self._maybe_end(row.sequence)
        self.pending = (rows, step) if rows else None

    def _prefill(self, admitted: Sequence) -> None:
        prefix = self.engine.acquire_prefix()
        if admitted.shared_pages:
            shared = admitted.pages[: admitted.shared_pages]
            size = self.engine.config.page_size * len(shared)
            self.engine.fetch(prefix, np.array(shared), np.array(admitted.tokens[:size]), slot=admitted.slot)
        while True:
            chunk = self.scheduler.next_chunk(admitted)
            step = self.engine.prefill(prefix, chunk.tokens, chunk.start, GREEDY, last=chunk.last)
            if chunk.last:
                break
        self.scheduler.commit(admitted, admitted.epoch, int(self.engine.read(step).tokens[0]))
        self.engine.insert(prefix, step, admitted.slot, np.array(admitted.pages), admitted.prefill_length, GREEDY,
                           shared_pages=admitted.shared_pages)  # fmt: skip
        self.scheduler.inserted(admitted)
        self._maybe_end(admitted)
        self.engine.release_prefix(prefix)
        self.scheduler.prefix_returned()

    def _maybe_end(self, each: Sequence) -> None:
        if each.generated == each.max_tokens:
            self.scheduler.end(each)


@settings(max_examples=80, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.text("ab", min_size=1, max_size=12), st.integers(1, 12)), min_size=1, max_size=8),
    kv_pages=st.integers(13, 24),
    prefix_cache=st.booleans(),
    cancelled=st.dictionaries(st.integers(0, 7), st.integers(0, 30), max_size=2),
    groups=st.sampled_from([1, 2]),
)
def test_whatever_the_pressure_everybody_ends_with_the_right_tokens(prompts, kv_pages, prefix_cache, cancelled, groups):
    config = mock_config(slots=4, page_size=2, kv_pages=kv_pages, max_len=24, prefill_chunk=4, dp=groups)
    driver = Driver(config, prefix_cache)
    sequences = [sequence(arrival, prompt.encode(), count) for arrival, (prompt, count) in enumerate(prompts)]
    for each in sequences:
        assert driver.scheduler.misfit(each.prompt_tokens, each.max_tokens) is None
        driver.scheduler.add(each)
    for turn in range(2000):
        for index, moment in cancelled.items():
            if index < len(sequences) and moment == turn:
                driver.scheduler.end(sequences[index])
        driver.turn()
        if driver.scheduler.unfinished == 0 and driver.pending is None:
            break
    else:
        raise AssertionError("somebody never ends")
    assert driver.engine.violations == []
    assert (driver.scheduler.pages_used, driver.scheduler.slots_used) == (0, 0)
    for each, (prompt, count) in zip(sequences, prompts, strict=True):
        text = letters(prompt.encode(), count)
        got = bytes(each.tokens[each.prompt_tokens :]).decode()
        assert text.startswith(got)
        assert got == text or each.rank.arrival in cancelled


def test_adapters_share_no_pages():
    scheduler = Scheduler(mock_config(slots=4, prefixes=4, page_size=4, max_len=24))

    def shared(arrival, adapter):
        """Pages that a finished run of one and the same prompt found in the cache."""
        run = sequence(arrival, b"abcdefghi", adapter=adapter)
        scheduler.add(run)
        assert scheduler.admit() is run
        found = run.shared_pages
        prefill(scheduler, run)
        scheduler.end(run)
        return found

    assert [shared(i, adapter) for i, adapter in enumerate((0, 1, 2, 1, 0, 2))] == [0, 0, 0, 2, 2, 2]


def test_a_prompt_does_not_wait_for_the_pages_of_another_adapter():
    scheduler = Scheduler(mock_config(slots=4, prefixes=4, page_size=4, max_len=24))
    for arrival, adapter in enumerate((1, 1, 2)):
        scheduler.add(sequence(arrival, b"abcdefghi", adapter=adapter))
    assert [scheduler.admit().rank.arrival for _ in range(2)] == [0, 2]  # 1 waits for the pages of 0
    assert scheduler.admit() is None
