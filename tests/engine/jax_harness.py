"""A `JaxEngine` on a checkpoint, and the plainest way to run a sequence on it."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

import jax
import numpy as np

from engine.agreement import read_model
from engine.api import Row, SamplingParams
from engine.checkpoints import open_checkpoint
from engine.config import EngineConfig
from engine.jax_engine import JaxEngine
from engine.loader import load_weights
from engine.peft import adapter_layout, open_adapter
from engine.programs import Program
from tests import xla

LAYOUT = EngineConfig(
    slots=4, max_len=256, kv_pages=1 + 4 * 16, prefill_buckets=(16, 32, 64), batch_sizes=(1, 2, 4), page_size=16
)


def make_engine(
    path: pathlib.Path, *, optimized: bool = False, adapters: Sequence[pathlib.Path] = (), **layout
) -> JaxEngine:
    """An engine that compiles on first use, as `tests.xla` says; with ``optimized`` as a server does."""
    engine = describe_engine(path, optimized=optimized, adapters=adapters, **layout)
    opened = [open_adapter(folder.name, folder, engine.model) for folder in adapters]
    engine.set_weights(load_weights(open_checkpoint(path), engine.model, engine.abstract_weights, opened))
    engine.allocate()
    return engine


def describe_engine(
    path: pathlib.Path, *, optimized: bool = False, adapters: Sequence[pathlib.Path] = (), **layout
) -> JaxEngine:
    """The same without weights and buffers."""
    model = read_model(open_checkpoint(path))
    opened = [open_adapter(folder.name, folder, model) for folder in adapters]
    config = dataclasses.replace(LAYOUT, adapters=adapter_layout(opened), **layout)
    engine = JaxEngine(model, config, jax.devices()[: config.devices])
    engine.install({program.name: (_Optimized(program) if optimized else program.function) for program in engine.programs()})
    return engine


class _Optimized:
    def __init__(self, program: Program):
        self._program, self._compiled = program, None

    def __call__(self, *arguments):
        if self._compiled is None:
            self._compiled = self._program.trace().lower().compile(compiler_options=xla.PRODUCTION)
        return self._compiled(*arguments)


@dataclasses.dataclass
class RunSequence:
    """One sequence: where it lives, and what came out."""

    slot: int
    pages: list[int]
    length: int  # tokens whose keys and values are stored
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top: list[dict[int, float]] = dataclasses.field(default_factory=list)

    def take(self, results, row: int) -> None:
        self.tokens.append(int(results.tokens[row]))
        self.logprobs.append(float(results.logprobs[row]))
        pairs = zip(results.top_tokens[row].tolist(), results.top_logprobs[row].tolist(), strict=True)
        self.top.append(dict(pairs))


class Runner:
    """Prefills in chunks of a given size, inserts, and steps any set of sequences together."""

    def __init__(self, engine: JaxEngine):
        self.engine = engine
        self.free_pages = list(range(engine.config.kv_pages - 1, 0, -1))

    def start(self, prompt: Sequence[int], slot: int, *, chunk: int | None = None, sampling=SamplingParams(logprobs=True),
              prompt_logprobs: bool = False) -> tuple[RunSequence, list]:
        engine, page_size = self.engine, self.engine.config.page_size
        chunk = chunk or engine.config.prefill_chunk
        prefix = engine.acquire_prefix()
        prompt_results = []
        for start in range(0, len(prompt), chunk):
            piece = np.array(prompt[start : start + chunk], np.int32)
            end = start + len(piece)
            step = engine.prefill(
                prefix, piece, start, sampling, last=end == len(prompt),
                next_token=prompt[end] if end < len(prompt) else -1, prompt_logprobs=prompt_logprobs,
                prompt_length=len(prompt),
            )  # fmt: skip
            if prompt_logprobs:
                prompt_results.append(engine.read_prompt(step))
        pages = [self.free_pages.pop() for _ in range(-(-len(prompt) // page_size))]
        engine.insert(prefix, step, slot, np.array(pages, np.int32), len(prompt), sampling)
        engine.release_prefix(prefix)
        sequence = RunSequence(slot, pages, len(prompt))
        sequence.take(engine.read(step), 0)
        return sequence, prompt_results

    def step(self, sequences: Sequence[RunSequence]) -> None:
        rows = []
        for sequence in sequences:
            index = sequence.length // self.engine.config.page_size
            if index == len(sequence.pages):
                sequence.pages.append(self.free_pages.pop())
            rows.append(Row(sequence.slot, sequence.pages[index]))
        results = self.engine.read(self.engine.generate(rows))
        for row, sequence in enumerate(sequences):
            sequence.length += 1
            sequence.take(results, row)

    def finish(self, sequence: RunSequence) -> None:
        self.free_pages += sequence.pages
