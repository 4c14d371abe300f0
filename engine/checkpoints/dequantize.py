"""Quantized blocks to float32, fast.

The ``gguf`` package dequantizes every type but makes several passes over memory, which costs a second for 135M
parameters. The common types of 32-value blocks are unpacked here in pieces that stay in the CPU's cache: 4 to 5 times
as fast, and numpy releases the interpreter lock, so that tensors can be unpacked in threads. All other types go through
the package.

Block layouts (ggml's ``ggml-common.h``; ``d`` and ``m`` are float16, ``q`` 16 bytes of low nibbles first, then high
ones)::

    Q4_0  d, q         value = d * (q - 8)
    Q4_1  d, m, q      value = d * q + m
    Q8_0  d, 32 int8   value = d * q
"""

from __future__ import annotations

import math
from collections.abc import Callable

import gguf
import ml_dtypes
import numpy as np
from gguf import quants

Type = gguf.GGMLQuantizationType
PIECE = 4096  # blocks at a time: 0.5 MiB of float32

PLAIN = {
    Type.F32: np.dtype("<f4"),
    Type.F16: np.dtype("<f2"),
    Type.F64: np.dtype("<f8"),
    Type.BF16: np.dtype(ml_dtypes.bfloat16),
}


def _float16(columns: np.ndarray) -> np.ndarray:
    """Columns of bytes [blocks, 2 k] as float32 [blocks, k]."""
    return np.ascontiguousarray(columns).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray, out: np.ndarray) -> None:
    """[blocks, 16] bytes into out [blocks, 32] float32, 0 to 15."""
    unpacked = np.empty((len(packed), 2, 16), np.uint8)
    np.bitwise_and(packed, 15, out=unpacked[:, 0])
    np.right_shift(packed, 4, out=unpacked[:, 1])
    np.copyto(out, unpacked.reshape(-1, 32), casting="unsafe")


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= 8
    out *= _float16(blocks[:, :2])


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    scales = _float16(blocks[:, :4])  # d, m
    _nibbles(blocks[:, 4:], out)
    out *= scales[:, :1]
    out += scales[:, 1:]


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _float16(blocks[:, :2]), out=out)


FAST: dict[Type, Callable[[np.ndarray, np.ndarray], None]] = {Type.Q4_0: _q4_0, Type.Q4_1: _q4_1, Type.Q8_0: _q8_0}


def dequantize(raw: np.ndarray, kind: Type, shape: tuple[int, ...]) -> np.ndarray:
    """Stored rows, uint8 [rows, bytes per row], as an array of ``shape``.

    Plain float types come back in their own dtype (a view of ``raw``), quantized ones as float32.
    Raises `NotImplementedError` for types that the ``gguf`` package cannot dequantize.
    """
    if kind in PLAIN:
        return raw.view(PLAIN[kind]).reshape(shape)
    if kind not in FAST:
        return quants.dequantize(raw, kind).reshape(shape)
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = raw.reshape(-1, block_bytes)
    out = np.empty((math.prod(shape) // 32, 32), np.float32)
    for begin in range(0, len(blocks), PIECE):
        FAST[kind](blocks[begin : begin + PIECE], out[begin : begin + PIECE])
    return out.reshape(shape)
