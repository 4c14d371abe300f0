"""Which pages hold which tokens: full pages of finished and running sequences, shared by content.

The cache is a tree. A node is one full page; the path from the root to it spells every token up to the end of that
page, which is what its keys and values depend on. A child is found by the tokens of its page, in a dict: the hash finds
it, the comparison of all tokens along the path rules out collisions. Where keys and values also depend on something
else, there is one tree for each ``regime``: the adapter, and with some models how long the whole prompt is
(`ModelConfig.regime`).

The scheduler calls `match` when a sequence is admitted and holds the pages it gets; `store` after the sequence's pages
have been written by an `insert` that was dispatched, and again with the generated tokens when the sequence ends. Pages
nobody holds stay idle in the pool until it needs them, the one unused for longest first; a page that goes takes the
nodes below it along, for they cannot be reached without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence

from server.orchestrator.pages import PagePool


@dataclasses.dataclass(eq=False)
class Node:
    """One full page. ``tokens`` are those of this page only."""

    tokens: tuple[int, ...]
    page: int
    parent: Node | None
    children: dict[tuple[int, ...], Node] = dataclasses.field(default_factory=dict)


class PrefixCache:
    """Knows the cached pages of ``pool``; pages have ``page_size`` tokens."""

    def __init__(self, pool: PagePool, page_size: int):
        self._pool = pool
        self._page_size = page_size
        self._roots: dict[Hashable, Node] = {}  # by regime
        self._nodes: dict[int, Node] = {}  # by page
        pool.evict = self._drop

    def __len__(self) -> int:
        """Cached pages, held or idle."""
        return len(self._nodes)

    def match(self, tokens: Sequence[int], regime: Hashable = None) -> list[int]:
        """The cached pages that begin ``tokens``, each held once more for the caller.

        At least the last token is never covered: it has to be computed to know what follows.
        """
        pages = []
        node = self._root(regime)
        for chunk in self._full_pages(tokens[: len(tokens) - 1]):
            child = node.children.get(chunk)
            if child is None:
                break
            self._pool.share(child.page)
            pages.append(child.page)
            node = child
        return pages

    def known(self, tokens: Sequence[int], regime: Hashable = None) -> int:
        """How many pages `match` would give."""
        pages, node = 0, self._roots.get(regime)
        for chunk in self._full_pages(tokens[: len(tokens) - 1]):
            node = node.children.get(chunk) if node is not None else None
            if node is None:
                break
            pages += 1
        return pages

    def store(self, tokens: Sequence[int], pages: Sequence[int], regime: Hashable = None) -> None:
        """Remembers what the full pages among ``pages`` hold; the caller holds them and ``tokens`` are written to them.

        Where the same content is cached in another page already, that one stays.
        """
        node = self._root(regime)
        for chunk, page in zip(self._full_pages(tokens), pages, strict=False):
            child = node.children.get(chunk)
            if child is None:
                if page in self._nodes:  # the page hangs elsewhere: its path was re-made by another sequence meanwhile
                    return
                child = Node(chunk, page, node)
                node.children[chunk] = child
                self._nodes[page] = child
                self._pool.keep(page)
            node = child

    def clear(self) -> None:
        """Forgets everything. Pages in use stay with their holders."""
        for root in self._roots.values():
            for child in list(root.children.values()):
                self._drop(child.page)

    def _root(self, regime: Hashable) -> Node:
        return self._roots.setdefault(regime, Node((), 0, None))

    def _full_pages(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        for end in range(self._page_size, len(tokens) + 1, self._page_size):
            yield tuple(tokens[end - self._page_size : end])

    def _drop(self, page: int) -> None:
        """Forgets a page and all below it."""
        top = self._nodes[page]
        assert top.parent is not None
        del top.parent.children[top.tokens]
        stack = [top]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            del self._nodes[node.page]
            self._pool.forget(node.page)
