"""The engine without a server: random weights, a layout, and loops over its verbs as the orchestrator calls them."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from engine.agreement import read_model
from engine.api import Row, SamplingParams
from engine.checkpoints import open_checkpoint
from engine.config import EngineConfig, ModelConfig, RopeConfig
from engine.jax_engine import JaxEngine
from engine.loader import load_weights
from engine.programs import Program
from engine.state import PrefixBuffer, Step
from engine.weights import Weights
from server.config.commands import ServeConfig
from server.start.model_files import resolve_model
from server.start.warm_engine import engine_config
from warmup.compiling import Compilation, compile_programs
from warmup.guard import Guard

GREEDY = SamplingParams()


def llama(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int, *, tied: bool) -> ModelConfig:
    """A Llama of a given shape."""
    return ModelConfig(
        family="llama", vocab_size=vocab, hidden_size=hidden, intermediate_size=ffn, num_layers=layers, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=hidden // heads, max_position=16384, rope=RopeConfig(theta=500_000.0),
        tie_embeddings=tied, bos_token_id=1, eos_token_ids=(2,),
    )  # fmt: skip


SHAPES = {
    "llama-tiny": llama(2, 64, 96, 4, 2, 320, tied=True),
    # 123.7 million parameters: 12 layers, hidden 768, 12 heads, feed-forward 2560, vocabulary 32000, tied head
    "llama-125m": llama(12, 768, 2560, 12, 12, 32_000, tied=True),
    "llama-1b": llama(16, 2048, 8192, 32, 8, 128_256, tied=True),  # Llama 3.2 1B
    "llama-8b": llama(32, 4096, 14336, 32, 8, 128_256, tied=False),  # Llama 3.1 8B
}


def model_config(name: str) -> ModelConfig:
    """One of `SHAPES`, or a checkpoint's."""
    return SHAPES[name] if name in SHAPES else read_model(open_checkpoint(Path(resolve_model(name))))


def parameters(model: ModelConfig) -> int:
    """How many weights a model without experts has."""
    projections = model.head_dim * model.hidden_size * (2 * model.num_heads + 2 * model.num_kv_heads)
    layer = projections + 3 * model.hidden_size * model.intermediate_size + 2 * model.hidden_size
    tables = model.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    return model.num_layers * layer + tables + model.hidden_size


def layout(model: ModelConfig, *, platform: str | None = None, **options: Any) -> EngineConfig:
    """What ``preheat serve`` would use with these options, on this machine or another platform."""
    return engine_config(ServeConfig(**options), model, platform or jax.devices()[0].platform)


def random_weights(abstract: Weights) -> Weights:
    """Weights of the right size that depend on nothing: norms are 1, the rest spreads like a trained model's.

    Made on the device by a hash of each weight's place, so that no second copy is ever needed.
    """

    def make(path: tuple[object, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        is_norm = jax.tree_util.keystr(path).endswith("norm")
        program = jax.jit(_ones if is_norm else _noise, static_argnums=(0, 1), out_shardings=leaf.sharding)
        made: jax.Array = program(leaf.shape, leaf.dtype)
        return made

    weights: Weights = jax.tree_util.tree_map_with_path(make, abstract)
    jax.block_until_ready(weights)
    return weights


def _ones(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return jnp.ones(shape, dtype)


def _noise(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    place = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        place = place * jnp.uint32(0x9E3779B1) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    place = (place ^ (place >> 15)) * jnp.uint32(0x85EBCA77)
    place = (place ^ (place >> 13)) * jnp.uint32(0xC2B2AE3D)
    uniform = (place >> 8).astype(jnp.float32) * jnp.float32(2**-24) - jnp.float32(0.5)
    spread: jax.Array = uniform * jnp.float32(0.07)
    return spread.astype(dtype)  # standard deviation 0.02


def make_engine(
    model: ModelConfig,
    config: EngineConfig,
    *,
    checkpoint: str | None = None,
    weights: Weights | None = None,
    aot: bool = True,
) -> BareEngine:
    """An engine whose programs have all run once.

    Args:
        checkpoint: where the weights are; `None`: random ones.
        weights: of another engine of the same model, instead of loading any.
        aot: call compiled executables; else the jitted functions, as manual warmup does.
    """
    engine = JaxEngine(model, config, jax.devices()[: config.tp])
    compiled = {done.program.name: done.compiled for done in compile_table(engine.programs())}
    jitted = {program.name: program.function for program in engine.programs()}
    engine.install(compiled if aot else jitted)
    if weights is None and checkpoint is not None:
        weights = load_weights(open_checkpoint(Path(resolve_model(checkpoint))), model, engine.abstract_weights)
    engine.set_weights(random_weights(engine.abstract_weights) if weights is None else weights)
    engine.allocate()
    for program in engine.programs():
        engine.touch(program.name)
    return BareEngine(engine)


def compile_table(programs: Sequence[Program], *, workers: int | None = None) -> list[Compilation]:
    """Compiles programs as a start does; the times are in what comes back."""
    with Guard() as guard:
        return compile_programs(programs, guard, lambda done: done, workers=workers)


@dataclasses.dataclass
class _Sequence:
    pages: list[int]
    length: int  # tokens whose keys and values are stored


class BareEngine:
    """Prefills and steps sequences in slots, one step ahead of what is read, as the generate thread does."""

    def __init__(self, engine: JaxEngine):
        self.engine = engine
        self._sequences: dict[int, _Sequence] = {}

    def prompt(self, length: int, seed: int = 0) -> np.ndarray:
        draw = random.Random(seed)
        return np.array([draw.randrange(3, self.engine.model.vocab_size) for _ in range(length)], np.int32)

    def prefill(self, tokens: np.ndarray) -> float:
        """Seconds from a prompt to its first token; nothing is kept."""
        began = time.perf_counter()
        prefix, step = self._prefill(tokens)
        self.engine.read(step)
        seconds = time.perf_counter() - began
        self.engine.release_prefix(prefix)
        return seconds

    def start(self, tokens: np.ndarray, slot: int) -> int:
        """Puts a prompt into a slot; returns its first token."""
        config = self.engine.config
        per_slot = (config.kv_pages - 1) // config.slots  # each slot has pages of its own
        pages = list(range(1 + slot * per_slot, 1 + (slot + 1) * per_slot))
        prefix, step = self._prefill(tokens)
        used = np.array(pages[: -(-len(tokens) // config.page_size)], np.int32)
        self.engine.insert(prefix, step, slot, used, len(tokens), GREEDY)
        self.engine.release_prefix(prefix)
        self._sequences[slot] = _Sequence(pages, len(tokens))
        return int(self.engine.read(step).tokens[0])

    def _prefill(self, tokens: np.ndarray) -> tuple[PrefixBuffer, Step]:
        config = self.engine.config
        prefix = self.engine.acquire_prefix()
        for start in range(0, len(tokens), config.prefill_chunk):
            chunk = tokens[start : start + config.prefill_chunk]
            last = start + len(chunk) == len(tokens)
            step = self.engine.prefill(prefix, chunk, start, GREEDY, last=last, prompt_length=len(tokens))
        return prefix, step

    def decode(self, slots: int, steps: int) -> tuple[float, list[list[int]]]:
        """Seconds of so many steps of the first slots, and the tokens of each slot."""
        tokens: list[list[int]] = [[] for _ in range(slots)]
        pending: Step | None = None
        began = time.perf_counter()
        for _ in range(steps):
            dispatched = self.engine.generate([self._row(slot) for slot in range(slots)])
            if pending is not None:
                self._take(pending, tokens)
            pending = dispatched
        if pending is not None:
            self._take(pending, tokens)
        return time.perf_counter() - began, tokens

    def _take(self, step: Step, tokens: list[list[int]]) -> None:
        for row, token in zip(tokens, self.engine.read(step).tokens.tolist(), strict=True):
            row.append(token)

    def _row(self, slot: int) -> Row:
        sequence = self._sequences[slot]
        page = sequence.pages[sequence.length // self.engine.config.page_size]
        sequence.length += 1
        return Row(slot, page)

    def live(self, slots: int) -> int:
        """Tokens in the first slots together."""
        return sum(self._sequences[slot].length for slot in range(slots))


def interleaved(rounds: int, runs: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Runs all in turn, round after round; what each returned."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(run())
    return found
