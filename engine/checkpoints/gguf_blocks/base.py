"""What a block type is, and what several unpack alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import gguf
import numpy as np


@dataclasses.dataclass(frozen=True)
class BlockType:
    """One of ggml's block types. ``unpack`` takes blocks, uint8 [blocks, bytes per block], and fills their values, float32
    [blocks, values per block]; it is called for a few thousand blocks at a time, from several threads."""

    type: gguf.GGMLQuantizationType
    unpack: Callable[[np.ndarray, np.ndarray], None]


def float16(columns: np.ndarray) -> np.ndarray:
    """Columns of bytes [blocks, 2 k] as float32 [blocks, k]."""
    return np.ascontiguousarray(columns).view("<f2").astype(np.float32)


def nibbles(packed: np.ndarray, out: np.ndarray) -> None:
    """[blocks, 16] bytes, 16 low nibbles before 16 high ones, into out [blocks, 32] float32, 0 to 15."""
    unpacked = np.empty((len(packed), 2, 16), np.uint8)
    np.bitwise_and(packed, 15, out=unpacked[:, 0])
    np.right_shift(packed, 4, out=unpacked[:, 1])
    np.copyto(out, unpacked.reshape(-1, 32), casting="unsafe")
