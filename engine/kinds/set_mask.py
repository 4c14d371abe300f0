"""``set_mask``: which tokens a slot may choose next (structured output)."""

from __future__ import annotations

from collections.abc import Iterator

from engine import functions
from engine.kinds.builder import Builder, named
from engine.kinds.kind import Kind, Running
from engine.programs import Program
from engine.state import PrefixBuffer, mask_words


def programs(build: Builder) -> Iterator[Program]:
    request = build.host(functions.MASK_HEADER + mask_words(build.model.vocab_size))
    function = named("set_mask", functions.set_mask, build.model, build.ways)
    yield build.program("set_mask", function, (build.state, request), build.state, donates=0, takes_state=True)


def touch(engine: Running, size: str, prefix: PrefixBuffer) -> object:
    engine.set_mask(engine.config.slots, None)
    return engine.state


SET_MASK = Kind("set_mask", 50, programs, touch)
