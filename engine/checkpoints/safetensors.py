"""Hugging Face checkpoints: a directory with ``config.json`` and one or more ``*.safetensors`` files.

A safetensors file is an 8-byte little-endian header length, a JSON header ``{name: {dtype, shape, data_offsets}}``, and
the tensors' bytes. The header is read here rather than by the ``safetensors`` library because its errors name neither
the file nor the tensor, and because numpy has no bfloat16 of its own; tensors are views of the memory-mapped file.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import pathlib

import ml_dtypes
import numpy as np

from engine.checkpoints.errors import CheckpointError
from engine.checkpoints.mapped import release_pages
from engine.config import HfConfig

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER = 100_000_000  # bytes; the format's own limit

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# Read so that a header with such a tensor can be checked; a weight of these types is refused by name when it is read.
# `QuantizedCheckpoint` knows what they mean beside their scales.
STORED: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E5M2": np.dtype(np.uint8),
    "F8_E8M0": np.dtype(np.uint8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of a file: where its bytes lie, as offsets into the whole file."""

    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsCheckpoint:
    """A directory in Hugging Face's layout. See `engine.checkpoints.Checkpoint`."""

    dequantizes = False

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.hf_config = read_config(path)
        self._entries: dict[str, Entry] = {}
        self._maps: dict[pathlib.Path, mmap.mmap] = {}
        shards, placed = find_shards(path)
        self.strict = len(shards) > 1 and not placed
        for shard in shards:
            self._maps[shard], entries = read_header(shard)
            for name, entry in entries.items():
                if name in self._entries:
                    raise CheckpointError(
                        f"tensor {name} is in both {self._entries[name].file} and {shard}; "
                        "remove the files that do not belong to this model"
                    )
                self._entries[name] = entry
        for name, shard in placed.items():
            if name not in self._entries or self._entries[name].file != shard:
                found = f"it is in {self._entries[name].file.name}" if name in self._entries else "no shard has it"
                raise CheckpointError(
                    f"{path / INDEX} places tensor {name} in {shard.name}, but {found}; "
                    "the index and the shards are of different versions: download the model again"
                )

    def names(self) -> list[str]:
        return sorted(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def file(self, name: str) -> pathlib.Path:
        return self._entry(name).file

    def read(self, name: str) -> np.ndarray:
        entry = self._entry(name)
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise CheckpointError(
                f"{entry.file}: tensor {name} has dtype {entry.dtype}; weights of {', '.join(DTYPES)} can be loaded: "
                "use an unquantized version of the model, or a GGUF"
            )
        count = math.prod(entry.shape)
        return np.frombuffer(self._maps[entry.file], dtype, count, entry.begin).reshape(entry.shape)

    def release(self, name: str) -> None:
        entry = self._entry(name)
        release_pages(self._maps[entry.file], entry.begin, entry.end)

    def dtype(self, name: str) -> str:
        """As the header spells it."""
        return self._entry(name).dtype

    def read_stored(self, name: str) -> np.ndarray:
        """A tensor of any type as it is stored; float8 as its bytes."""
        entry = self._entry(name)
        dtype = DTYPES.get(entry.dtype) or STORED[entry.dtype]
        return np.frombuffer(self._maps[entry.file], dtype, math.prod(entry.shape), entry.begin).reshape(entry.shape)

    def _entry(self, name: str) -> Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise CheckpointError(f"{self.path} has no tensor {name}") from None


def read_config(path: pathlib.Path) -> HfConfig:
    """The directory's ``config.json``."""
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{file} does not exist; a model directory has config.json, *.safetensors and a tokenizer"
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}); download it again") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} holds {type(config).__name__} where an object is expected; download it again")
    return config


def find_shards(path: pathlib.Path) -> tuple[list[pathlib.Path], dict[str, pathlib.Path]]:
    """The files to read, and where the index (if there is one) places each tensor.

    Without an index every ``*.safetensors`` of the directory belongs to the model; with ``model.safetensors`` only that
    one.
    """
    index = path / INDEX
    if index.exists():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            placed = {name: path / file for name, file in weight_map.items()}
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is not an index of shards ({error!r}); download it again") from None
        shards = sorted(set(placed.values()))
        for shard in shards:
            if shard.parent != path:
                raise CheckpointError(f"{index} names {shard}, which is outside {path}; download the index again")
            if not shard.exists():
                tensor = next(name for name, file in placed.items() if file == shard)
                raise CheckpointError(
                    f"{shard} is missing: {index.name} places tensor {tensor} and others in it; download that file"
                )
        return shards, placed
    if (path / SINGLE).exists():
        return [path / SINGLE], {}
    shards = sorted(path.glob("*.safetensors"))
    if not shards:
        raise CheckpointError(
            f"{path} has no *.safetensors file; convert the model to safetensors, or give a .gguf file"
        )
    return shards, {}


def read_header(file: pathlib.Path) -> tuple[mmap.mmap, dict[str, Entry]]:
    """Maps a file and checks that every tensor of its header lies inside it with the right size."""
    with file.open("rb") as stream:
        size = file.stat().st_size
        if size < 8:
            raise CheckpointError(f"{file} is truncated: {size} bytes hold no safetensors header; download it again")
        data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER:
        raise CheckpointError(
            f"{file} is not a safetensors file (its header would take {length} bytes); download it again"
        )
    start = 8 + length
    if start > size:
        raise CheckpointError(
            f"{file} is truncated: its header takes {start} bytes, the file has {size}; download it again"
        )
    try:
        header = json.loads(data[8:start])
        header.pop("__metadata__", None)
        entries = {
            name: Entry(file, info["dtype"], tuple(info["shape"]), *(start + offset for offset in info["data_offsets"]))
            for name, info in header.items()
        }
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} has a damaged safetensors header ({error!r}); download it again") from None
    for name, entry in entries.items():
        check_entry(name, entry, size)
    return data, entries


def check_entry(name: str, entry: Entry, size: int) -> None:
    """Raises where a tensor's bytes are not inside the file, or are not what its shape and dtype need."""
    known = DTYPES.get(entry.dtype) or STORED.get(entry.dtype)
    if known is None:
        raise CheckpointError(
            f"{entry.file}: tensor {name} has dtype {entry.dtype}, which is not known; use a float version"
        )
    if any(not isinstance(extent, int) or extent < 0 for extent in entry.shape):
        raise CheckpointError(f"{entry.file}: tensor {name} has shape {list(entry.shape)}; download the file again")
    needed = math.prod(entry.shape) * known.itemsize
    if entry.end - entry.begin != needed:
        raise CheckpointError(
            f"{entry.file}: tensor {name} has {entry.end - entry.begin} bytes where shape "
            f"{list(entry.shape)} of {entry.dtype} "
            f"needs {needed}; download the file again"
        )
    if entry.end > size:
        raise CheckpointError(
            f"{entry.file} is truncated: tensor {name} ends at byte {entry.end}, the file has {size}; download it again"
        )
