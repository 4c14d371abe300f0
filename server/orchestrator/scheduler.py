"""Which sequence, which chunk, which slot, which pages. Host only: no threads, no clock, no engine.

The order of calls in a sequence's life, each under the orchestrator's lock::

    add -> admit -> next_chunk ... next_chunk -> commit (the first token) -> inserted -> plan, commit, plan, commit ...
    -> end

**Admission** is first in, first out by `Rank` and asks for a slot, a prefix and the pages of the prompt; the head of
the queue is never overtaken for lack of these. The one exception: a sequence that begins like one whose prompt is just
being computed waits until those pages are in the pool, so that both (samples of one request, users of one system
prompt) share them.

**Pages grow** with the sequence, one at a time, when `plan` needs one. When the pool runs out, the youngest sequence
that holds pages is put back: it keeps its tokens, gives up everything else, returns to its place in the queue and is
prefilled again later. The oldest sequence is never put back and always fits alone (`misfit` refuses the others at the
door), so it ends, and so does everybody. Admission leaves a page for each sequence that runs, lest the newcomer be put
back at once.

**Models whose keys depend on the length** of the whole sequence (`ModelConfig.follows_length`) share pages within one
regime only. Where a growing sequence enters another regime in which all its keys change (longrope), it is put back and
prefilled anew.

**Adapters** (LoRA) change keys and values, so sequences of different adapters share no pages either.

**Groups of devices** (`EngineConfig.groups`) have slots, pages and a prefix cache of their own; slot s is in group ``s % groups``. A
sequence goes to the group whose cache has most of its prompt, unless that one has many more sequences than another: every
group's part of a step is padded to the fullest one's. Pages are found within the group, and so is the youngest to be put back.

**Guided sequences** (structured output) take their steps together and not one ahead of the host: what may come next
depends on the token before. They are left out of a step while one of them has a token that was not read yet, so that
with others around they advance at every other step; the others advance at every step.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import operator
from collections.abc import Hashable, Iterable
from typing import NamedTuple

import numpy as np

from engine.config import EngineConfig, ModelConfig
from server.orchestrator.pages import OutOfPages, PagePool
from server.orchestrator.prefix_cache import PrefixCache
from server.orchestrator.sequence import Sequence, Stage

_rank = operator.attrgetter("rank")


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A piece of a prompt for one `prefill` call."""

    tokens: np.ndarray  # int32 [n]
    start: int
    last: bool
    next_token: int  # the prompt token after the chunk; -1 where the prompt ends


class PlannedRow(NamedTuple):
    """One row of a decode step: a sequence in one stay (``epoch``) of its slot, and the page it writes."""

    sequence: Sequence
    epoch: int
    slot: int
    page: int


@dataclasses.dataclass(eq=False)
class Group:
    """What one group of devices has."""

    pool: PagePool
    cache: PrefixCache | None
    free_slots: list[int]  # a heap: low slots first


class Scheduler:
    """``prefix_cache`` False computes every prompt from its first token. Without ``model``, keys depend on tokens only."""

    def __init__(self, config: EngineConfig, *, prefix_cache: bool = True, model: ModelConfig | None = None):
        self._config = config
        self._model = model if model is not None and model.follows_length else None
        self._groups: list[Group] = []
        for number in range(config.groups):
            pool = PagePool(config.kv_pages)
            cache = PrefixCache(pool, config.page_size) if prefix_cache else None
            self._groups.append(Group(pool, cache, list(range(number, config.slots, config.groups))))
        self._waiting: list[Sequence] = []  # by rank
        self._running: set[Sequence] = set()  # prefill, ready, decode
        self._free_prefixes = config.prefixes

    # What is where

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._waiting)

    @property
    def unfinished(self) -> int:
        """Sequences that have not ended."""
        return len(self._waiting) + len(self._running)

    @property
    def slots_used(self) -> int:
        return self._config.slots - sum(len(group.free_slots) for group in self._groups)

    @property
    def pages_used(self) -> int:
        """Pages held by sequences."""
        return sum(group.pool.used for group in self._groups)

    @property
    def pages_total(self) -> int:
        """Pages that sequences can hold."""
        return sum(group.pool.total for group in self._groups)

    def clear_cache(self) -> None:
        """Forgets what pages hold. Pages in use stay with their holders."""
        for group in self._groups:
            if group.cache is not None:
                group.cache.clear()

    @property
    def has_rows(self) -> bool:
        """Whether `plan` would find a row to advance."""
        return any(sequence.stage is Stage.DECODE and self._wants_step(sequence) for sequence in self._running)

    def current(self, sequence: Sequence, epoch: int) -> bool:
        """Whether the sequence is still in the stay that ``epoch`` names."""
        return sequence.epoch == epoch and sequence.stage is not Stage.ENDED

    # Into the slots

    def misfit(self, prompt_tokens: int, max_tokens: int) -> str | None:
        """Why such a sequence could never be served, or `None`."""
        total = prompt_tokens + max_tokens
        if total > self._config.max_len:
            return (
                f"prompt of {prompt_tokens} tokens + max_tokens {max_tokens} = {total} is over this server's limit of "
                f"{self._config.max_len} tokens: shorten the prompt or lower max_tokens"
            )
        needed = self._pages_for(total - 1)
        most = self._groups[0].pool.total  # all groups have as many
        if max_tokens and needed > most:
            return (
                f"prompt of {prompt_tokens} tokens + max_tokens {max_tokens} needs {needed} KV pages of "
                f"{self._config.page_size} tokens, this server has {most}: "
                "shorten the prompt or lower max_tokens"
            )
        return None

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence that `misfit` has nothing against."""
        bisect.insort(self._waiting, sequence, key=_rank)

    def admit(self) -> Sequence | None:
        """Takes the next sequence that can be prefilled now and gives it a prefix, a slot and pages."""
        if not self._free_prefixes:
            return None
        for index, sequence in enumerate(self._waiting):
            if self._awaits_pages_of_another(sequence):
                continue
            if not self._reserve(sequence):
                return None
            del self._waiting[index]
            self._running.add(sequence)
            self._free_prefixes -= 1
            sequence.stage = Stage.PREFILL
            sequence.prefill_length = len(sequence.tokens)
            sequence.regime = self._regime(sequence)
            sequence.prefilled = sequence.shared_pages * self._config.page_size
            return sequence
        return None

    def next_chunk(self, sequence: Sequence) -> Chunk:
        """The next piece of the prompt, which counts as prefilled from now on."""
        start = sequence.prefilled
        end = min(start + self._config.prefill_chunk, sequence.prefill_length)
        sequence.prefilled = end
        last = end == sequence.prefill_length
        return Chunk(
            tokens=np.array(sequence.tokens[start:end], np.int32),
            start=start,
            last=last,
            next_token=-1 if last else sequence.tokens[end],
        )

    def prefix_returned(self) -> None:
        """A prefix was given back to the engine."""
        self._free_prefixes += 1

    def inserted(self, sequence: Sequence) -> None:
        """The prompt's pages are written (the insert was dispatched): others may share them, and `plan` may advance
        it."""
        sequence.stage = Stage.DECODE
        if (cache := self._group_of(sequence).cache) is not None:
            cache.store(sequence.tokens[: sequence.prefill_length], sequence.pages, sequence.regime)

    # Step by step

    def plan(self) -> list[PlannedRow]:
        """The rows of the next decode step, oldest sequence first; grows their pages and puts sequences back where it
        must."""
        rows = []
        decoding = [sequence for sequence in self._running if sequence.stage is Stage.DECODE]
        decoding.sort(key=_rank)
        guided_wait = any(sequence.awaits_token for sequence in decoding)
        for sequence in decoding:
            if sequence.stage is not Stage.DECODE or not self._wants_step(sequence):
                continue  # put back for an older one, or its last step is on its way
            if guided_wait and sequence.matcher is not None:
                continue
            if self._model is not None and self._model.outgrows(sequence.prefill_length, sequence.position + 1):
                if sequence.planned == sequence.generated:  # else a token is on its way that must not be lost
                    self.put_back(sequence)
                continue
            index = sequence.position // self._config.page_size
            if index == len(sequence.pages) and not self._grow(sequence):
                continue
            assert sequence.slot is not None
            rows.append(PlannedRow(sequence, sequence.epoch, sequence.slot, sequence.pages[index]))
            sequence.planned += 1
        return rows

    def commit(self, sequence: Sequence, epoch: int, token: int) -> bool:
        """Takes in a token that was read. False: the sequence is not in that stay any more, the token is to be
        dropped."""
        if not self.current(sequence, epoch):
            return False
        sequence.tokens.append(token)
        if sequence.stage is Stage.PREFILL:
            sequence.stage = Stage.READY
            sequence.planned = sequence.generated
        return True

    def complete(self, sequence: Sequence) -> None:
        """The sequence has all its tokens with its first one: nothing but the insert that shares its prompt is left to
        do. Not worth it for prompts without a new full page; they end."""
        cache = self._group_of(sequence).cache
        if cache is None or sequence.prefill_length // self._config.page_size <= sequence.shared_pages:
            self.end(sequence)
        sequence.complete = True

    def end(self, sequence: Sequence) -> None:
        """Frees all that a sequence holds, whatever its stage; no effect on one that has ended."""
        if sequence.stage is Stage.WAITING:
            self._waiting.remove(sequence)
        elif sequence.stage is not Stage.ENDED:
            self._vacate(sequence)
        sequence.stage = Stage.ENDED
        sequence.epoch += 1

    def put_back(self, sequence: Sequence) -> None:
        """Returns a running sequence to its place in the queue; its tokens stay. One that has all its tokens just
        ends."""
        if sequence.complete:
            self.end(sequence)
            return
        self._vacate(sequence)
        sequence.stage = Stage.WAITING
        sequence.epoch += 1
        sequence.planned = sequence.generated
        sequence.put_back += 1
        self.add(sequence)

    # Inside

    def _group_of(self, sequence: Sequence) -> Group:
        """The group that a running sequence is in. One without a slot, which only scores its prompt, touches none."""
        return self._groups[(sequence.slot or 0) % len(self._groups)]

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._config.page_size)

    def _regime(self, sequence: Sequence) -> Hashable:
        by_length = None if self._model is None else self._model.regime(len(sequence.tokens))
        return sequence.sampling.adapter, by_length

    def _wants_step(self, sequence: Sequence) -> bool:
        return sequence.planned < sequence.max_tokens

    def _awaits_pages_of_another(self, sequence: Sequence) -> bool:
        page = self._config.page_size
        if self._cache(self._groups[0], sequence) is None or len(sequence.tokens) <= page:
            return False
        begin, regime = sequence.tokens[:page], self._regime(sequence)
        return any(
            other.stage in (Stage.PREFILL, Stage.READY)
            and other.max_tokens
            and other.prefill_length >= page
            and other.tokens[:page] == begin
            and other.regime == regime
            for other in self._running
        )

    def _cache(self, group: Group, sequence: Sequence) -> PrefixCache | None:
        """A group's cache, where it is for this sequence."""
        return group.cache if sequence.use_cache and sequence.max_tokens > 0 else None

    def _reserve(self, sequence: Sequence) -> bool:
        """Slot and pages for a prompt. A sequence that only scores its prompt needs neither."""
        if not sequence.max_tokens:
            return True
        return any(self._reserve_in(group, sequence) for group in self._by_preference(sequence))

    def _by_preference(self, sequence: Sequence) -> list[Group]:
        """The groups with a free slot, the best first."""
        if len(self._groups) == 1:
            return [group for group in self._groups if group.free_slots]
        freest = max(len(group.free_slots) for group in self._groups)
        slack = max(1, self._config.group_slots // 4)  # sequences that a group may have beyond the emptiest, for its cache's sake

        def preference(group: Group) -> tuple[int, int]:
            balanced = freest - len(group.free_slots) <= slack
            cache = self._cache(group, sequence) if balanced else None
            cached = cache.known(sequence.tokens, self._regime(sequence)) if cache is not None else 0
            return -cached, -len(group.free_slots)

        return sorted((group for group in self._groups if group.free_slots), key=preference)

    def _reserve_in(self, group: Group, sequence: Sequence) -> bool:
        cache = self._cache(group, sequence)
        shared = cache.match(sequence.tokens, self._regime(sequence)) if cache is not None else []
        needed = self._pages_for(len(sequence.tokens)) - len(shared)
        running = sum(self._group_of(other) is group for other in self._running)
        if needed + running > group.pool.available:
            group.pool.release(shared)
            return False
        sequence.pages = shared + group.pool.allocate(needed)
        sequence.shared_pages = len(shared)
        sequence.slot = heapq.heappop(group.free_slots)
        return True

    def _grow(self, sequence: Sequence) -> bool:
        """One more page, at the cost of younger sequences if need be. False: there was none younger, it was put back
        itself."""
        group = self._group_of(sequence)
        while True:
            try:
                sequence.pages += group.pool.allocate(1)
                return True
            except OutOfPages:
                youngest = _youngest(other for other in self._running if other.pages and self._group_of(other) is group)
                self.put_back(youngest)
                if youngest is sequence:
                    return False

    def _vacate(self, sequence: Sequence) -> None:
        self._running.discard(sequence)
        group = self._group_of(sequence)
        if sequence.stage is Stage.DECODE and group.cache is not None:
            # The last token's page may not be written yet: it is the input of a step that may never be dispatched.
            group.cache.store(sequence.tokens[:-1], sequence.pages, sequence.regime)
        group.pool.release(sequence.pages)
        if sequence.slot is not None:
            heapq.heappush(group.free_slots, sequence.slot)
        sequence.slot = None
        sequence.pages = []
        sequence.shared_pages = 0


def _youngest(sequences: Iterable[Sequence]) -> Sequence:
    return max(sequences, key=_rank)
