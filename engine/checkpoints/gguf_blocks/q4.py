"""Q4_0 and Q4_1: 32 values of 4 bits with one scale, or a scale and a minimum."""

from __future__ import annotations

import gguf
import numpy as np

from engine.checkpoints.gguf_blocks.base import BlockType, float16, nibbles


def unpack_q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """d, q: value = d * (q - 8)."""
    nibbles(blocks[:, 2:], out)
    out -= 8
    out *= float16(blocks[:, :2])


def unpack_q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """d, m, q: value = d * q + m."""
    scales = float16(blocks[:, :4])  # d, m
    nibbles(blocks[:, 4:], out)
    out *= scales[:, :1]
    out += scales[:, 1:]


Q4_0 = BlockType(gguf.GGMLQuantizationType.Q4_0, unpack_q4_0)
Q4_1 = BlockType(gguf.GGMLQuantizationType.Q4_1, unpack_q4_1)
