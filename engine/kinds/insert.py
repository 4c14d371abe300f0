"""``insert``: a prefix into its pages, and a slot ready to generate."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine import functions
from engine.api import SamplingParams
from engine.kinds.builder import Builder, named
from engine.kinds.kind import Kind, Running
from engine.programs import Program
from engine.sampling import result_width, sampling_width
from engine.state import PrefixBuffer, Step


def programs(build: Builder) -> Iterator[Program]:
    state, first = build.state, build.host(1, result_width())
    request = build.host(functions.INSERT_HEADER + sampling_width() + build.config.max_len + state.page_table.shape[1])
    function = named("insert", functions.insert, build.model, build.ways, build.config)
    yield build.program("insert", function, (state, build.prefix, first, request), state, donates=0, takes_state=True)


def touch(engine: Running, size: str, prefix: PrefixBuffer) -> object:
    first = Step(engine.put(np.zeros((1, result_width()), np.int32)), np.arange(1))
    engine.insert(prefix, first, engine.config.slots, np.zeros(0, np.int32), 0, SamplingParams())
    return engine.state


INSERT = Kind("insert", 30, programs, touch)
