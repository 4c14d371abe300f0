"""Q8_0: 32 int8 with one scale."""

from __future__ import annotations

import gguf
import numpy as np

from engine.checkpoints.gguf_blocks.base import BlockType, float16


def unpack_q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """d, 32 int8: value = d * q."""
    np.multiply(blocks[:, 2:].view(np.int8), float16(blocks[:, :2]), out=out)


Q8_0 = BlockType(gguf.GGMLQuantizationType.Q8_0, unpack_q8_0)
