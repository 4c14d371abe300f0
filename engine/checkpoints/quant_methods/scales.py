"""Codes with their scales beside them, as several methods have it: ``name`` float8 or an integer type, and either
``name_scale``, one for all, per row or per group of a row's columns, or ``name_scale_inv``, one per block.

A weight is told from one that was left as it is by the scale beside it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from engine.checkpoints.errors import CheckpointError
from engine.checkpoints.quant_methods.base import Weight, misfit
from engine.checkpoints.safetensors import SafetensorsCheckpoint

SCALES = ("_scale_inv", "_scale")
FLOAT8 = {
    name: np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    for name, dtype in (("F8_E4M3", ml_dtypes.float8_e4m3fn), ("F8_E5M2", ml_dtypes.float8_e5m2))
}


@dataclasses.dataclass(frozen=True)
class ScaledWeight(Weight):
    """``block``: rows and columns that one scale of ``name_scale_inv`` is for."""

    stored: SafetensorsCheckpoint
    name: str
    scale: str  # name of the tensor
    block: Sequence[int] | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        return self.name, self.scale

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape(self.name)

    def read(self) -> np.ndarray:
        codes = self.codes()
        return scaled(codes, self.scales(codes.shape))

    def codes(self) -> np.ndarray:
        """What is to be multiplied, float32."""
        kind, stored = self.stored.dtype(self.name), self.stored.read_stored(self.name)
        return FLOAT8[kind][stored] if kind in FLOAT8 else stored.astype(np.float32)

    def scales(self, shape: tuple[int, ...]) -> np.ndarray:
        """As many dimensions as the weight has; each divides the weight's, or covers it in blocks."""
        scales = self.stored.read(self.scale).astype(np.float32)
        if scales.size == 1:
            return scales.reshape((1,) * len(shape))
        if scales.ndim == 1:
            scales = scales[:, None]
        if self.block is not None and self.scale.endswith("_inv"):
            expected = tuple(math.ceil(extent / block) for extent, block in zip(shape, self.block, strict=True))
            if scales.shape != expected:
                raise misfit(self.stored, self.scale, scales.shape, f"{list(expected)} for blocks of {self.block}")
            for axis, block in enumerate(self.block):
                scales = np.repeat(scales, block, axis=axis)
            return scales[tuple(slice(extent) for extent in shape)]
        if scales.ndim != len(shape) or any(extent % parts for extent, parts in zip(shape, scales.shape, strict=True)):
            raise misfit(self.stored, self.scale, scales.shape, f"what divides {list(shape)}")
        return scales


def scaled_weights(stored: SafetensorsCheckpoint, block: Sequence[int] | None = None) -> dict[str, Weight]:
    """Every stored tensor that has a scale beside it. Raises `CheckpointError` where there are zero points too."""
    names = set(stored.names())
    refuse_zero_points(stored)
    scales = {name: name + suffix for name in sorted(names) for suffix in SCALES if name + suffix in names}
    return {name: ScaledWeight(stored, name, scale, block) for name, scale in scales.items()}


def refuse_zero_points(stored: SafetensorsCheckpoint) -> None:
    """Raises `CheckpointError` where weights have zero points beside their scales; those of activations do not matter."""
    for name in stored.names():
        if name.endswith("_zero_point") and not name.endswith(".input_zero_point"):
            raise CheckpointError(
                f"{stored.file(name)}: tensor {name}: asymmetric quantization is not served; use another version"
            )


def scaled(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Codes times scales of as many dimensions, each of which divides the codes'."""
    product: np.ndarray
    if all(parts in (1, extent) for parts, extent in zip(scales.shape, codes.shape, strict=True)):
        product = codes * scales
        return product
    split = [size for extent, parts in zip(codes.shape, scales.shape, strict=True) for size in (parts, extent // parts)]
    spread = [size for parts in scales.shape for size in (parts, 1)]
    product = codes.reshape(split) * scales.reshape(spread)
    return product.reshape(codes.shape)
