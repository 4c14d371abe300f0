"""``mxfp4``: 4-bit floats in blocks of 32 along the input (``_blocks``, ``_scales``; OCP Microscaling Formats 1.0), as GPT-OSS
stores its experts; the tensor shown is [experts, in, out]."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from engine.checkpoints.quant_methods.base import QuantMethod, Weight, misfit
from engine.checkpoints.safetensors import SafetensorsCheckpoint

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclasses.dataclass(frozen=True)
class Mxfp4Weight(Weight):
    stored: SafetensorsCheckpoint
    name: str

    @property
    def parts(self) -> tuple[str, ...]:
        return self.name + "_blocks", self.name + "_scales"

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, rows, blocks, size = self.stored.shape(self.name + "_blocks")
        return (*lead, blocks * size * 2, rows)

    def read(self) -> np.ndarray:
        blocks, exponents = (self.stored.read_stored(part) for part in self.parts)
        if blocks.shape[:-1] != exponents.shape:
            raise misfit(self.stored, self.name + "_scales", exponents.shape, f"{list(blocks.shape[:-1])}")
        values = np.empty((*blocks.shape, 2), np.float32)
        values[..., 0], values[..., 1] = FP4[blocks & 15], FP4[blocks >> 4]
        values *= np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)[..., None, None]
        return np.swapaxes(values.reshape(*blocks.shape[:-2], -1), -1, -2)


def mxfp4_weights(stored: SafetensorsCheckpoint, quantization: Mapping[str, object]) -> Mapping[str, Weight]:
    names = set(stored.names())
    blocks = [name.removesuffix("_blocks") for name in names if name.endswith("_blocks")]
    return {name: Mxfp4Weight(stored, name) for name in blocks if name + "_scales" in names}


MXFP4 = QuantMethod("mxfp4", mxfp4_weights)
