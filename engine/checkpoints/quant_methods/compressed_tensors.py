"""``compressed-tensors``: float8 or int8 with ``weight_scale``, one for all, per row or per group of a row's columns; or int4
and int8 packed into int32 (``weight_packed``, ``weight_shape``), scaled the same."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping

import numpy as np

from engine.checkpoints.errors import CheckpointError
from engine.checkpoints.quant_methods.base import QuantMethod, Weight, an_object, block_size
from engine.checkpoints.quant_methods.scales import ScaledWeight, scaled_weights
from engine.checkpoints.safetensors import SafetensorsCheckpoint

FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")


@dataclasses.dataclass(frozen=True)
class PackedWeight(ScaledWeight):
    """Unsigned codes of ``bits``, packed into int32 [rows, words] from the lowest bits up."""

    bits: int = 4

    @property
    def parts(self) -> tuple[str, ...]:
        return self.name + "_packed", self.name + "_shape", self.scale

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(extent) for extent in self.stored.read_stored(self.name + "_shape"))

    def codes(self) -> np.ndarray:
        return unpack(self.stored.read_stored(self.name + "_packed"), self.bits, self.shape)


def compressed_weights(stored: SafetensorsCheckpoint, quantization: Mapping[str, object]) -> Mapping[str, Weight]:
    bits = packed_bits(stored.path, quantization)
    weights, names = scaled_weights(stored, block_size(stored.path, quantization)), set(stored.names())
    for packed in (name for name in names if name.endswith(".weight_packed")):
        name = packed.removesuffix("_packed")
        if bits == 0:
            raise CheckpointError(
                f"{stored.file(packed)}: tensor {packed} is packed, which no group of config.json's quantization_config says"
            )
        if name + "_scale" not in names:
            raise CheckpointError(f"{stored.file(packed)}: tensor {packed} has no {name}_scale; download the model again")
        weights[name] = PackedWeight(stored, name, name + "_scale", bits=bits)
    return weights


def packed_bits(path: pathlib.Path, quantization: Mapping[str, object]) -> int:
    """Bits of packed weights; 0 where none are packed. Raises `CheckpointError` for formats that cannot be read."""
    bits = 0
    for name, value in an_object(path, "config_groups", quantization.get("config_groups")).items():
        group = an_object(path, name, value)
        form = group.get("format") or quantization.get("format")
        if form not in FORMATS:
            raise CheckpointError(
                f"{path / 'config.json'}: compressed-tensors format is {form!r}; served are {', '.join(FORMATS)}"
            )
        if form == "pack-quantized":
            found = an_object(path, f"{name}.weights", group.get("weights")).get("num_bits")
            if not isinstance(found, int) or found not in (4, 8) or bits not in (0, found):
                raise CheckpointError(
                    f"{path / 'config.json'}: weights packed with num_bits other than 4 or 8, or with several"
                )
            bits = found
    return bits


def unpack(packed: np.ndarray, bits: int, shape: tuple[int, ...]) -> np.ndarray:
    """int32 [rows, words] of unsigned codes, low bits first, as float32 ``shape``: code minus half the range."""
    per_word = 32 // bits
    words = packed.view(np.uint32)[..., None] >> (np.arange(per_word, dtype=np.uint32) * bits)
    codes = (words & np.uint32((1 << bits) - 1)).reshape(len(packed), -1)[:, : shape[1]]
    return codes.astype(np.float32) - float(1 << (bits - 1))


COMPRESSED_TENSORS = QuantMethod("compressed-tensors", compressed_weights)
