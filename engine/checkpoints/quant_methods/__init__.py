"""How quantized safetensors are read: one module for each ``quant_method`` of config.json, or for several that are alike.

A method is a `QuantMethod` at the top of a module of this package; it is found here, so that nothing else has to list it.
It tells which weights the stored tensors make, each a `Weight`; `engine.checkpoints.quantized` shows those in place of
their parts. ``scales.py`` is what most methods share: a value is its code times a scale.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from engine.checkpoints.errors import CheckpointError
from engine.checkpoints.quant_methods.base import QuantMethod, Weight
from engine.discovery import declared, unique

__all__ = ["METHODS", "QuantMethod", "Weight", "find_method"]

METHODS = unique(declared(__name__, QuantMethod), "name")


def find_method(path: pathlib.Path, quantization: Mapping[str, object]) -> QuantMethod:
    """The method of a ``quantization_config``. Raises `CheckpointError` with the names that are served."""
    name = quantization.get("quant_method")
    for method in METHODS:
        if method.name == name:
            return method
    raise CheckpointError(
        f"{path / 'config.json'}: quant_method is {name!r}; served are {', '.join(method.name for method in METHODS)}: "
        "use another version of the model, or a GGUF"
    )
