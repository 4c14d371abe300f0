"""``load`` and ``load/FIELD``: large weights of scanned layers are put together on the devices, layer by layer
(`engine.loader.Stacker`).
"""

from __future__ import annotations

from collections.abc import Iterator

from engine import functions
from engine.kinds.builder import Builder, named, zeros
from engine.kinds.kind import Kind, Running
from engine.programs import Program
from engine.state import PrefixBuffer
from engine.weights import one_layer, stacked_fields


def programs(build: Builder) -> Iterator[Program]:
    if stacked := stacked_fields(build.weights):
        yield build.program("load", zeros("load", stacked), (), stacked, loads=True)
    for field, node in stacked.items():
        function = named(f"load_{field}", functions.place_layer)
        yield build.program(f"load/{field}", function, (node, one_layer(node), build.host()), node, donates=0, loads=True)


def touch(engine: Running, size: str, prefix: PrefixBuffer) -> object:
    return ()  # who loaded the weights ran them: a second stack would not fit beside the first


LOAD = Kind("load", 0, programs, touch)
