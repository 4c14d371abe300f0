"""``fetch``: pages of the pool into a prefix, on a hit of the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine import functions
from engine.kinds.builder import Builder, named
from engine.kinds.kind import Kind, Running
from engine.programs import Program
from engine.state import PrefixBuffer


def programs(build: Builder) -> Iterator[Program]:
    width = build.state.page_table.shape[1]
    request = build.host(functions.FETCH_HEADER + width + width * build.config.page_size)
    function = named("fetch", functions.fetch, build.ways, build.config)
    yield build.program("fetch", function, (build.prefix, build.state, request), build.prefix, donates=0)


def touch(engine: Running, size: str, prefix: PrefixBuffer) -> object:
    engine.fetch(prefix, np.zeros(0, np.int32), np.zeros(0, np.int32), slot=0)
    return prefix.arrays


FETCH = Kind("fetch", 40, programs, touch)
