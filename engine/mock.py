"""An engine without JAX whose every token can be computed by hand.

It has the verbs of `engine.api.Engine` and honours what they stand on. A *cell* stands for the keys and values of one
position: the token, its position, and a digest of everything before it, because real keys and values depend on all of
that too. Cells move as they do in the real engine: `prefill` appends to a prefix, `insert` copies the prefix into pages
of the pool, `fetch` copies pages back into a prefix, and `generate` writes one cell through the slot's page table,
reads the whole sequence back from the pages and asks a *rule* what follows. So a wrong page table, a page given away
too early, a shared page with other content or a missing fetch is seen: it is recorded in ``violations`` and raised as
`Misuse`.

A rule is a function from all tokens so far to the probabilities of the next one, and tokens are chosen by a plain numpy
sampler that follows `SamplingParams`, with a random key of seed, sample and position: both in ``engine/mock_rules.py``.

Tests steer it with `gate` (a verb stops until the test lets it go on) and `fault` (a verb raises); both may pick calls
by what they are about. ``step_seconds`` makes `read` take time, by a ``sleep`` that can be replaced.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from engine.api import TOP_LOGPROBS, Row, SamplingParams, TokenResults
from engine.config import EngineConfig, ModelConfig
from engine.mock_rules import Rule, Script, Table, choose, digest, successor

__all__ = [
    "Call", "Gate", "Misuse", "MockEngine", "Rule", "Script", "Table", "digest", "mock_config", "mock_model",
    "successor",
]  # fmt: skip

UNLISTED = 1e-9  # probability of each token that a rule does not name, so that every log-prob is finite


class Misuse(AssertionError):
    """The caller broke the engine's contract; the message says how."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a verb, as gates, faults and ``MockEngine.calls`` see it. ``tokens`` are a prefill's or fetch's."""

    verb: str
    tokens: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    start: int = 0
    step: int = 0  # serial of the step: prefill and generate make it, read and read_prompt name it


class Gate:
    """Holds calls of a verb: a test waits until one has arrived, looks around, and opens."""

    def __init__(self, when: Callable[[Call], bool]):
        self._when = when
        self._arrived = threading.Event()
        self._opened = threading.Event()

    def arrived(self, timeout: float = 10.0) -> bool:
        """Waits until a call stands at the gate."""
        return self._arrived.wait(timeout)

    def open(self) -> None:
        """Lets everything through, from now on."""
        self._opened.set()

    def __call__(self, call: Call) -> None:
        if self._opened.is_set() or not self._when(call):
            return
        self._arrived.set()
        if not self._opened.wait(60.0):
            raise Misuse(f"a gate on {call.verb} was never opened")


@dataclasses.dataclass(frozen=True)
class Cell:
    """What one position leaves behind; ``chain`` sums up this token and all before it."""

    token: int
    position: int
    chain: int


def _append(cells: list[Cell], token: int) -> None:
    chain = cells[-1].chain if cells else 0
    cells.append(Cell(token, len(cells), hash((chain, token, len(cells)))))


@dataclasses.dataclass
class MockPrefix:
    """A prefix in flight: the cells of the prompt so far."""

    cells: list[Cell] = dataclasses.field(default_factory=list)
    out: bool = True  # acquired and not yet released


@dataclasses.dataclass(frozen=True)
class MockStep:
    """What `prefill` and `generate` return: results that exist already, but are only seen through `read`."""

    serial: int
    results: TokenResults
    prompt: TokenResults | None = None


@dataclasses.dataclass
class _Slot:
    pages: list[int]
    length: int  # cells stored; the position of the next input
    token: int  # the next input
    sampling: SamplingParams
    generated: collections.Counter[int]  # what penalties count
    count: int = 1  # tokens generated since the prefill, its own included: what min_tokens counts
    mask: np.ndarray | None = None


def mock_model(vocab_size: int = 320, eos_token_ids: tuple[int, ...] = (257,)) -> ModelConfig:
    """A description for `MockEngine`: the byte tokenizer's ids (0-258) and some that no tokenizer knows."""
    return ModelConfig(
        family="mock", vocab_size=vocab_size, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1,
        head_dim=8, max_position=4096, bos_token_id=256, eos_token_ids=eos_token_ids,
    )  # fmt: skip


def mock_config(
    *,
    slots: int = 4,
    max_len: int = 64,
    page_size: int = 4,
    kv_pages: int | None = None,
    prefill_chunk: int = 16,
    prefixes: int = 2,
    dp: int = 1,
) -> EngineConfig:
    """A small layout. ``kv_pages``, of each group, defaults to what all slots need at full length, and the scratch page."""
    return EngineConfig(
        slots=slots,
        max_len=max_len,
        kv_pages=slots * -(-max_len // page_size) + 1 if kv_pages is None else kv_pages,
        prefill_buckets=tuple(sorted({max(1, prefill_chunk // 4), max(1, prefill_chunk // 2), prefill_chunk})),
        batch_sizes=tuple(sorted({1, max(1, slots // 2), slots})),
        page_size=page_size,
        prefixes=prefixes,
        dp=dp,
    )


class MockEngine:
    """See the module's docstring. ``rule`` says what follows; the rest is layout and, for use by hand, pace."""

    def __init__(
        self,
        rule: Rule = successor,
        *,
        model: ModelConfig | None = None,
        config: EngineConfig | None = None,
        step_seconds: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.model = model or mock_model()
        self.config = config or mock_config()
        self.rule = rule
        self.step_seconds = step_seconds
        self.violations: list[str] = []
        self.calls: collections.deque[Call] = collections.deque(maxlen=20_000)
        self._sleep = sleep
        self._pools: list[list[list[Cell | None]]] = [
            [[None] * self.config.page_size for _ in range(self.config.kv_pages)] for _ in range(self.config.groups)
        ]
        self._slots: dict[int, _Slot] = {}
        self._prefixes_out = 0
        self._serial = 0
        self._owner: int | None = None
        self._lock = threading.Lock()  # of the two counters: the rest has owners
        self._hooks: dict[str, list[Callable[[Call], None]]] = collections.defaultdict(list)

    # Steering

    def gate(self, verb: str, when: Callable[[Call], bool] = lambda call: True) -> Gate:
        """Stops calls of ``verb`` before they do anything."""
        gate = Gate(when)
        self._hooks[verb].append(gate)
        return gate

    def open_gates(self) -> None:
        """Opens every gate there is, so that a test that failed leaves no thread behind."""
        for hook in [hook for hooks in list(self._hooks.values()) for hook in hooks]:
            if isinstance(hook, Gate):
                hook.open()

    def fault(
        self, verb: str, error: Exception, *, times: int = 1, when: Callable[[Call], bool] = lambda call: True
    ) -> None:
        """Makes the next ``times`` calls of ``verb`` raise ``error`` before they do anything."""
        remaining = [times]

        def strike(call: Call) -> None:
            if remaining[0] and when(call):
                remaining[0] -= 1
                raise error

        self._hooks[verb].append(strike)

    @property
    def prefixes_out(self) -> int:
        """Prefixes acquired and not released."""
        return self._prefixes_out

    # The verbs

    def acquire_prefix(self) -> MockPrefix:
        self._enter(Call("acquire_prefix"))
        with self._lock:
            if self._prefixes_out == self.config.prefixes:
                raise LookupError(f"all {self.config.prefixes} prefixes are out")
            self._prefixes_out += 1
        return MockPrefix()

    def release_prefix(self, prefix: MockPrefix) -> None:
        self._enter(Call("release_prefix"))
        with self._lock:
            self._check(prefix.out, "a prefix was released twice")
            prefix.out = False
            self._prefixes_out -= 1

    def prefill(
        self,
        prefix: MockPrefix,
        tokens: np.ndarray,
        start: int,
        sampling: SamplingParams,
        *,
        last: bool,
        next_token: int = -1,
        prompt_logprobs: bool = False,
        mask: np.ndarray | None = None,
        generated: np.ndarray | None = None,
        prompt_length: int | None = None,
    ) -> MockStep:
        ids = self._ids(tokens)
        serial = self._next_serial()
        self._enter(Call("prefill", tokens=ids, start=start, step=serial))
        self._check(prefix.out, "prefill into a released prefix")
        self._check(1 <= len(ids) <= self.config.prefill_chunk, f"a chunk of {len(ids)} tokens")
        self._check(start == len(prefix.cells), f"chunk starts at {start}, the prefix holds {len(prefix.cells)}")
        self._check(start + len(ids) <= self.config.max_len, f"a prompt over max_len {self.config.max_len}")
        for token in ids:
            _append(prefix.cells, token)
        context = [cell.token for cell in prefix.cells]
        first = [self._choose(context, sampling, self._counts(generated), 0, mask)] if last else []
        prompt = None
        if prompt_logprobs:
            following = [*context[start + 1 :], next_token]
            prompt = _results([
                self._report(context[: start + place + 1], token) if token >= 0 else self._nothing()
                for place, token in enumerate(following)
            ])  # fmt: skip
        return MockStep(serial, _results(first), prompt)

    def insert(
        self,
        prefix: MockPrefix,
        first: MockStep,
        slot: int,
        pages: np.ndarray,
        length: int,
        sampling: SamplingParams,
        *,
        shared_pages: int = 0,
        generated: np.ndarray | None = None,
    ) -> None:
        self._own("insert")
        self._enter(Call("insert", slots=(slot,)))
        table = [int(page) for page in pages]
        self._check(prefix.out, "insert of a released prefix")
        self._check(0 <= slot < self.config.slots, f"slot {slot} of {self.config.slots}")
        self._check(length == len(prefix.cells), f"length {length}, the prefix holds {len(prefix.cells)}")
        self._check(len(table) == -(-length // self.config.page_size), f"{len(table)} pages for {length} tokens")
        self._check(len(set(table)) == len(table), f"a page twice in {table}")
        pool = self._pool(slot)
        for index, page in enumerate(table):
            self._check(0 < page < self.config.kv_pages, f"page {page} is scratch or beyond the pool")
            for offset, cell in enumerate(self._page_of(prefix.cells, index)):
                if index < shared_pages:
                    self._check(pool[page][offset] == cell, f"shared page {page} has other content at {offset}")
                else:
                    pool[page][offset] = cell
        token = int(first.results.tokens[0])
        self._slots[slot] = _Slot(
            table, length, token, sampling, self._counts(generated) + collections.Counter([token])
        )

    def fetch(self, prefix: MockPrefix, pages: np.ndarray, tokens: np.ndarray, *, slot: int) -> None:
        self._own("fetch")
        ids = self._ids(tokens)
        self._enter(Call("fetch", tokens=ids))
        self._check(prefix.out and not prefix.cells, "fetch into a prefix that is released or not empty")
        self._check(len(ids) == len(pages) * self.config.page_size, f"{len(pages)} pages for {len(ids)} tokens")
        for token in ids:
            _append(prefix.cells, token)
        for index, page in enumerate(pages):
            self._check(
                self._pool(slot)[int(page)] == self._page_of(prefix.cells, index), f"fetched page {page} has other content"
            )

    def set_mask(self, slot: int, mask: np.ndarray | None) -> None:
        self._own("set_mask")
        self._enter(Call("set_mask", slots=(slot,)))
        if mask is not None:
            words = -(-self.model.vocab_size // 32)
            self._check(mask.dtype == np.uint32 and mask.shape == (words,), f"mask {mask.dtype} {mask.shape}")
        self._slots[slot].mask = mask

    def generate(self, rows: Sequence[Row]) -> MockStep:
        self._own("generate")
        serial = self._next_serial()
        slots = tuple(row.slot for row in rows)
        self._enter(Call("generate", slots=slots, step=serial))
        self._check(1 <= len(rows) <= self.config.slots, f"{len(rows)} rows")
        self._check(len(set(slots)) == len(slots), f"a slot twice in {slots}")
        return MockStep(serial, _results([self._advance(row) for row in rows]))

    def read(self, step: MockStep) -> TokenResults:
        self._enter(Call("read", step=step.serial))
        if self.step_seconds:
            self._sleep(self.step_seconds)
        return step.results

    def read_prompt(self, step: MockStep) -> TokenResults:
        self._enter(Call("read_prompt", step=step.serial))
        if step.prompt is None:
            raise self._misuse("read_prompt of a step without prompt log-probs")
        return step.prompt

    # Inside

    def _advance(self, row: Row) -> tuple[int, np.ndarray]:
        """Writes the row's input into its page, reads the sequence back, chooses what follows."""
        self._check(row.slot in self._slots, f"slot {row.slot} holds no sequence")
        slot = self._slots[row.slot]
        self._check(slot.length < self.config.max_len, f"slot {row.slot} is past max_len {self.config.max_len}")
        self._check(0 < row.page < self.config.kv_pages, f"page {row.page} is scratch or beyond the pool")
        index, offset = divmod(slot.length, self.config.page_size)
        if index == len(slot.pages):
            slot.pages.append(row.page)
        self._check(
            slot.pages[index] == row.page, f"position {slot.length} is in page {slot.pages[index]}, not {row.page}"
        )
        pool = self._pool(row.slot)
        stored = [pool[page][place] for page in slot.pages for place in range(self.config.page_size)][: slot.length]
        cells: list[Cell] = []
        for position, cell in enumerate(stored):
            if cell is not None:
                _append(cells, cell.token)
            self._check(
                cell is not None and cell == cells[-1],
                f"slot {row.slot}, position {position}: another sequence's content",
            )
        _append(cells, slot.token)
        pool[row.page][offset] = cells[-1]
        context = [cell.token for cell in cells]
        token, logprobs = self._choose(context, slot.sampling, slot.generated, slot.count, slot.mask)
        slot.length += 1
        slot.token = token
        slot.generated[token] += 1
        slot.count += 1
        return token, logprobs

    def _logprobs(self, context: Sequence[int]) -> np.ndarray:
        """float64 [vocab]: the rule's log-probabilities of what follows."""
        probabilities = np.full(self.model.vocab_size, UNLISTED)
        for token, probability in self.rule(context).items():
            probabilities[token] = max(probability, UNLISTED)
        logprobs: np.ndarray = np.log(probabilities / probabilities.sum())
        return logprobs

    def _choose(
        self,
        context: Sequence[int],
        sampling: SamplingParams,
        generated: collections.Counter[int],
        count: int,
        mask: np.ndarray | None,
    ) -> tuple[int, np.ndarray]:
        logprobs = self._logprobs(context)
        return choose(logprobs, context, sampling, generated, count, mask), logprobs

    def _report(self, context: Sequence[int], token: int) -> tuple[int, np.ndarray]:
        return token, self._logprobs(context)

    def _nothing(self) -> tuple[int, np.ndarray]:
        return -1, np.zeros(self.model.vocab_size)

    def _counts(self, generated: np.ndarray | None) -> collections.Counter[int]:
        return collections.Counter(() if generated is None else (int(token) for token in generated))

    def _pool(self, slot: int) -> list[list[Cell | None]]:
        """The pages of a slot's group."""
        return self._pools[slot % self.config.groups]

    def _page_of(self, cells: Sequence[Cell], index: int) -> list[Cell]:
        return list(cells[index * self.config.page_size : (index + 1) * self.config.page_size])

    def _ids(self, tokens: np.ndarray) -> tuple[int, ...]:
        ids = tuple(int(token) for token in tokens)
        self._check(
            all(0 <= token < self.model.vocab_size for token in ids), f"token ids beyond the vocabulary in {ids}"
        )
        return ids

    def _next_serial(self) -> int:
        with self._lock:
            self._serial += 1
            return self._serial

    def _enter(self, call: Call) -> None:
        self.calls.append(call)
        for hook in list(self._hooks[call.verb]):
            hook(call)

    def _own(self, verb: str) -> None:
        thread = threading.get_ident()
        if self._owner is None:
            self._owner = thread
        self._check(self._owner == thread, f"{verb} from a second thread: {threading.current_thread().name}")

    def _check(self, holds: bool, violation: str) -> None:
        if not holds:
            raise self._misuse(violation)

    def _misuse(self, violation: str) -> Misuse:
        self.violations.append(violation)
        return Misuse(violation)


def _results(rows: Sequence[tuple[int, np.ndarray]]) -> TokenResults:
    """Rows of (token, log-probs of the whole vocabulary) as `TokenResults`."""
    count = len(rows)
    results = TokenResults(
        tokens=np.array([token for token, _ in rows], np.int32),
        logprobs=np.zeros(count, np.float32),
        top_tokens=np.zeros((count, TOP_LOGPROBS), np.int32),
        top_logprobs=np.zeros((count, TOP_LOGPROBS), np.float32),
    )
    for row, (token, logprobs) in enumerate(rows):
        best = np.argsort(-logprobs, kind="stable")[:TOP_LOGPROBS]
        results.logprobs[row] = logprobs[token] if token >= 0 else 0
        results.top_tokens[row] = best
        results.top_logprobs[row] = logprobs[best]
    return results
