"""Where the layers of a model run in several program calls instead of one.

A program of many unrolled layers costs compiling, loading and a first run for each of them. Where layers are unrolled (on
CPU), a model may instead run as a chain of calls by the host::

    generate/8/begin     embeds the tokens, finds what layers need to know of the rows
    generate/8/layers    some consecutive layers; called for one segment of the model after another
    generate/8/end       logits, sampling, and the new state

Segments with the same kinds of layers share a program, so start-up no longer grows with the number of layers. A call costs
about 0.1 ms, so a segment must read enough weights to hide it: `EngineConfig.call_bytes`.
"""

from __future__ import annotations

import dataclasses

from engine.config import EngineConfig, ModelConfig
from engine.state import Pools

ROWS = 16  # so many rows take about as long as reading the weights does; more rows take longer in proportion


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive layers that one call runs."""

    part: str  # the last part of the program's name
    pattern: tuple[int, ...]  # the kind of each layer
    layers: slice  # of the whole model

    def of_pools(self, pools: Pools) -> Pools:
        """Its layers' keys and values."""
        keys, values = pools
        return keys[self.layers], values[self.layers]

    def into_pools(self, pools: Pools, new: Pools) -> Pools:
        """The pools with its layers' replaced."""
        first, last = self.layers.start, self.layers.stop
        keys, values = ((*old[:first], *of_segment, *old[last:]) for old, of_segment in zip(pools, new, strict=True))
        return keys, values


def segments(model: ModelConfig, config: EngineConfig, rows: int, layer_bytes: int) -> tuple[Segment, ...]:
    """The segments for a program of ``rows`` rows; none where the model runs in one program.

    ``layer_bytes`` are the weights of one layer on one device. Segments are as long as ``config.call_bytes`` asks, and up
    to twice that where it takes fewer different programs.
    """
    if config.layers == "scanned" or not config.call_bytes:
        return ()
    pattern, count = model.pattern, model.num_layers
    least = -(-config.call_bytes * ROWS // (layer_bytes * max(rows, ROWS)))
    if 2 * least > count:
        return ()

    def cut(length: int) -> list[tuple[int, ...]]:
        return [pattern[first : first + length] for first in range(0, count, length)]

    length = min(range(least, min(2 * least, count // 2) + 1), key=lambda length: (len(set(cut(length))), length))
    kinds = list(dict.fromkeys(cut(length)))
    names = {kind: "layers" if number == 0 else f"layers-{number + 1}" for number, kind in enumerate(kinds)}
    return tuple(
        Segment(names[kind], kind, slice(number * length, number * length + len(kind)))
        for number, kind in enumerate(cut(length))
    )
