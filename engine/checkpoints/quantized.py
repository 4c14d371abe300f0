"""Quantized safetensors, shown dequantized.

``quantization_config`` of config.json says how they are stored (``quant_method``); each method is a module of
``engine/checkpoints/quant_methods``. What is no part of a quantized weight is shown as it is.

Scales of activations and of cached keys and values (``input_scale``, ``k_scale``, ...) belong to arithmetic that is not
done here, and are not shown."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping

import numpy as np

from engine.checkpoints.errors import CheckpointError
from engine.checkpoints.quant_methods import find_method
from engine.checkpoints.safetensors import SafetensorsCheckpoint

HIDDEN = re.compile(r".*\.(input_scale|input_zero_point|[kvq]_scale|weight_g_idx|activation_scale|input_scale_ub)")


class QuantizedCheckpoint:
    """A quantized directory. See `engine.checkpoints.Checkpoint`. Raises `CheckpointError` for layouts that cannot be
    read."""

    dequantizes = True

    def __init__(self, inner: SafetensorsCheckpoint):
        self.path, self.strict = inner.path, inner.strict
        self._inner = inner
        quantization = inner.hf_config["quantization_config"]
        if not isinstance(quantization, Mapping):
            raise CheckpointError(f"{inner.path / 'config.json'}: quantization_config is {quantization!r}; an object is needed")
        self.hf_config = {name: value for name, value in inner.hf_config.items() if name != "quantization_config"}
        self._weights = find_method(inner.path, quantization).weights(inner, quantization)
        parts = {part for weight in self._weights.values() for part in weight.parts}
        plain = {name for name in inner.names() if name not in parts and not HIDDEN.fullmatch(name)}
        self._names = sorted(plain | self._weights.keys())

    def names(self) -> list[str]:
        return self._names

    def file(self, name: str) -> pathlib.Path:
        return self._inner.file(self._stored(name))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights[name].shape if name in self._weights else self._inner.shape(name)

    def read(self, name: str) -> np.ndarray:
        # Integers and float8 that are no part of a weight are refused: without a scale they mean nothing.
        return self._weights[name].read() if name in self._weights else self._inner.read(name)

    def release(self, name: str) -> None:
        self._inner.release(self._stored(name))

    def _stored(self, name: str) -> str:
        return self._weights[name].parts[0] if name in self._weights else name
