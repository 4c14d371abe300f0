"""Fills the abstract weights (``engine/weights.py``) from a checkpoint.

The abstract tree says which arrays there are, in which shape, dtype and sharding; ``engine/fills.py`` says which tensors of the
checkpoint make each of them. The parts of an array that devices of this process hold, and no others, are read and put
together on the host in their final dtype and handed to the devices at once, so beside the weights themselves only the
arrays in flight are held. What was copied from a mapped file is unmapped again, block by block, or the process would
seem to hold the weights twice.

Scanned layers have one array for all of them, which for a large model is most of what the host has. Such arrays
(`engine.weights.stacked_fields`) go to the devices layer by layer and are put together there, by programs of the table, so
that one layer's matrix is the most that the host holds. Nothing else here compiles: numpy and ``jax.device_put`` only.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import jax
import numpy as np

from engine.agreement import check_tensors
from engine.checkpoints import Checkpoint
from engine.config import ModelConfig
from engine.families import get_family
from engine.fills import Fill, Part, Reader, Where, weight_fills
from engine.peft import Adapter
from engine.quantization import Array, Quantized
from engine.weights import Weights, one_layer, stacked_fields

logger = logging.getLogger(__name__)

THREADS = 4  # at most
IN_FLIGHT = 2**30  # bytes that are made on the host at once; more only if it is one array
ALIGNMENT = 64  # bytes; so aligned, the CPU backend takes a host array over without copying it


class ArrayCache(Protocol):
    """Keeps what was converted, by the number of the leaf; `warmup.weights.WeightsCache`. Thread-safe."""

    def get(self, index: int) -> np.ndarray | None:
        """A kept array, or `None`."""

    def put(self, index: int, array: np.ndarray) -> None:
        """Keeps an array."""

    def commit(self, count: int) -> None:
        """All ``count`` arrays are loaded."""


class Stacker(Protocol):
    """Puts arrays of several layers together on the devices; `engine.jax_engine.JaxEngine`."""

    def empty_stacks(self) -> dict[str, Array]:
        """The arrays, or `Quantized`, by the name of their field: `engine.weights.stacked_fields`."""

    def place_layer(self, field: str, stack: Array, part: Array, layer: int) -> Array:
        """The stack, donated, with one layer's part in its place."""


def load_weights(
    checkpoint: Checkpoint,
    model: ModelConfig,
    abstract_weights: Weights,
    adapters: Sequence[Adapter] = (),
    *,
    cache: ArrayCache | None = None,
    stacker: Callable[[], Stacker] | None = None,
) -> Weights:
    """The weights on their devices; ``adapters`` are those that the abstract weights have room for. Arrays that ``cache``
    has are not made from the checkpoint again; others are kept there. ``stacker`` waits for one that can be used; without it, or
    with a ``cache``, arrays of several layers are put together on the host.

    Raises `CheckpointError`, naming file and tensor, when a tensor is missing or has another shape than the config says;
    `engine.agreement` has what else may disagree.
    """
    reader = Reader(checkpoint)
    fills = weight_fills(reader, get_family(model.family), model, abstract_weights, adapters)
    check_tensors(checkpoint, model, reader.expected, reader.zeros)
    nodes, structure = jax.tree.flatten(abstract_weights, is_leaf=lambda node: isinstance(node, Quantized))
    counts = [len(jax.tree.leaves(node)) for node in nodes]
    first = np.cumsum([0, *counts[:-1]]).tolist()  # number of each node's first array

    stacks = None if stacker is None or cache is not None else _Stacks(stacked_fields(abstract_weights), stacker)
    flight = _Flight()

    def load(index: int, node: Node, fill: Fill) -> jax.Array | Quantized:
        if cache is not None:
            return _place_cached(node, fill, cache, index)
        if stacks is not None and (field := stacks.field_of(node)) is not None:
            return _place_by_layer(field, node, fill, stacks, flight)
        return _place(node, fill, flight)

    with concurrent.futures.ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "load-weights") as threads:
        futures = [
            threads.submit(load, index, node, fill)
            for index, node, fill in zip(first, nodes, jax.tree.leaves(fills), strict=True)
        ]
        concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
        for future in futures:
            future.cancel()  # after a failure, those that have not begun; the failed one comes before them
        arrays = [future.result() for future in futures]
    if cache is not None:
        cache.commit(sum(counts))
    logger.debug("weights: read %d bytes, at most %d in flight", reader.copied, flight.most)
    weights: Weights = jax.tree.unflatten(structure, arrays)
    return weights


Node = jax.ShapeDtypeStruct | Quantized  # an abstract array
Parts = list[tuple[Where, list[jax.Device]]]  # the parts of an array, and the devices that hold each


class _Flight:
    """Bounds what is on the host and not yet on the devices."""

    def __init__(self) -> None:
        self.most = 0  # bytes that were in flight at once
        self._bytes = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def of(self, size: int) -> Iterator[None]:
        """Waits until there is room, and takes it for the block."""
        with self._changed:
            self._changed.wait_for(lambda: not self._bytes or self._bytes + size <= IN_FLIGHT)
            self._bytes += size
            self.most = max(self.most, self._bytes)
        try:
            yield
        finally:
            with self._changed:
                self._bytes -= size
                self._changed.notify_all()


class _Stacks:
    """The arrays that a `Stacker` puts together, made when the first is asked for."""

    def __init__(self, fields: Mapping[str, Node], stacker: Callable[[], Stacker]):
        self._fields = {id(node): field for field, node in fields.items()}
        self._stacker, self._lock = stacker, threading.Lock()
        self._empty: dict[str, Array] | None = None

    def field_of(self, node: Node) -> str | None:
        """The field of an array of the abstract weights; `None` if it is not put together here."""
        return self._fields.get(id(node))

    def take(self, field: str) -> tuple[Stacker, Array]:
        """The stacker, and one of its empty arrays."""
        stacker = self._stacker()
        with self._lock:
            if self._empty is None:
                self._empty = stacker.empty_stacks()
            return stacker, self._empty.pop(field)


def _local_parts(node: Node) -> Parts:
    """The parts that devices of this process hold."""
    leaf = node.values if isinstance(node, Quantized) else node
    devices: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, where in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        bounds = tuple(part.indices(extent)[:2] for part, extent in zip(where, leaf.shape, strict=True))
        devices.setdefault(bounds, []).append(device)
    return [(tuple(slice(*bound) for bound in bounds), found) for bounds, found in devices.items()]


def _place(node: Node, fill: Fill, flight: _Flight) -> jax.Array | Quantized:
    """An array from its parts, each made on the host once."""
    leaves, inner = jax.tree.flatten(node)
    parts = _local_parts(node)
    shapes = [tuple(part.stop - part.start for part in where) for where, _ in parts]
    with flight.of(sum(math.prod(shape[: leaf.ndim]) * leaf.dtype.itemsize for shape in shapes for leaf in leaves)):
        made = [[_aligned(shape[: leaf.ndim], leaf.dtype) for leaf in leaves] for shape in shapes]
        fill([(where, jax.tree.unflatten(inner, arrays)) for (where, _), arrays in zip(parts, made, strict=True)])
        placed = [_assemble(leaf, parts, [arrays[i] for arrays in made]) for i, leaf in enumerate(leaves)]
        whole: jax.Array | Quantized = jax.tree.unflatten(inner, jax.block_until_ready(placed))
        return whole


def _place_by_layer(field: str, node: Node, fill: Fill, stacks: _Stacks, flight: _Flight) -> jax.Array | Quantized:
    """An array of several layers, put together on the devices."""
    stack: jax.Array | Quantized
    stacker, stack = stacks.take(field)
    of_layer = one_layer(node)
    for layer in range(node.shape[0]):

        def fill_layer(parts: Sequence[Part], layer: int = layer) -> None:
            fill([((slice(layer, layer + 1), *where), out[None]) for where, out in parts])

        stack = stacker.place_layer(field, stack, _place(of_layer, fill_layer, flight), layer)
    return stack


def _place_cached(node: Node, fill: Fill, cache: ArrayCache, index: int) -> jax.Array | Quantized:
    """As `_place`, by way of whole arrays, which the cache keeps."""
    leaves, inner = jax.tree.flatten(node)
    found = [cache.get(index + i) for i in range(len(leaves))]
    kept = [array for array in found if array is not None]
    if len(kept) < len(leaves):
        kept = [_aligned(leaf.shape, leaf.dtype) for leaf in leaves]
        fill([(tuple(slice(0, extent) for extent in leaves[0].shape), jax.tree.unflatten(inner, kept))])
        for i, array in enumerate(kept):
            cache.put(index + i, array)
    parts = _local_parts(node)
    placed = [
        _assemble(leaf, parts, [np.ascontiguousarray(array[where[: leaf.ndim]]) for where, _ in parts])
        for leaf, array in zip(leaves, kept, strict=True)
    ]
    whole: jax.Array | Quantized = jax.tree.unflatten(inner, placed)
    return whole


def _assemble(leaf: jax.ShapeDtypeStruct, parts: Parts, arrays: Sequence[np.ndarray]) -> jax.Array:
    """One array of the devices from the host's parts."""
    if leaf.sharding.num_devices == 1:
        only: jax.Array = jax.device_put(arrays[0], leaf.sharding)
        return only
    placed = [
        jax.device_put(array, device) for (_, devices), array in zip(parts, arrays, strict=True) for device in devices
    ]
    whole: jax.Array = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, placed)
    return whole


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + size].view(dtype).reshape(shape)
