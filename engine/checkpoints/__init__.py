"""Where weights come from: files of several formats, all shown alike.

A `Checkpoint` shows Hugging Face tensor names, Hugging Face row order and a Hugging Face style ``config.json``
dictionary, whatever the file is, so that families (``engine/families``) and the loader (``engine/loader.py``) know one
spelling only. Opening reads headers; a tensor's bytes are read when `read` asks for them, from memory-mapped files.
"""

from __future__ import annotations

import os
import pathlib
from typing import Protocol

import numpy as np

from engine.checkpoints.errors import CheckpointError
from engine.checkpoints.gguf import GgufCheckpoint
from engine.checkpoints.quantized import QuantizedCheckpoint
from engine.checkpoints.safetensors import SafetensorsCheckpoint, read_config
from engine.config import HfConfig

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "GgufCheckpoint",
    "QuantizedCheckpoint",
    "SafetensorsCheckpoint",
    "open_checkpoint",
    "read_config",
]


class Checkpoint(Protocol):
    """An opened model. All methods may be called from several threads at once."""

    path: pathlib.Path
    hf_config: HfConfig  # as config.json has it
    dequantizes: bool  # reading takes more than copying
    # A tensor of no use is an error: the format's own reader has it so, or nothing says that the files belong together.
    strict: bool

    def names(self) -> list[str]:
        """Hugging Face names of all tensors, sorted."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, in Hugging Face's order ([out, in] for matrices)."""

    def file(self, name: str) -> pathlib.Path:
        """The file that holds a tensor, for messages."""

    def read(self, name: str) -> np.ndarray:
        """A tensor, dequantized where it is quantized: float32, float16 or bfloat16 (``ml_dtypes``).

        The array may be a read-only view of a memory-mapped file.
        """

    def release(self, name: str) -> None:
        """What was read of a tensor need not stay in memory; arrays of it remain valid and are read again if used."""


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a ``.gguf`` file, or a directory with ``config.json`` and ``*.safetensors``.

    Raises `CheckpointError`, whose message names the file or tensor at fault and the remedy.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        checkpoint = SafetensorsCheckpoint(path)
        return QuantizedCheckpoint(checkpoint) if checkpoint.hf_config.get("quantization_config") else checkpoint
    if path.suffix.lower() == ".gguf":
        return GgufCheckpoint(path)
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist; give a directory with config.json and *.safetensors, or a .gguf file"
        )
    raise CheckpointError(f"{path} is neither a directory nor a .gguf file; give one of the two")
