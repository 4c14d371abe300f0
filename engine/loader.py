"""Fills the abstract weights (``engine/weights.py``) from a checkpoint.

The abstract tree says which arrays there are, in which shape, dtype and sharding; the family says which tensors of the
checkpoint make each of them. Every array is put together on the host in its final dtype and handed to the device at
once, so beside the weights themselves only the arrays in flight (one per thread) are held. What was copied from a
mapped file is unmapped again, block by block, or the process would seem to hold the weights twice. Nothing here
compiles: numpy and ``jax.device_put`` only.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import numpy as np

from engine.agreement import check_tensors, embedding
from engine.checkpoints import Checkpoint
from engine.config import ModelConfig
from engine.families import Family, TensorNames, get_family
from engine.peft import Adapter, adapter_fills
from engine.quantization import Quantized, quantize
from engine.weights import LayerWeights, Weights

Fill = Callable[[np.ndarray], None]  # writes one array of the tree, in place; or the two of a `Quantized`
THREADS = 4  # at most; each holds one array on the host
BLOCK = 32 * 2**20  # bytes of a file that are copied before they are released
ALIGNMENT = 64  # bytes; so aligned, the CPU backend takes a host array over without copying it


class ArrayCache(Protocol):
    """Keeps what was converted, by the number of the leaf; `warmup.weights.WeightsCache`. Thread-safe."""

    def get(self, index: int) -> np.ndarray | None:
        """A kept array, or `None`."""

    def put(self, index: int, array: np.ndarray) -> None:
        """Keeps an array."""

    def commit(self, count: int) -> None:
        """All ``count`` arrays are loaded."""


def load_weights(
    checkpoint: Checkpoint,
    model: ModelConfig,
    abstract_weights: Weights,
    adapters: Sequence[Adapter] = (),
    *,
    cache: ArrayCache | None = None,
) -> Weights:
    """The weights on their devices; ``adapters`` are those that the abstract weights have room for. Arrays that ``cache``
    has are not made from the checkpoint again; others are kept there.

    Raises `CheckpointError`, naming file and tensor, when a tensor is missing or has another shape than the config says;
    `engine.agreement` has what else may disagree.
    """
    family = get_family(model.family)
    reader = Reader(checkpoint)
    fills = _fills(reader, family, model, abstract_weights, adapters)
    check_tensors(checkpoint, model, reader.expected, reader.zeros)
    nodes, structure = jax.tree.flatten(abstract_weights, is_leaf=lambda node: isinstance(node, Quantized))
    counts = [len(jax.tree.leaves(node)) for node in nodes]
    first = np.cumsum([0, *counts[:-1]]).tolist()  # number of each node's first array

    def load(index: int, node: jax.ShapeDtypeStruct | Quantized, fill: Fill) -> jax.Array | Quantized:
        leaves, inner = jax.tree.flatten(node)
        kept = [None if cache is None else cache.get(index + i) for i in range(len(leaves))]
        if any(array is None for array in kept):
            kept = [_aligned(leaf.shape, leaf.dtype) for leaf in leaves]
            fill(inner.unflatten(kept))
            for i, array in enumerate(kept if cache is not None else ()):
                cache.put(index + i, array)
        return inner.unflatten([jax.device_put(a, leaf.sharding) for a, leaf in zip(kept, leaves, strict=True)])

    with concurrent.futures.ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "load-weights") as threads:
        futures = [
            threads.submit(load, index, node, fill)
            for index, node, fill in zip(first, nodes, structure.flatten_up_to(fills), strict=True)
        ]
        concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
        for future in futures:
            future.cancel()  # after a failure, those that have not begun; the failed one comes before them
        arrays = [future.result() for future in futures]
    if cache is not None:
        cache.commit(sum(counts))
    return structure.unflatten(arrays)


@dataclasses.dataclass(frozen=True)
class Read:
    """A tensor of the checkpoint, yet to be read."""

    values: Callable[[], np.ndarray]
    release: Callable[[], None]  # its pages, as far as they have been touched

    def copy(self, out: np.ndarray, arrange: Callable[[np.ndarray], np.ndarray] = lambda values: values) -> None:
        """Writes ``arrange`` of it, a view in the shape of ``out``."""
        values = arrange(self.values())
        rows = max(1, BLOCK * len(values) // max(1, values.nbytes))
        for begin in range(0, len(values), rows):
            np.copyto(out[begin : begin + rows], values[begin : begin + rows], casting="unsafe")
            self.release()


class Reader:
    """Reads tensors by name, and remembers which are used and in which shapes, so that they can be checked first."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self.available = set(checkpoint.names())
        self.expected: dict[str, tuple[int, ...]] = {}
        self.zeros: list[str] = []  # biases that are not there

    def tensor(self, name: str, *shape: int) -> Read:
        """What reads the tensor; the shape is what the config promises."""
        self.expected[name] = shape
        return Read(lambda: self.checkpoint.read(name), lambda: self.checkpoint.release(name))

    def bias(self, name: str, *shape: int) -> Read:
        """As `tensor`, of a linear map's bias: zeros if the checkpoint has none."""
        if name in self.available:
            return self.tensor(name, *shape)
        self.zeros.append(name)
        return Read(lambda: np.zeros(shape, np.float32), lambda: None)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + size].view(dtype).reshape(shape)


def _copy(read: Read, offset: float = 0.0) -> Fill:
    """Fills a whole array with one tensor, ``offset`` added in float32."""

    def arrange(values: np.ndarray) -> np.ndarray:
        return values.astype(np.float32) + np.float32(offset) if offset else values

    def fill(out: np.ndarray) -> None:
        read.copy(out, lambda values: arrange(values).reshape(out.shape))

    return fill


def _stack(fills: list[Fill]) -> Fill:
    """Fills the leading dimension, one entry per layer or expert."""

    def fill(out: np.ndarray) -> None:
        for index, one in enumerate(fills):
            one(out[index])

    return fill


def _stack_quantized(fills: list[Fill]) -> Callable[[Quantized], None]:
    """As `_stack`; one layer at a time is held in float32."""

    def fill(out: Quantized) -> None:
        for index, one in enumerate(fills):
            layer = np.empty(out.shape[1:], np.float32)
            one(layer)
            quantized = quantize(layer, np)
            out.values[index], out.scale[index] = quantized.values, quantized.scale

    return fill


def _fuse_gate_up(gate: Read, up: Read) -> Fill:
    """Fills [2, ffn, ...]."""

    def fill(out: np.ndarray) -> None:
        gate.copy(out[0])
        up.copy(out[1])

    return fill


def _fuse_qkv(q: Read, k: Read, v: Read) -> Fill:
    """Fills [kv_heads, queries_per_kv + 2, head_dim, ...] from q [heads * head_dim, ...] and k, v [kv_heads * head_dim,
    ...].
    """

    def fill(out: np.ndarray) -> None:
        kv_heads, rows = out.shape[:2]
        q.copy(out[:, :-2], lambda values: values.reshape(kv_heads, rows - 2, *out.shape[2:]))
        for place, read in ((-2, k), (-1, v)):
            read.copy(out[:, place], lambda values: values.reshape(kv_heads, *out.shape[2:]))

    return fill


def _split(read: Read, fuse: Callable[..., Fill], *sizes: int) -> Fill:
    """Fills from one tensor whose rows are several modules' one after the other. It is read once."""

    def fill(out: np.ndarray) -> None:
        parts = np.split(read.values(), np.cumsum(sizes)[:-1])
        fuse(*[Read(lambda part=part: part, read.release) for part in parts])(out)

    return fill


def _by_turns(read: Read) -> Fill:
    """Fills [experts, 2, ffn, ...] from [experts, ..., 2 * ffn], gate and up by turns."""

    def fill(out: np.ndarray) -> None:
        both = Read(lambda stored=read.values(): stored, read.release)  # read, and perhaps dequantized, once
        both.copy(out[:, 0], lambda stored: np.moveaxis(stored[..., ::2], -1, 1))
        both.copy(out[:, 1], lambda stored: np.moveaxis(stored[..., 1::2], -1, 1))

    return fill


def _transposed(read: Read) -> Fill:
    """Fills [experts, out, ...] from [experts, ..., out]."""

    def fill(out: np.ndarray) -> None:
        read.copy(out, lambda stored: np.moveaxis(stored, -1, 1))

    return fill


def _fills(
    reader: Reader, family: Family, model: ModelConfig, abstract: Weights, adapters: Sequence[Adapter]
) -> Weights:
    """A tree like the abstract one that holds what fills each array."""
    names, hidden = family.tensors, model.hidden_size
    first, groups = 0, []
    for group in abstract.layers:
        fields = {field for field, leaf in vars(group).items() if leaf is not None} - {"adapters"}
        layers = range(first, first := first + group.qkv.shape[0])
        per_layer = [_LayerFills(reader, names, model, layer).fields(fields) for layer in layers]
        low_rank = None if group.adapters is None else adapter_fills(adapters, group.adapters, layers)
        stack = {field: _stack_quantized if isinstance(getattr(group, field), Quantized) else _stack for field in fields}
        stacks = {field: stack[field]([fills[field] for fills in per_layer]) for field in fields}
        groups.append(LayerWeights(**stacks, adapters=low_rank))
    if first != model.num_layers:
        raise ValueError(f"the abstract weights hold {first} layers, the model has {model.num_layers}")
    return Weights(
        embed=_copy(reader.tensor(embedding(model, reader.available), model.vocab_size, hidden)),
        layers=tuple(groups),
        final_norm=_copy(reader.tensor(names.final_norm, hidden), model.norm_offset),
        head=None if abstract.head is None else _copy(reader.tensor(names.head, model.vocab_size, hidden)),
    )


class _LayerFills:
    """What fills each field of `LayerWeights` for one layer, without the leading dimension."""

    def __init__(self, reader: Reader, names: TensorNames, model: ModelConfig, layer: int):
        self.reader, self.names, self.model, self.layer = reader, names, model, layer
        self.q_rows, self.kv_rows = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim

    def fields(self, wanted: set[str]) -> dict[str, Fill]:
        """Those that the model has."""
        return {field: getattr(self, field)() for field in wanted}

    def tensor(self, name: str, *shape: int, **place: int) -> Read:
        return self.reader.tensor(name.format(layer=self.layer, **place), *shape)

    def module(self, name: str, suffix: str, *shape: int, **place: int) -> Read:
        """The ``.weight`` or ``.bias`` of a linear map."""
        read = self.reader.bias if suffix == ".bias" else self.reader.tensor
        return read(name.format(layer=self.layer, **place) + suffix, *shape)

    def norm(self, name: str, *shape: int) -> Fill:
        return _copy(self.tensor(name, *shape), self.model.norm_offset)

    def attention_norm(self) -> Fill:
        return self.norm(self.names.attention_norm, self.model.hidden_size)

    def attention_post_norm(self) -> Fill:
        return self.norm(self.names.attention_post_norm, self.model.hidden_size)

    def mlp_norm(self) -> Fill:
        return self.norm(self.names.mlp_norm, self.model.hidden_size)

    def mlp_post_norm(self) -> Fill:
        return self.norm(self.names.mlp_post_norm, self.model.hidden_size)

    def q_norm(self) -> Fill:
        return self.norm(self.names.q_norm, self.model.head_dim if self.model.qk_norm == "head" else self.q_rows)

    def k_norm(self) -> Fill:
        return self.norm(self.names.k_norm, self.model.head_dim if self.model.qk_norm == "head" else self.kv_rows)

    def sinks(self) -> Fill:
        return _copy(self.tensor(self.names.sinks, self.model.num_heads))

    def qkv(self) -> Fill:
        return self._qkv(".weight", self.model.hidden_size)

    def qkv_bias(self) -> Fill:
        return self._qkv(".bias")

    def _qkv(self, suffix: str, *columns: int) -> Fill:
        names, sizes = self.names, (self.q_rows, self.kv_rows, self.kv_rows)
        if names.qkv is not None:
            return _split(self.module(names.qkv, suffix, sum(sizes), *columns), _fuse_qkv, *sizes)
        modules = zip((names.q, names.k, names.v), sizes, strict=True)
        return _fuse_qkv(*[self.module(module, suffix, size, *columns) for module, size in modules])

    def o(self) -> Fill:
        return _copy(self.module(self.names.o, ".weight", self.model.hidden_size, self.q_rows))

    def o_bias(self) -> Fill:
        return _copy(self.module(self.names.o, ".bias", self.model.hidden_size))

    def gate_up(self) -> Fill:
        return self._gate_up(".weight", self.model.hidden_size)

    def gate_up_bias(self) -> Fill:
        return self._gate_up(".bias")

    def _gate_up(self, suffix: str, *columns: int) -> Fill:
        names, ffn = self.names, self.model.intermediate_size
        if names.experts is not None:
            return _by_turns(self._all_experts("gate_up_proj", suffix, *columns, 2 * ffn))
        if self.model.moe is not None:
            return self._experts(
                lambda expert: _fuse_gate_up(
                    self.module(names.expert_gate, suffix, ffn, *columns, expert=expert),
                    self.module(names.expert_up, suffix, ffn, *columns, expert=expert),
                )
            )
        if names.gate_up is not None:
            return _split(self.module(names.gate_up, suffix, 2 * ffn, *columns), _fuse_gate_up, ffn, ffn)
        return _fuse_gate_up(
            self.module(names.gate, suffix, ffn, *columns), self.module(names.up, suffix, ffn, *columns)
        )

    def down(self) -> Fill:
        return self._down(".weight", self.model.intermediate_size)

    def down_bias(self) -> Fill:
        return self._down(".bias")

    def _down(self, suffix: str, *columns: int) -> Fill:
        names, hidden = self.names, self.model.hidden_size
        if names.experts is not None:
            return _transposed(self._all_experts("down_proj", suffix, *columns, hidden))
        if self.model.moe is None:
            return _copy(self.module(names.down, suffix, hidden, *columns))
        return self._experts(
            lambda expert: _copy(self.module(names.expert_down, suffix, hidden, *columns, expert=expert))
        )

    def _all_experts(self, module: str, suffix: str, *shape: int) -> Read:
        name = f"{self.names.experts}.{module}" + suffix.replace(".weight", "").replace(".", "_")
        return self.tensor(name, self.model.moe.experts, *shape)

    def _experts(self, fill: Callable[[int], Fill]) -> Fill:
        return _stack([fill(expert) for expert in range(self.model.moe.experts)])

    def router(self) -> Fill:
        return _copy(self.tensor(self.names.router + ".weight", self.model.moe.experts, self.model.hidden_size))

    def router_bias(self) -> Fill:
        return _copy(self.tensor(self.names.router + ".bias", self.model.moe.experts))
