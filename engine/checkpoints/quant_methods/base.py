"""What a quantization method is."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

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
    weights: Callable[[SafetensorsCheckpoint, Mapping[str, Any]], Mapping[str, Weight]]


def misfit(stored: SafetensorsCheckpoint, name: str, found: tuple[int, ...], expected: str) -> CheckpointError:
    """A part whose shape does not fit its weight's."""
    return CheckpointError(
        f"{stored.file(name)}: tensor {name} has shape {list(found)}, its weight needs {expected}; "
        "config and weights are of different models: download both again"
    )
