"""``generate/BATCH``: every row advances by one token."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax

from engine import functions
from engine.kinds.builder import Builder
from engine.kinds.kind import Kind, Running
from engine.programs import Executable, Program
from engine.sampling import result_width
from engine.state import PrefixBuffer


def programs(build: Builder) -> Iterator[Program]:
    bound = (build.model, build.ways, build.config)
    parts: dict[str, Executable] = {"begin_": functions.begin_generate, "end_": functions.end_generate}

    def functions_of(part: str) -> Executable:
        if part:
            return functools.partial(parts[part], *bound)
        return functools.partial(functions.generate, *bound, build.attention)

    for batch in build.batch_sizes:
        one, table = build.per_row(batch), build.per_row(batch, build.state.page_table.shape[1])
        yield from build.chain(
            f"generate/{batch}",
            functions_of,
            rows=batch,
            cache=functions.PagedCache(page_table=table, pages=one, offsets=one, lengths=one),
            adapters=None if build.config.adapters is None else one,
            carried=build.state,
            request=build.per_row(batch, 2),
            outputs=(build.per_row(batch, result_width()),),
            takes_state=True,
            decodes=True,
        )


def request(engine: Running, size: str) -> jax.Array:
    packed, _ = engine.generate_request([], int(size))
    return packed


def touch(engine: Running, size: str, prefix: PrefixBuffer) -> object:
    return engine.generate_batch([], int(size)).results


GENERATE = Kind("generate", 60, programs, touch, request)
