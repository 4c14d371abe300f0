"""The GGUF container: metadata and where each tensor's bytes lie (ggml's ``docs/gguf.md``, versions 2 and 3).

The ``gguf`` package's own reader makes a numpy view of every string of the vocabulary, which takes seconds at each
start; this one walks the header once in well under a tenth of that, and decodes arrays only when they are asked for.
Type numbers, block sizes and dequantizing come from the package.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import pathlib
import struct
from typing import Any

import gguf
import numpy as np

from engine.checkpoints.errors import CheckpointError

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of the file. ``shape`` is in numpy's order (GGUF stores it reversed)."""

    name: str
    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType
    offset: int  # from the start of the file
    size: int  # bytes


@dataclasses.dataclass(frozen=True)
class LazyArray:
    """An array of the metadata, not decoded yet."""

    type: int
    count: int
    offset: int


class GgufFile:
    """A memory-mapped GGUF. ``tensors`` maps GGUF names to `Tensor`; metadata is read by `get`."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        try:
            with path.open("rb") as stream:
                self.data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist; give the path of a .gguf file") from None
        except ValueError:  # mmap of an empty file
            raise CheckpointError(f"{path} is empty; download it again") from None
        self._position = 0
        try:
            self._read_header()
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{path} is truncated or damaged in its header ({error}); download it again"
            ) from None
        end = max(self.tensors.values(), key=lambda tensor: tensor.offset + tensor.size, default=None)
        if end is not None and end.offset + end.size > len(self.data):
            raise CheckpointError(
                f"{path} is truncated: tensor {end.name} ends at byte {end.offset + end.size}, "
                f"the file has {len(self.data)}; "
                "download it again"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value; arrays become lists (of str) or numpy arrays (of numbers)."""
        value = self._metadata.get(key, default)
        return self._array(value) if isinstance(value, LazyArray) else value

    def require(self, key: str) -> Any:
        """A metadata value that must be there."""
        if key not in self._metadata:
            raise CheckpointError(
                f"{self.path} has no metadata {key}; convert the model again with a current converter"
            )
        return self.get(key)

    def keys(self) -> list[str]:
        return list(self._metadata)

    def raw(self, name: str) -> np.ndarray:
        """A tensor's bytes as stored, uint8, one row per row of the tensor: [rows, bytes per row]."""
        tensor = self.tensors[name]
        data = np.frombuffer(self.data, np.uint8, tensor.size, tensor.offset)
        return data.reshape(math.prod(tensor.shape[:-1]), -1)

    def _read_header(self) -> None:
        magic, version = self._unpack("4sI")
        if magic != b"GGUF":
            raise CheckpointError(f"{self.path} is not a GGUF file (it starts with {magic!r}); give another file")
        if version not in (2, 3):
            raise CheckpointError(
                f"{self.path} is GGUF version {version}; versions 2 and 3 (little-endian) can be read"
            )
        tensor_count, metadata_count = self._unpack("QQ")
        self._metadata: dict[str, Any] = {}
        for _ in range(metadata_count):
            key = self._string()
            (kind,) = self._unpack("I")
            self._metadata[key] = self._value(kind)
        infos = []
        for _ in range(tensor_count):
            name = self._string()
            (dimensions,) = self._unpack("I")
            shape = tuple(reversed(self._unpack(f"{dimensions}Q")))
            kind, offset = self._unpack("IQ")
            infos.append((name, shape, kind, offset))
        alignment = self._metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self.path}: general.alignment is {alignment!r}, not a positive number; download it again")
        start = -(-self._position // alignment) * alignment
        self.tensors = {name: self._tensor(name, shape, kind, start + offset) for name, shape, kind, offset in infos}

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> Tensor:
        try:
            quantization = gguf.GGMLQuantizationType(kind)
        except ValueError:
            raise CheckpointError(
                f"{self.path}: tensor {name} has the unknown type {kind}; use another quantization"
            ) from None
        block, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
        if not shape or shape[-1] % block:
            raise CheckpointError(f"{self.path}: tensor {name} has shape {list(shape)}, not whole blocks of {block}")
        return Tensor(name, shape, quantization, offset, math.prod(shape) // block * block_bytes)

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self.data, self._position)
        self._position += struct.calcsize("<" + layout)
        return values

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        begin = self._position
        if length > len(self.data) - begin:
            raise IndexError(f"a string of {length} bytes at byte {begin}")
        self._position = begin + length
        return self.data[begin : begin + length].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._scalar(kind)
        inner, count = self._unpack("IQ")
        array = LazyArray(inner, count, self._position)
        if inner == STRING:
            position, data, length_of = self._position, self.data, struct.Struct("<Q").unpack_from
            for _ in range(count):
                position += 8 + length_of(data, position)[0]
            self._position = position
        elif inner in SCALARS:
            self._position += count * struct.calcsize(SCALARS[inner])
        else:
            raise CheckpointError(f"{self.path} has metadata arrays of type {inner}, which cannot be read")
        if self._position > len(self.data):
            raise IndexError(f"an array of {count} entries at byte {array.offset}")
        return array

    def _scalar(self, kind: int) -> Any:
        if kind not in SCALARS:
            raise CheckpointError(f"{self.path} has metadata of the unknown type {kind}; convert the model again")
        return self._unpack(SCALARS[kind])[0]

    def _array(self, array: LazyArray) -> Any:
        if array.type != STRING:
            dtype = np.dtype("<" + SCALARS[array.type])
            return np.frombuffer(self.data, dtype, array.count, array.offset)
        strings, position, data, length_of = [], array.offset, self.data, struct.Struct("<Q").unpack_from
        for _ in range(array.count):
            begin = position + 8
            position = begin + length_of(data, position)[0]
            strings.append(data[begin:position].decode("utf-8", errors="surrogateescape"))
        return strings
