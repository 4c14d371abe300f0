"""What a quantization method is."""

from __future__ import annotations

import abc
import dataclasses
import pathlib
from collections.abc import Callable, Mapping

import numpy as np

from engine.checkpoints.errors import CheckpointError
from engine.checkpoints.safetensors import SafetensorsCheckpoint


class Weight(abc.ABC):
    """A weight made of several stored tensors."""

    @property
    @abc.abstractmethod
    def parts(self) -> tuple[str, ...]:
        """Names of the stored tensors, none of which is shown; the first holds the codes, and is named in messages."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """As Hugging Face has it, dequantized."""

    @abc.abstractmethod
    def read(self) -> np.ndarray:
        """The values, float32. Raises `CheckpointError` where the parts do not fit each other."""


@dataclasses.dataclass(frozen=True)
class QuantMethod:
    """One ``quant_method``.

    ``weights`` takes the stored tensors and the ``quantization_config``, and returns the quantized weights by the names
    they are shown by; tensors that are no part of any are shown as they are. It raises `CheckpointError` for what it
    cannot read, naming the field or tensor.
    """

    name: str  # in config.json
    weights: Callable[[SafetensorsCheckpoint, Mapping[str, object]], Mapping[str, Weight]]


def an_object(path: pathlib.Path, name: str, value: object) -> Mapping[str, object]:
    """An object within ``quantization_config``; empty where it is absent. Raises `CheckpointError` for anything else."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{path / 'config.json'}: {name} of quantization_config is {value!r}; an object is needed")
    return value


def block_size(path: pathlib.Path, quantization: Mapping[str, object]) -> tuple[int, ...] | None:
    """``weight_block_size``: rows and columns that have a scale together. Raises `CheckpointError` for anything but two numbers."""
    value = quantization.get("weight_block_size")
    if value is None:
        return None
    sizes = [size for size in value if type(size) is int and size > 0] if isinstance(value, list) else []
    if not isinstance(value, list) or not len(value) == len(sizes) == 2:
        raise CheckpointError(f"{path / 'config.json'}: weight_block_size is {value!r}; two positive integers are needed")
    return tuple(sizes)


def misfit(stored: SafetensorsCheckpoint, name: str, found: tuple[int, ...], expected: str) -> CheckpointError:
    """A part whose shape does not fit its weight's."""
    return CheckpointError(
        f"{stored.file(name)}: tensor {name} has shape {list(found)}, its weight needs {expected}; "
        "config and weights are of different models: download both again"
    )
