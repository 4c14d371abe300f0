"""The pool of KV pages: who holds which page. Host bookkeeping only; the content lives in the engine.

A page is in one of three states::

    free   nobody needs its content
    used   one or more sequences hold it (reference-counted: the prefix cache shares pages)
    idle   no sequence holds it, but the prefix cache would like its content back

`allocate` takes free pages first and then the idle page that has been idle longest, telling the cache about it. Idle
pages therefore never stand in anybody's way, and `available` counts both. Page 0 is the engine's scratch page and is
never given out.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable


class OutOfPages(Exception):
    """Fewer pages are available than were asked for; nothing was allocated."""


class PagePool:
    """``pages`` counts all pages of the engine's pool, the scratch page included."""

    def __init__(self, pages: int):
        if pages < 2:
            raise ValueError(f"a pool of {pages} pages has none beside the scratch page: give it at least 2")
        self.total = pages - 1  # that can be given out
        self.evict: Callable[[int], None] = lambda page: None  # an idle page is about to be given away
        self._free = collections.deque(range(1, pages))
        self._references: dict[int, int] = {}  # used pages
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()  # longest idle first
        self._kept: set[int] = set()  # pages that become idle, not free, when nobody holds them

    @property
    def used(self) -> int:
        """Pages held by sequences."""
        return len(self._references)

    @property
    def idle(self) -> int:
        """Pages that only the prefix cache still knows."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """Pages that `allocate` could give out now."""
        return len(self._free) + len(self._idle)

    def references(self, page: int) -> int:
        """How many hold this page."""
        return self._references.get(page, 0)

    def allocate(self, count: int) -> list[int]:
        """``count`` pages, each held once. Raises `OutOfPages`, and then changes nothing."""
        if count > self.available:
            raise OutOfPages(f"{count} pages wanted, {self.available} of {self.total} available")
        pages = []
        for _ in range(count):
            if not self._free:
                self._evict_one()
            page = self._free.popleft()
            self._references[page] = 1
            pages.append(page)
        return pages

    def share(self, page: int) -> None:
        """Holds a used or idle page once more."""
        if page in self._idle:
            del self._idle[page]
            self._references[page] = 1
        elif page in self._references:
            self._references[page] += 1
        else:
            raise ValueError(f"page {page} is free: its content is not there to be shared")

    def release(self, pages: Iterable[int]) -> None:
        """Lets go of pages once each. Pages are released last one first, so that of a sequence's idle pages the later
        ones, which are useless without the earlier, are given away first."""
        for page in reversed(list(pages)):
            count = self._references.get(page)
            if count is None:
                raise ValueError(f"page {page} is held by nobody")
            if count > 1:
                self._references[page] = count - 1
                continue
            del self._references[page]
            if page in self._kept:
                self._idle[page] = None
            else:
                self._free.append(page)

    def keep(self, page: int) -> None:
        """The prefix cache wants this used page's content to outlive its holders."""
        if page not in self._references:
            raise ValueError(f"page {page} is held by nobody: its content cannot be relied on")
        self._kept.add(page)

    def forget(self, page: int) -> None:
        """The prefix cache has no use for this page any more; an idle page becomes free."""
        self._kept.discard(page)
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def _evict_one(self) -> None:
        page = next(iter(self._idle))
        self.evict(page)  # the cache forgets it, and all that hangs on it
        self.forget(page)
