"""Quantized safetensors, shown dequantized: float8, int8, packed int4 and MXFP4 weights with their scales.

``quantization_config`` of config.json says how (``quant_method``); a weight is told from one that was left as it is by
the scale beside it. A value is always its code times a scale, and what differs is where the scale lies:

    fp8                 float8, ``weight_scale_inv`` one per block of ``weight_block_size``, or ``weight_scale`` one for
                        all or per row
    fbgemm_fp8          float8, ``weight_scale`` per row
    compressed-tensors  float8 or int8, ``weight_scale`` one for all, per row or per group of a row's columns; or int4
                        and int8 packed into int32 (``weight_packed``, ``weight_shape``), the same
    mxfp4               4-bit floats in blocks of 32 along the input (``_blocks``, ``_scales``; OCP Microscaling Formats
                        1.0); the tensor shown is [experts, in, out]

Scales of activations and of cached keys and values (``input_scale``, ``k_scale``, ...) belong to arithmetic that is not
done here, and are not shown."""

from __future__ import annotations

import math
import pathlib
import re

import ml_dtypes
import numpy as np

from engine.checkpoints.errors import CheckpointError
from engine.checkpoints.safetensors import SafetensorsCheckpoint

METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "mxfp4")
FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")  # of compressed-tensors
HIDDEN = re.compile(r".*\.(input_scale|input_zero_point|[kvq]_scale|weight_g_idx|activation_scale|input_scale_ub)")
SCALES = ("_scale_inv", "_scale")
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
FLOAT8 = {
    name: np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    for name, dtype in (("F8_E4M3", ml_dtypes.float8_e4m3fn), ("F8_E5M2", ml_dtypes.float8_e5m2))
}


class QuantizedCheckpoint:
    """A quantized directory. See `engine.checkpoints.Checkpoint`. Raises `CheckpointError` for layouts that cannot be
    read."""

    dequantizes = True

    def __init__(self, inner: SafetensorsCheckpoint):
        self.path, self.strict = inner.path, inner.strict
        self._inner = inner
        quantization = inner.hf_config["quantization_config"]
        self.hf_config = {name: value for name, value in inner.hf_config.items() if name != "quantization_config"}
        self._bits = _packed_bits(inner.path, quantization)
        self._block = quantization.get("weight_block_size")
        stored = set(inner.names())
        self._packed = {name[: -len("_packed")] for name in stored if name.endswith(".weight_packed")}
        self._mxfp4 = {
            name[: -len("_blocks")] for name in stored if name.endswith("_blocks") and name[:-7] + "_scales" in stored
        }
        self._scale = {
            name: name + suffix for name in stored | self._packed for suffix in SCALES if name + suffix in stored
        }
        zero = sorted(name for name in stored if name.endswith("_zero_point") and not HIDDEN.fullmatch(name))
        if zero:
            raise CheckpointError(
                f"{inner.file(zero[0])}: tensor {zero[0]}: asymmetric quantization is not served; use another version"
            )
        parts = set(self._scale.values())
        parts |= {name + part for name in self._packed for part in ("_packed", "_shape")}
        parts |= {name + part for name in self._mxfp4 for part in ("_blocks", "_scales")}
        self._names = sorted(
            {name for name in stored - parts if not HIDDEN.fullmatch(name)} | self._packed | self._mxfp4
        )

    def names(self) -> list[str]:
        return self._names

    def file(self, name: str) -> pathlib.Path:
        return self._inner.file(self._stored(name))

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._packed:
            return tuple(int(extent) for extent in self._inner.read_stored(name + "_shape"))
        if name in self._mxfp4:
            *lead, rows, blocks, size = self._inner.shape(name + "_blocks")
            return (*lead, blocks * size * 2, rows)
        return self._inner.shape(name)

    def read(self, name: str) -> np.ndarray:
        if name in self._mxfp4:
            return self._read_mxfp4(name)
        if name not in self._scale:
            return self._inner.read(name)  # refuses integers and float8: without a scale they mean nothing
        codes = self._codes(name)
        return _scaled(codes, self._scales(name, codes.shape))

    def release(self, name: str) -> None:
        self._inner.release(self._stored(name))

    def _stored(self, name: str) -> str:
        return name + ("_packed" if name in self._packed else "_blocks" if name in self._mxfp4 else "")

    def _codes(self, name: str) -> np.ndarray:
        if name in self._packed:
            return _unpack(self._inner.read_stored(name + "_packed"), self._bits, self.shape(name))
        kind, stored = self._inner.dtype(name), self._inner.read_stored(name)
        return FLOAT8[kind][stored] if kind in FLOAT8 else stored.astype(np.float32)

    def _scales(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """As many dimensions as the weight has; each divides the weight's, or covers it in blocks of
        ``weight_block_size``."""
        stored = self._scale[name]
        scales = self._inner.read(stored).astype(np.float32)
        if scales.size == 1:
            return scales.reshape((1,) * len(shape))
        if scales.ndim == 1:
            scales = scales[:, None]
        blocks = self._block if stored.endswith("_inv") else None
        if blocks is not None:
            expected = tuple(math.ceil(extent / block) for extent, block in zip(shape, blocks, strict=True))
            if scales.shape != expected:
                self._misfit(stored, scales.shape, f"{list(expected)} for blocks of {blocks}")
            for axis, block in enumerate(blocks):
                scales = np.repeat(scales, block, axis=axis)
            return scales[tuple(slice(extent) for extent in shape)]
        if scales.ndim != len(shape) or any(extent % parts for extent, parts in zip(shape, scales.shape, strict=True)):
            self._misfit(stored, scales.shape, f"what divides {list(shape)}")
        return scales

    def _misfit(self, name: str, found: tuple[int, ...], expected: str) -> None:
        raise CheckpointError(
            f"{self._inner.file(name)}: tensor {name} has shape {list(found)}, its weight needs {expected}; "
            "config and weights are of different models: download both again"
        )

    def _read_mxfp4(self, name: str) -> np.ndarray:
        blocks, exponents = self._inner.read_stored(name + "_blocks"), self._inner.read_stored(name + "_scales")
        if blocks.shape[:-1] != exponents.shape:
            self._misfit(name + "_scales", exponents.shape, f"{list(blocks.shape[:-1])}")
        values = np.empty((*blocks.shape, 2), np.float32)
        values[..., 0], values[..., 1] = FP4[blocks & 15], FP4[blocks >> 4]
        values *= np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)[..., None, None]
        return np.swapaxes(values.reshape(*blocks.shape[:-2], -1), -1, -2)


def _packed_bits(path: pathlib.Path, quantization: dict) -> int:
    """Bits of packed weights; 0 where the method packs none. Refuses methods and formats that cannot be read."""
    method = quantization.get("quant_method")
    if method not in METHODS:
        raise CheckpointError(
            f"{path / 'config.json'}: quant_method is {method!r}; served are {', '.join(METHODS)}: "
            "use another version of the model, or a GGUF"
        )
    if method != "compressed-tensors":
        return 0
    bits = 0
    groups = quantization.get("config_groups") or {}
    for group in groups.values():
        form = group.get("format") or quantization.get("format")
        if form not in FORMATS:
            raise CheckpointError(
                f"{path / 'config.json'}: compressed-tensors format is {form!r}; served are {', '.join(FORMATS)}"
            )
        if form == "pack-quantized":
            if bits not in (0, group["weights"]["num_bits"]) or group["weights"]["num_bits"] not in (4, 8):
                raise CheckpointError(
                    f"{path / 'config.json'}: weights packed with num_bits other than 4 or 8, or with several"
                )
            bits = group["weights"]["num_bits"]
    return bits


def _unpack(packed: np.ndarray, bits: int, shape: tuple[int, ...]) -> np.ndarray:
    """int32 [rows, words] of unsigned codes, low bits first, as float32 ``shape``: code minus half the range."""
    per_word = 32 // bits
    words = packed.view(np.uint32)[..., None] >> (np.arange(per_word, dtype=np.uint32) * bits)
    codes = (words & np.uint32((1 << bits) - 1)).reshape(len(packed), -1)[:, : shape[1]]
    return codes.astype(np.float32) - float(1 << (bits - 1))


def _scaled(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Codes times scales of as many dimensions, each of which divides the codes'."""
    if all(parts in (1, extent) for parts, extent in zip(scales.shape, codes.shape, strict=True)):
        return codes * scales
    split = [size for extent, parts in zip(codes.shape, scales.shape, strict=True) for size in (parts, extent // parts)]
    spread = [size for parts in scales.shape for size in (parts, 1)]
    return (codes.reshape(split) * scales.reshape(spread)).reshape(codes.shape)
