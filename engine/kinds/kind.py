"""What a kind of program is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import numpy as np

from engine.api import Engine, Row, SamplingParams
from engine.kinds.builder import Builder
from engine.programs import Program
from engine.state import PrefixBuffer, Step


class Running(Engine, Protocol):
    """`engine.jax_engine.JaxEngine`, as far as it takes to run each program once."""

    @property
    def state(self) -> object:
        """The decode state."""

    def call(self, name: str, *arguments: object) -> Any:
        """Calls a program by its name in the table."""

    def put(self, array: np.ndarray) -> jax.Array:
        """The array on every device."""

    def prefill_request(self, tokens: np.ndarray, start: int, sampling: SamplingParams, last: bool) -> jax.Array:
        """The packed request of a chunk."""

    def first_token(self, prefix: PrefixBuffer, head: jax.Array, row: jax.Array) -> jax.Array:
        """The packed first token, from what the last program of a chunk returned."""

    def generate_request(self, rows: list[Row], batch: int) -> tuple[jax.Array, np.ndarray]:
        """The packed request of a step, and where in the batch each row is."""

    def generate_batch(self, rows: list[Row], batch: int) -> Step:
        """A step of a batch size of the table."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of program: "generate" of "generate/8" and "generate/8/layers".

    ``programs`` tells the table's rows, nothing of which is traced or allocated. ``touch`` runs one of them with dummy inputs
    on scratch rows and pages, given its size ("8"; empty where the kind has none) and a prefix it may write, and returns
    arrays to wait for; it calls what serving calls. Where the kind runs in segments (`Builder.chain`), ``request`` makes
    the dummy request of a size, and the engine touches the segments' programs by it.
    """

    name: str
    order: int  # of kinds in the table: the life of a request, from what there is before the first
    programs: Callable[[Builder], Iterator[Program]]
    touch: Callable[[Running, str, PrefixBuffer], object]
    request: Callable[[Running, str], jax.Array] | None = None
    carries_prefix: bool = False  # segments change the prefix; else the decode state
