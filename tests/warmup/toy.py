"""An engine of a few small donating programs over a fake state, whose tokens can be computed by hand.

``step(state) -> state + 1`` adds one to every cell of its row count; the "token" it returns is the sum of those cells.
Usable by hand:
``python -m tests.warmup.toy MODE ROOT`` warms it up and prints a line of JSON.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from engine.config import EngineConfig, ModelConfig
from engine.programs import Program

HIDDEN = 8
HANGING = "hanging"  # printed where the program named in TOY_HANG is traced, for ever


@struct.dataclass
class State:
    pages: jax.Array  # float32 [kv_pages, HIDDEN]
    count: jax.Array  # int32 []


def model_config(**changes) -> ModelConfig:
    fields = dict(
        family="toy",
        vocab_size=32,
        hidden_size=HIDDEN,
        intermediate_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        max_position=4096,
    )
    return ModelConfig(**{**fields, **changes})


def engine_config(**changes) -> EngineConfig:
    fields = dict(slots=2, max_len=64, kv_pages=5, prefill_buckets=(16, 32), batch_sizes=(1, 2), page_size=32)
    return EngineConfig(**{**fields, **changes})


class ToyEngine:
    """Has what warmup needs of an engine."""

    def __init__(
        self,
        model: ModelConfig | None = None,
        config: EngineConfig | None = None,
        devices=None,
        *,
        lose_donation: str = "",
        break_program: str = "",
        break_touch: str = "",
        break_once: str = "",
        step: int = 1,
        meanwhile: Callable[[], None] | None = None,
    ):
        self.model = model or model_config()
        self.config = config or engine_config()
        self.devices = tuple(devices or jax.devices()[:1])
        self.mesh = Mesh(np.array(self.devices), ("tp",))
        self._sharding = NamedSharding(self.mesh, PartitionSpec())
        self._lose, self._break, self._break_touch = lose_donation, break_program, break_touch
        self._break_once = break_once  # a program, or "allocate"
        self._step = step  # that generate adds
        self._meanwhile = meanwhile  # what happens between opening the store and reading it
        self.abstract_weights = {"w": self._abstract(HIDDEN, HIDDEN)}
        self.abstract_state = State(self._abstract(self.config.kv_pages, HIDDEN), self._abstract(dtype=jnp.int32))
        self.abstract_prefix = self._abstract(self.config.prefix_capacity, HIDDEN)
        self._executables: Mapping[str, Callable] = {}
        self.weights = self.state = None
        self.prefixes: list = []

    def _abstract(self, *shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding)

    def programs(self) -> tuple[Program, ...]:
        state, prefix, weights = self.abstract_state, self.abstract_prefix, self.abstract_weights
        if self._meanwhile is not None:
            self._meanwhile, meanwhile = None, self._meanwhile
            meanwhile()

        def init_state():
            return State(jnp.zeros(state.pages.shape), jnp.int32(0))

        def init_prefix():
            return jnp.zeros(prefix.shape)

        def insert(state, prefix):
            return state.replace(pages=state.pages + prefix[:1])

        def prefill(bucket):
            def prefill(prefix, weights, tokens):
                rows = jnp.outer(tokens.astype(jnp.float32), weights["w"][0])
                return prefix.at[:bucket].add(rows), rows.sum()

            return prefill

        def generate(rows):
            def generate(state, weights, shift):
                pages = state.pages.at[:rows].add(self._step * shift[0].astype(jnp.float32))
                return State(pages, state.count + 1), (pages[:rows] @ weights["w"]).sum()

            return generate

        table = [self._program("init_state", init_state, ()), self._program("init_prefix", init_prefix, ())]
        for bucket in self.config.prefill_buckets:
            tokens = self._abstract(bucket, dtype=jnp.int32)
            table.append(self._program(f"prefill/{bucket}", prefill(bucket), (prefix, weights, tokens), 0))
        table.append(self._program("insert", insert, (state, prefix), 0, True))
        for size in self.config.batch_sizes:
            arguments = (state, weights, self._abstract(size, dtype=jnp.int32))
            table.append(self._program(f"generate/{size}", generate(size), arguments, 0, True))
        return tuple(table)

    def _program(
        self, name: str, function: Callable, arguments: tuple, donates: int | None = None, takes_state: bool = False
    ) -> Program:
        if name == self._break:

            def function(*_):
                raise RuntimeError("broken on purpose")

        if name == os.environ.get("TOY_HANG"):

            def function(*_):
                print(HANGING, flush=True)
                threading.Event().wait()

        donate = () if donates is None else (donates,)
        jitted = jax.jit(function, donate_argnums=donate, out_shardings=self._sharding)
        if name == self._lose:
            inner = jitted
            jitted = jax.jit(lambda *arguments: inner(*arguments))  # history's fault: the outer jit donates nothing
        return Program(name, jitted, arguments, donates, takes_state)

    def install(self, executables: Mapping[str, Callable]) -> None:
        self._executables = dict(executables)

    def set_weights(self) -> None:
        self.weights = {"w": self.put(np.eye(HIDDEN, dtype=np.float32))}

    def put(self, value: np.ndarray) -> jax.Array:
        return jax.device_put(value, self._sharding)

    def _broken_once(self, what: str) -> None:
        """Fails the first time, as XLA may: with the donated state gone."""
        if what == self._break_once:
            self._break_once = ""
            jax.tree.map(lambda array: array.delete(), self.state)
            raise RuntimeError("broken once")

    def allocate(self) -> None:
        self._broken_once("allocate")
        self.state = self.call("init_state")
        self.prefixes = [self.call("init_prefix") for _ in range(2)]

    def call(self, name: str, *arguments):
        return self._executables[name](*arguments)

    def touch(self, name: str) -> None:
        if name == self._break_touch:
            raise RuntimeError("broken touch")
        self._broken_once(name)
        kind, _, size = name.partition("/")
        prefix = self.prefixes.pop()  # one for each lane: running out is an error
        match kind:
            case "init_state" | "init_prefix":
                pass
            case "insert":
                self.state = self.call(name, self.state, prefix)
            case "prefill":
                prefix, _ = self.call(name, prefix, self.weights, self.put(np.zeros(int(size), np.int32)))
            case "generate":
                self.state, _ = self.call(name, self.state, self.weights, self.put(np.zeros(int(size), np.int32)))
        jax.block_until_ready(prefix if kind == "prefill" else self.state)
        self.prefixes.append(prefix)

    def tokens(self) -> list[float]:
        """Three steps of each batch size from an empty state: 8, 16, 24 and then, two rows, 24 + 32 = 56..."""
        self.allocate()
        result = []
        for size in self.config.batch_sizes:
            for _ in range(3):
                shift = self.put(np.ones(size, np.int32))
                self.state, token = self.call(f"generate/{size}", self.state, self.weights, shift)
                result.append(float(token))
        return result


# Row 0 holds 1, 2, 3 after the steps of batch 1; then rows 0 and 1 hold (4, 1), (5, 2), (6, 3); times 8 columns.
TOKENS = [8.0, 16.0, 24.0, 40.0, 56.0, 72.0]


def warm(mode: str, root: Path | None, **engine_options) -> dict:
    """A whole start of the toy. Returns what happened."""
    from warmup.guard import Guard
    from warmup.prepare import open_store, prepare
    from warmup.report import WarmupReport

    with Guard() as guard:
        report = WarmupReport(mode, guard=guard)
        engine = ToyEngine(**engine_options)
        store = open_store(root, engine.model, engine.config, engine.devices)
        proven = store.proven
        prepared = prepare(engine, mode, store, report=report, guard=guard)
        engine.install(prepared.executables)
        engine.set_weights()
        prepared.allocate(engine)
        prepared.touch_all(engine)
        startup = dataclasses.asdict(guard.counts("startup"))
        guard.ready()
        tokens = engine.tokens()
        if mode == "aot":
            prepared.record_proof(0.5, 3)
        report.ready()
        serving = dataclasses.asdict(guard.counts("serving"))
        return {
            "startup": startup,
            "serving": serving,
            "tokens": tokens,
            "proven": proven,
            "unchanged": prepared.unchanged,
            "sources": {row.name: row.source for row in report.programs},
            "report": report.snapshot(),
            "stored": sorted(store.names),
            "folder": str(store.folder),
        }


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    # Under its own name, not as __main__: the classes of the trees are stored by module and name.
    from tests.warmup import toy

    print(json.dumps(toy.warm(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else None)))
