"""The page pool by hand, and pool and prefix cache together against a plain model (hypothesis)."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from server.orchestrator.pages import OutOfPages, PagePool
from server.orchestrator.prefix_cache import PrefixCache


def test_scratch_page_is_never_given_out():
    pool = PagePool(4)
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    assert pool.total == 3


def test_running_out_changes_nothing():
    pool = PagePool(4)
    pool.allocate(2)
    with pytest.raises(OutOfPages, match="2 pages wanted, 1 of 3 available"):
        pool.allocate(2)
    assert (pool.used, pool.available) == (2, 1)


def test_a_shared_page_is_free_when_the_last_lets_go():
    pool = PagePool(3)
    (page,) = pool.allocate(1)
    pool.share(page)
    pool.release([page])
    assert pool.used == 1
    pool.release([page])
    assert (pool.used, pool.available) == (0, 2)


def test_misuse_is_refused():
    pool = PagePool(3)
    for misuse in (lambda: pool.release([1]), lambda: pool.share(1), lambda: pool.keep(1)):
        with pytest.raises(ValueError, match="page 1"):
            misuse()
    with pytest.raises(ValueError, match="at least 2"):
        PagePool(1)


def cached(pages: int = 8, page_size: int = 2) -> tuple[PagePool, PrefixCache]:
    pool = PagePool(pages)
    return pool, PrefixCache(pool, page_size)


def test_full_pages_are_shared_and_the_last_token_is_recomputed():
    pool, cache = cached()
    pages = pool.allocate(3)
    cache.store([1, 2, 3, 4, 5], pages)
    assert len(cache) == 2
    assert cache.match([1, 2, 3, 4, 9]) == pages[:2]
    assert cache.match([1, 2, 3, 4]) == pages[:1]  # all four would leave nothing to compute
    assert cache.match([1, 9, 3, 4, 5]) == []
    assert cache.match([3, 4, 5]) == []  # the same page content elsewhere in a text is another page
    assert pool.references(pages[0]) == 3


def test_idle_pages_live_until_the_pool_needs_them_longest_idle_first():
    pool, cache = cached(pages=5)
    old, new = pool.allocate(2), pool.allocate(2)
    cache.store([1, 2, 3, 4], old)
    cache.store([5, 6, 7, 8], new)
    pool.release(old)
    pool.release(new)
    assert (pool.used, pool.idle, pool.available) == (0, 4, 4)
    assert pool.allocate(1) == [old[1]]  # the tail goes before the head
    assert cache.match([1, 2, 3, 4, 5]) == [old[0]]
    assert cache.match([5, 6, 7, 8, 9]) == new


def test_what_hangs_on_an_evicted_page_goes_with_it():
    pool, cache = cached(pages=4)
    head, tail = pool.allocate(1), pool.allocate(1)
    cache.store([1, 2, 3, 4], head + tail)
    pool.release(head)  # not how the scheduler does it: the tail is still held
    pool.allocate(1)
    pool.allocate(1)
    assert len(cache) == 0
    pool.release(tail)
    assert pool.available == 1


def test_two_sequences_with_the_same_content_keep_one_page():
    pool, cache = cached()
    one, other = pool.allocate(2), pool.allocate(2)
    cache.store([1, 2, 3, 4], one)
    cache.store([1, 2, 3, 4], other)
    assert len(cache) == 2
    pool.release(other)
    assert pool.idle == 0


def test_clear_forgets_everything():
    pool, cache = cached()
    pages = pool.allocate(2)
    cache.store([1, 2, 3, 4], pages)
    pool.release(pages)
    cache.clear()
    assert (len(cache), pool.idle, pool.available) == (0, 0, 7)
    assert cache.match([1, 2, 3]) == []


def test_equal_hashes_are_told_apart():
    class Same(int):
        def __hash__(self) -> int:
            return 7

    pool, cache = cached()
    pages = pool.allocate(1)
    cache.store([Same(1), Same(2)], pages)
    assert hash((Same(1), Same(2))) == hash((Same(3), Same(4)))
    assert cache.match([Same(3), Same(4), Same(5)]) == []


class PoolAndCache(RuleBasedStateMachine):
    """Sequences come, grow, share, and go; ``content`` models what the device holds in each page."""

    PAGES, SIZE = 9, 2

    def __init__(self):
        super().__init__()
        self.pool, self.cache = cached(self.PAGES, self.SIZE)
        self.sequences: list[tuple[list[int], list[int]]] = []  # (tokens, pages)
        self.content: dict[int, tuple[int, ...]] = {}  # page -> all tokens up to its end

    def write(self, tokens: list[int], pages: list[int], begin: int) -> None:
        for index in range(begin, len(pages)):
            self.content[pages[index]] = tuple(tokens[: (index + 1) * self.SIZE])

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def admit(self, tokens):
        shared = self.cache.match(tokens)
        assert len(shared) * self.SIZE < len(tokens)
        for index, page in enumerate(shared):
            assert self.content[page] == tuple(tokens[: (index + 1) * self.SIZE])
        wanted = -(-len(tokens) // self.SIZE) - len(shared)
        held = {page for _, pages in self.sequences for page in pages} | set(shared)
        assert self.pool.available == self.PAGES - 1 - len(held)
        try:
            fresh = self.pool.allocate(wanted)
        except OutOfPages:
            assert wanted > self.PAGES - 1 - len(held)
            self.pool.release(shared)
            return
        assert not set(fresh) & held
        pages = shared + fresh
        self.write(tokens, pages, len(shared))
        self.cache.store(tokens, pages)
        self.sequences.append((list(tokens), pages))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data, token):
        tokens, pages = data.draw(st.sampled_from(self.sequences))
        if len(tokens) % self.SIZE == 0:
            try:
                pages += self.pool.allocate(1)
            except OutOfPages:
                return
        tokens.append(token)
        self.write(tokens, pages, (len(tokens) - 1) // self.SIZE)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data, keep):
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        tokens, pages = self.sequences.pop(index)
        if keep:
            self.cache.store(tokens, pages)
        self.pool.release(pages)

    @rule()
    def clear(self):
        self.cache.clear()

    @invariant()
    def nothing_is_lost_or_counted_twice(self):
        held = [page for _, pages in self.sequences for page in pages]
        assert self.pool.used == len(set(held))
        assert self.pool.used + self.pool.available == self.pool.total
        assert all(self.pool.references(page) == held.count(page) for page in range(1, self.PAGES))
        if not self.sequences:
            assert self.pool.available == self.pool.total


PoolAndCache.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolAndCache = PoolAndCache.TestCase
