"""Fills the abstract weights (``engine/weights.py``) from a checkpoint.

The abstract tree says which arrays there are, in which shape, dtype and sharding; the family says which tensors of the
checkpoint make each of them. Every array is put together on the host in its final dtype and handed to the device at
once, so beside the weights themselves only the arrays in flight (one per thread) are held. Nothing here compiles: numpy
and ``jax.device_put`` only.
"""

from __future__ import annotations

import concurrent.futures
import math
import os
from collections.abc import Callable

import jax
import numpy as np

from engine.checkpoints import Checkpoint, CheckpointError
from engine.config import ModelConfig
from engine.families import Family, get_family
from engine.weights import LayerWeights, Weights

Fill = Callable[[np.ndarray], None]  # writes one array of the tree, in place
THREADS = 4  # at most; each holds one array on the host
ALIGNMENT = 64  # bytes; so aligned, the CPU backend takes a host array over without copying it


def load_weights(checkpoint: Checkpoint, model: ModelConfig, abstract_weights: Weights) -> Weights:
    """The weights on their devices.

    Raises `CheckpointError`, naming file and tensor, when a tensor is missing, has another shape than the config says,
    or is one that the model does not use.
    """
    family = get_family(model.family)
    reader = Reader(checkpoint)
    fills = _fills(reader, family, model, abstract_weights)
    reader.check(family, model)
    leaves, structure = jax.tree.flatten(abstract_weights)

    def load(leaf: jax.ShapeDtypeStruct, fill: Fill) -> jax.Array:
        array = _aligned(leaf.shape, leaf.dtype)
        fill(array)
        return jax.device_put(array, leaf.sharding)

    with concurrent.futures.ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "load-weights") as threads:
        futures = [
            threads.submit(load, leaf, fill) for leaf, fill in zip(leaves, structure.flatten_up_to(fills), strict=True)
        ]
        concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
        for future in futures:
            future.cancel()  # after a failure, those that have not begun; the failed one comes before them
        return structure.unflatten([future.result() for future in futures])


class Reader:
    """Reads tensors by name, checks their shapes first, and remembers which are used."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self.available = set(checkpoint.names())
        self.expected: dict[str, tuple[int, ...]] = {}

    def tensor(self, name: str, *shape: int) -> Callable[[], np.ndarray]:
        """A function that reads the tensor; the shape is what the config promises."""
        self.expected[name] = shape
        return lambda: self.checkpoint.read(name)

    def check(self, family: Family, model: ModelConfig) -> None:
        """Raises for tensors that are missing, of another shape, or not used."""
        where = self.checkpoint.path
        missing = sorted(self.expected.keys() - self.available)
        if missing:
            raise CheckpointError(
                f"{where} has no tensor {_some(missing)}, which the {family.architecture} of its config needs; "
                "the checkpoint is incomplete or of another model: download it again"
            )
        for name, shape in self.expected.items():
            found = tuple(self.checkpoint.shape(name))
            if found != shape:
                raise CheckpointError(
                    f"{self.checkpoint.file(name)}: tensor {name} has shape {list(found)}, "
                    f"its config says {list(shape)}; "
                    "config and weights are of different models: download both again"
                )
        tied = {family.tensors.head} if model.tie_embeddings else set()  # a copy of the embedding, in some checkpoints
        extra = sorted(name for name in self.available - self.expected.keys() - tied if not family.ignores(name))
        if extra:
            raise CheckpointError(
                f"{self.checkpoint.file(extra[0])} has tensor {_some(extra)}, "
                f"which no field of {family.architecture} uses; "
                "the model has parts that its config does not tell of, or files of two models are mixed"
            )


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + size].view(dtype).reshape(shape)


def _copy(read: Callable[[], np.ndarray]) -> Fill:
    """Fills a whole array with one tensor."""

    def fill(out: np.ndarray) -> None:
        np.copyto(out, read().reshape(out.shape), casting="unsafe")

    return fill


def _stack(fills: list[Fill]) -> Fill:
    """Fills the leading dimension, one entry per layer."""

    def fill(out: np.ndarray) -> None:
        for index, one in enumerate(fills):
            one(out[index])

    return fill


def _fuse_gate_up(gate: Callable[[], np.ndarray], up: Callable[[], np.ndarray]) -> Fill:
    """Fills [2, ffn, ...]."""

    def fill(out: np.ndarray) -> None:
        np.copyto(out[0], gate(), casting="unsafe")
        np.copyto(out[1], up(), casting="unsafe")

    return fill


def _fuse_qkv(q: Callable[[], np.ndarray], k: Callable[[], np.ndarray], v: Callable[[], np.ndarray]) -> Fill:
    """Fills [kv_heads, queries_per_kv + 2, head_dim, ...] from q [heads * head_dim, ...] and k, v [kv_heads * head_dim,
    ...].
    """

    def fill(out: np.ndarray) -> None:
        kv_heads, rows = out.shape[:2]
        np.copyto(out[:, :-2], q().reshape(kv_heads, rows - 2, *out.shape[2:]), casting="unsafe")
        np.copyto(out[:, -2], k().reshape(kv_heads, *out.shape[2:]), casting="unsafe")
        np.copyto(out[:, -1], v().reshape(kv_heads, *out.shape[2:]), casting="unsafe")

    return fill


def _fills(reader: Reader, family: Family, model: ModelConfig, abstract: Weights) -> Weights:
    """A tree like the abstract one that holds what fills each array."""
    names, hidden = family.tensors, model.hidden_size
    first, groups = 0, []
    for group in abstract.layers:
        layers = range(first, first := first + group.attention_norm.shape[0])
        per_layer = [_layer_fills(reader, family, model, layer) for layer in layers]
        groups.append(
            LayerWeights(
                **{
                    field: None if leaf is None else _stack([fills[field] for fills in per_layer])
                    for field, leaf in vars(group).items()
                }
            )
        )
    if first != model.num_layers:
        raise ValueError(f"the abstract weights hold {first} layers, the model has {model.num_layers}")
    return Weights(
        embed=_copy(reader.tensor(names.embed, model.vocab_size, hidden)),
        layers=tuple(groups),
        final_norm=_copy(reader.tensor(names.final_norm, hidden)),
        head=None if abstract.head is None else _copy(reader.tensor(names.head, model.vocab_size, hidden)),
    )


def _layer_fills(reader: Reader, family: Family, model: ModelConfig, layer: int) -> dict[str, Fill]:
    """What fills each field of `LayerWeights` for one layer, without the leading dimension."""
    names, hidden, ffn = family.tensors, model.hidden_size, model.intermediate_size
    q_rows, kv_rows = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim

    def tensor(name: str, *shape: int) -> Callable[[], np.ndarray]:
        return reader.tensor(name.format(layer=layer), *shape)

    def weight(module: str, *shape: int) -> Callable[[], np.ndarray]:
        return tensor(module + ".weight", *shape)

    def bias(module: str, size: int) -> Callable[[], np.ndarray]:
        return tensor(module + ".bias", size)

    fills = {
        "attention_norm": _copy(tensor(names.attention_norm, hidden)),
        "qkv": _fuse_qkv(
            weight(names.q, q_rows, hidden), weight(names.k, kv_rows, hidden), weight(names.v, kv_rows, hidden)
        ),
        "o": _copy(weight(names.o, hidden, q_rows)),
        "mlp_norm": _copy(tensor(names.mlp_norm, hidden)),
        "gate_up": _fuse_gate_up(weight(names.gate, ffn, hidden), weight(names.up, ffn, hidden)),
        "down": _copy(weight(names.down, hidden, ffn)),
    }
    if model.qkv_bias:
        fills["qkv_bias"] = _fuse_qkv(bias(names.q, q_rows), bias(names.k, kv_rows), bias(names.v, kv_rows))
    if model.o_bias:
        fills["o_bias"] = _copy(bias(names.o, hidden))
    if model.mlp_bias:
        fills["gate_up_bias"] = _fuse_gate_up(bias(names.gate, ffn), bias(names.up, ffn))
        fills["down_bias"] = _copy(bias(names.down, hidden))
    return fills
