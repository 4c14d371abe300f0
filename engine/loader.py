"""Fills the abstract weights (``engine/weights.py``) from a checkpoint.

The abstract tree says which arrays there are, in which shape, dtype and sharding; ``engine/fills.py`` says which tensors of the
checkpoint make each of them. The parts of an array that devices of this process hold, and no others, are read and put
together on the host in their final dtype and handed to the devices at once, so beside the weights themselves only the
arrays in flight (one per thread) are held. What was copied from a mapped file is unmapped again, block by block, or the
process would seem to hold the weights twice. Nothing here compiles: numpy and ``jax.device_put`` only.
"""

from __future__ import annotations

import concurrent.futures
import logging
import math
import os
from collections.abc import Sequence
from typing import Protocol

import jax
import numpy as np

from engine.agreement import check_tensors
from engine.checkpoints import Checkpoint
from engine.config import ModelConfig
from engine.families import get_family
from engine.fills import Fill, Reader, Where, weight_fills
from engine.peft import Adapter
from engine.quantization import Quantized
from engine.weights import Weights

logger = logging.getLogger(__name__)

THREADS = 4  # at most; each holds one array on the host
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
    reader = Reader(checkpoint)
    fills = weight_fills(reader, get_family(model.family), model, abstract_weights, adapters)
    check_tensors(checkpoint, model, reader.expected, reader.zeros)
    nodes, structure = jax.tree.flatten(abstract_weights, is_leaf=lambda node: isinstance(node, Quantized))
    counts = [len(jax.tree.leaves(node)) for node in nodes]
    first = np.cumsum([0, *counts[:-1]]).tolist()  # number of each node's first array

    def load(index: int, node: jax.ShapeDtypeStruct | Quantized, fill: Fill) -> jax.Array | Quantized:
        if cache is None:
            return _place(node, _local_parts(node), fill)
        return _place_cached(node, fill, cache, index)

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
    logger.debug("read %d bytes of %s", reader.copied, checkpoint.path)
    return structure.unflatten(arrays)


Parts = list[tuple[Where, list[jax.Device]]]  # the parts of an array, and the devices that hold each


def _local_parts(node: jax.ShapeDtypeStruct | Quantized) -> Parts:
    """The parts that devices of this process hold."""
    leaf = node.values if isinstance(node, Quantized) else node
    devices: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, where in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        bounds = tuple(part.indices(extent)[:2] for part, extent in zip(where, leaf.shape, strict=True))
        devices.setdefault(bounds, []).append(device)
    return [(tuple(slice(*bound) for bound in bounds), found) for bounds, found in devices.items()]


def _place(node: jax.ShapeDtypeStruct | Quantized, parts: Parts, fill: Fill) -> jax.Array | Quantized:
    """An array from its parts, each made on the host once."""
    leaves, inner = jax.tree.flatten(node)
    made = []
    for where, _ in parts:
        shape = tuple(part.stop - part.start for part in where)
        made.append([_aligned(shape[: leaf.ndim], leaf.dtype) for leaf in leaves])
    fill([(where, inner.unflatten(arrays)) for (where, _), arrays in zip(parts, made, strict=True)])
    return inner.unflatten([_assemble(leaf, parts, [arrays[i] for arrays in made]) for i, leaf in enumerate(leaves)])


def _place_cached(
    node: jax.ShapeDtypeStruct | Quantized, fill: Fill, cache: ArrayCache, index: int
) -> jax.Array | Quantized:
    """As `_place`, by way of whole arrays, which the cache keeps."""
    leaves, inner = jax.tree.flatten(node)
    kept = [cache.get(index + i) for i in range(len(leaves))]
    if any(array is None for array in kept):
        kept = [_aligned(leaf.shape, leaf.dtype) for leaf in leaves]
        fill([(tuple(slice(0, extent) for extent in leaves[0].shape), inner.unflatten(kept))])
        for i, array in enumerate(kept):
            cache.put(index + i, array)
    parts = _local_parts(node)
    placed = [
        _assemble(leaf, parts, [np.ascontiguousarray(array[where[: leaf.ndim]]) for where, _ in parts])
        for leaf, array in zip(leaves, kept, strict=True)
    ]
    return inner.unflatten(placed)


def _assemble(leaf: jax.ShapeDtypeStruct, parts: Parts, arrays: Sequence[np.ndarray]) -> jax.Array:
    """One array of the devices from the host's parts."""
    if leaf.sharding.num_devices == 1:
        return jax.device_put(arrays[0], leaf.sharding)
    placed = [
        jax.device_put(array, device) for (_, devices), array in zip(parts, arrays, strict=True) for device in devices
    ]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, placed)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + size].view(dtype).reshape(shape)
