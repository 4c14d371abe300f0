"""Which tensors of a checkpoint make each array of the weights, and where in it they lie.

A `Fill` writes any parts of one array, each to a place of its own: a device's part is read without the rest. Tensors of plain
files are views of mapped files, of which only what is copied is read; tensors that have to be dequantized are made whole, once for
all parts.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence

import jax
import numpy as np

from engine.agreement import embedding
from engine.checkpoints import Checkpoint
from engine.config import ModelConfig
from engine.families import Family, TensorNames
from engine.peft import Adapter, adapter_fills
from engine.quantization import Array, Quantized, quantize
from engine.weights import LayerWeights, Weights

BLOCK = 32 * 2**20  # bytes of a file that are copied before they are released

Where = tuple[slice, ...]  # a part of an array: from, to, of each dimension
Part = tuple[Where, Array]  # and where it is written; of what is quantized, a `Quantized`
Fill = Callable[[Sequence[Part]], None]  # writes parts of one array of the tree
View = Callable[[np.ndarray, Where], np.ndarray]  # what of a tensor is a part of the array


@dataclasses.dataclass(frozen=True)
class Read:
    """A tensor of the checkpoint, yet to be read."""

    values: Callable[[], np.ndarray]
    release: Callable[[], None]  # its pages, as far as they have been touched
    count: Callable[[int], None] = lambda size: None  # told the bytes that are copied

    def of(self, values: np.ndarray) -> Read:
        """The same with these values, which have been read."""
        return dataclasses.replace(self, values=lambda: values)

    def copy(self, out: np.ndarray, view: np.ndarray) -> None:
        """Copies a view of its values, block by block."""
        self.count(view.nbytes)
        rows = max(1, BLOCK * len(view) // max(1, view.nbytes))
        for begin in range(0, len(view), rows):
            np.copyto(out[begin : begin + rows], view[begin : begin + rows], casting="unsafe")
            self.release()

    def fill(self, parts: Sequence[Part], view: View) -> None:
        """Fills parts of one array; its values are made once."""
        values = self.values()
        for where, out in parts:
            self.copy(out, view(values, where))


class Reader:
    """Reads tensors by name, and remembers which are used and in which shapes, so that they can be checked first."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self.available = set(checkpoint.names())
        self.expected: dict[str, tuple[int, ...]] = {}
        self.zeros: list[str] = []  # biases that are not there
        self.copied = 0  # bytes, as the checkpoint shows them
        self._lock = threading.Lock()

    def tensor(self, name: str, *shape: int) -> Read:
        """What reads the tensor; the shape is what the config promises."""
        self.expected[name] = shape
        return Read(lambda: self.checkpoint.read(name), lambda: self.checkpoint.release(name), self._count)

    def _count(self, size: int) -> None:
        with self._lock:
            self.copied += size

    def bias(self, name: str, *shape: int) -> Read:
        """As `tensor`, of a linear map's bias: zeros if the checkpoint has none."""
        if name in self.available:
            return self.tensor(name, *shape)
        self.zeros.append(name)
        return Read(lambda: np.zeros(shape, np.float32), lambda: None)


def _copy(read: Read, shape: Sequence[int], offset: float = 0.0) -> Fill:
    """A whole array of this shape is one tensor, ``offset`` added in float32."""

    def view(values: np.ndarray, where: Where) -> np.ndarray:
        values = values.reshape(shape)[where]
        return values.astype(np.float32) + np.float32(offset) if offset else values

    return lambda parts: read.fill(parts, view)


def _stack(fills: Sequence[Fill]) -> Fill:
    """The leading dimension has one entry for each."""

    def fill(parts: Sequence[Part]) -> None:
        for index, one in enumerate(fills):
            inside = [
                (where[1:], out[index - where[0].start]) for where, out in parts if where[0].start <= index < where[0].stop
            ]
            if inside:
                one(inside)

    return fill


def _quantized(fill: Fill, row: int) -> Fill:
    """Fills `Quantized` parts of an array with rows of ``row`` numbers. What is quantized at once is held in float32."""

    def quantize_rows(parts: Sequence[tuple[Where, Quantized]]) -> None:
        whole_rows: list[Part] = []
        for where, _ in parts:
            rows = where[:-1]
            if all(known[:-1] != rows for known, _ in whole_rows):
                shape = [part.stop - part.start for part in rows]
                whole_rows.append(((*rows, slice(0, row)), np.empty([*shape, row], np.float32)))
        fill(whole_rows)
        for whole, values in whole_rows:
            made = quantize(values, np)
            for where, out in parts:
                if where[:-1] == whole[:-1]:
                    np.copyto(out.values, made.values[..., where[-1]])
                    np.copyto(out.scale, made.scale)

    return quantize_rows


def _fuse_qkv(q: Read, k: Read, v: Read, kv_heads: int, shape: Sequence[int]) -> Fill:
    """Fills [stored kv_heads, queries_per_kv + 2, head_dim, ...] from q [heads * head_dim, ...] and k, v [kv_heads * head_dim, ...]: a
    stored head is a copy of a head, with its share of the query heads (`engine.sharding.stored_model`)."""
    stored, rows, *rest = shape
    copies = stored // kv_heads

    def fill(parts: Sequence[Part]) -> None:
        q.fill([((where[0], *where[2:]), out[:, :-2]) for where, out in parts], queries)
        for place, read in ((-2, k), (-1, v)):
            read.fill([((slice(head, head + 1), *where[2:]), out[at : at + 1, place])
                       for where, out in parts for at, head in enumerate(range(where[0].start, where[0].stop))], keys)  # fmt: skip

    def queries(values: np.ndarray, where: Where) -> np.ndarray:
        return values.reshape(stored, rows - 2, *rest)[where[0], :, *where[1:]]

    def keys(values: np.ndarray, where: Where) -> np.ndarray:
        head = where[0].start // copies
        return values.reshape(kv_heads, *rest)[head : head + 1, *where[1:]]

    return fill


def _parts_of(read: Read, sizes: Sequence[int], fuse: Callable[..., Fill]) -> Fill:
    """One tensor whose rows are several modules' one after the other. It is read once."""

    def fill(parts: Sequence[Part]) -> None:
        pieces = np.split(read.values(), np.cumsum(sizes)[:-1])
        fuse(*[read.of(piece) for piece in pieces])(parts)

    return fill


def _by_turns(read: Read) -> Fill:
    """Fills [experts, 2, ffn, ...] from [experts, ..., 2 * ffn], gate and up by turns."""

    def fill(parts: Sequence[Part]) -> None:
        both = read.of(read.values())  # read, and perhaps dequantized, once
        for turn in (0, 1):

            def view(stored: np.ndarray, where: Where, turn: int = turn) -> np.ndarray:
                return np.moveaxis(stored[..., turn::2], -1, 1)[where]

            both.fill([((where[0], *where[2:]), out[:, turn]) for where, out in parts], view)

    return fill


def _transposed(read: Read) -> Fill:
    """Fills [experts, out, ...] from [experts, ..., out]."""
    return lambda parts: read.fill(parts, lambda stored, where: np.moveaxis(stored, -1, 1)[where])


def _whole(fill: Callable[[np.ndarray], None], shape: Sequence[int]) -> Fill:
    """Of an array that is made as a whole."""

    def fill_parts(parts: Sequence[Part]) -> None:
        whole = np.empty(shape, np.float32)
        fill(whole)
        for where, out in parts:
            np.copyto(out, whole[where], casting="unsafe")

    return fill_parts


def weight_fills(
    reader: Reader, family: Family, model: ModelConfig, abstract: Weights, adapters: Sequence[Adapter]
) -> Weights:
    """A tree like the abstract one that holds what fills each array."""
    names, hidden = family.tensors, model.hidden_size
    first, groups = 0, []
    for group in abstract.layers:
        fields = {field for field, leaf in vars(group).items() if leaf is not None} - {"adapters"}
        layers = range(first, first := first + group.qkv.shape[0])
        per_layer = [_LayerFills(reader, names, model, layer, group).fields(fields) for layer in layers]
        low_rank = None
        if group.adapters is not None:
            low_rank = jax.tree.map(
                lambda fill, leaf: _whole(fill, leaf.shape), adapter_fills(adapters, group.adapters, layers), group.adapters
            )
        stacks = {field: _stack([fills[field] for fills in per_layer]) for field in fields}
        groups.append(LayerWeights(**stacks, adapters=low_rank))
    if first != model.num_layers:
        raise ValueError(f"the abstract weights hold {first} layers, the model has {model.num_layers}")
    return Weights(
        embed=_copy(reader.tensor(embedding(model, reader.available), model.vocab_size, hidden), abstract.embed.shape),
        layers=tuple(groups),
        final_norm=_copy(reader.tensor(names.final_norm, hidden), abstract.final_norm.shape, model.norm_offset),
        head=None
        if abstract.head is None
        else _copy(reader.tensor(names.head, model.vocab_size, hidden), abstract.head.shape),
    )


class _LayerFills:
    """What fills each field of `LayerWeights` for one layer, without the leading dimension."""

    def __init__(self, reader: Reader, names: TensorNames, model: ModelConfig, layer: int, group: LayerWeights):
        self.reader, self.names, self.model, self.layer, self.group = reader, names, model, layer, group
        self.experts = 0 if model.moe is None else model.moe.experts
        self.q_rows, self.kv_rows = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim

    def fields(self, wanted: set[str]) -> dict[str, Fill]:
        """Those that the model has."""
        return {field: getattr(self, field)() for field in wanted}

    def shape(self, field: str) -> tuple[int, ...]:
        """Of one layer."""
        whole: tuple[int, ...] = getattr(self.group, field).shape
        return whole[1:]

    def matrix(self, field: str, fill: Fill) -> Fill:
        """Quantizes what is filled where the engine has it so: one tensor's rows at once."""
        quantizes = isinstance(getattr(self.group, field), Quantized)
        return _quantized(fill, self.shape(field)[-1]) if quantizes else fill

    def tensor(self, name: str, *shape: int, **place: int) -> Read:
        return self.reader.tensor(name.format(layer=self.layer, **place), *shape)

    def module(self, name: str, suffix: str, *shape: int, **place: int) -> Read:
        """The ``.weight`` or ``.bias`` of a linear map."""
        read = self.reader.bias if suffix == ".bias" else self.reader.tensor
        return read(name.format(layer=self.layer, **place) + suffix, *shape)

    def norm(self, field: str, *shape: int) -> Fill:
        return _copy(self.tensor(getattr(self.names, field), *shape), self.shape(field), self.model.norm_offset)

    def attention_norm(self) -> Fill:
        return self.norm("attention_norm", self.model.hidden_size)

    def attention_post_norm(self) -> Fill:
        return self.norm("attention_post_norm", self.model.hidden_size)

    def mlp_norm(self) -> Fill:
        return self.norm("mlp_norm", self.model.hidden_size)

    def mlp_post_norm(self) -> Fill:
        return self.norm("mlp_post_norm", self.model.hidden_size)

    def q_norm(self) -> Fill:
        return self.norm("q_norm", self.model.head_dim if self.model.qk_norm == "head" else self.q_rows)

    def k_norm(self) -> Fill:
        if self.model.qk_norm == "head":
            return self.norm("k_norm", self.model.head_dim)
        stored, head_dim = self.shape("k_norm")
        read, copies = self.tensor(self.names.k_norm, self.kv_rows), stored // self.model.num_kv_heads
        heads = dataclasses.replace(read, values=lambda: read.values().reshape(-1, head_dim).repeat(copies, axis=0))
        return _copy(heads, (stored, head_dim), self.model.norm_offset)

    def sinks(self) -> Fill:
        return _copy(self.tensor(self.names.sinks, self.model.num_heads), self.shape("sinks"))

    def qkv(self) -> Fill:
        return self.matrix("qkv", self._qkv("qkv", ".weight", self.model.hidden_size))

    def qkv_bias(self) -> Fill:
        return self._qkv("qkv_bias", ".bias")

    def _qkv(self, field: str, suffix: str, *columns: int) -> Fill:
        names, sizes = self.names, (self.q_rows, self.kv_rows, self.kv_rows)
        fuse = functools.partial(_fuse_qkv, kv_heads=self.model.num_kv_heads, shape=self.shape(field))
        if names.qkv is not None:
            return _parts_of(self.module(names.qkv, suffix, sum(sizes), *columns), sizes, fuse)
        modules = zip((names.q, names.k, names.v), sizes, strict=True)
        return fuse(*[self.module(module, suffix, size, *columns) for module, size in modules])

    def o(self) -> Fill:
        shape = (self.model.hidden_size, self.q_rows)
        return self.matrix("o", _copy(self.module(self.names.o, ".weight", *shape), shape))

    def o_bias(self) -> Fill:
        shape = (self.model.hidden_size,)
        return _copy(self.module(self.names.o, ".bias", *shape), shape)

    def gate_up(self) -> Fill:
        return self._gate_up("gate_up", ".weight", self.model.hidden_size)

    def gate_up_bias(self) -> Fill:
        return self._gate_up("gate_up_bias", ".bias")

    def _gate_up(self, field: str, suffix: str, *columns: int) -> Fill:
        names, ffn = self.names, self.model.intermediate_size

        def fuse(gate: Read, up: Read) -> Fill:
            return self.matrix(field, _stack([_copy(part, (ffn, *columns)) for part in (gate, up)]))

        if names.experts is not None:
            return self.matrix(field, _by_turns(self._all_experts("gate_up_proj", suffix, *columns, 2 * ffn)))
        if self.model.moe is not None:
            return self._experts(
                lambda expert: fuse(
                    self.module(names.expert_gate, suffix, ffn, *columns, expert=expert),
                    self.module(names.expert_up, suffix, ffn, *columns, expert=expert),
                )
            )
        if names.gate_up is not None:
            return _parts_of(self.module(names.gate_up, suffix, 2 * ffn, *columns), (ffn, ffn), fuse)
        return fuse(*[self.module(name, suffix, ffn, *columns) for name in (names.gate, names.up)])

    def down(self) -> Fill:
        return self._down("down", ".weight", self.model.intermediate_size)

    def down_bias(self) -> Fill:
        return self._down("down_bias", ".bias")

    def _down(self, field: str, suffix: str, *columns: int) -> Fill:
        names, shape = self.names, (self.model.hidden_size, *columns)
        if names.experts is not None:
            return self.matrix(field, _transposed(self._all_experts("down_proj", suffix, *columns, shape[0])))
        if self.model.moe is None:
            return self.matrix(field, _copy(self.module(names.down, suffix, *shape), shape))
        return self._experts(
            lambda expert: self.matrix(field, _copy(self.module(names.expert_down, suffix, *shape, expert=expert), shape))
        )

    def _all_experts(self, module: str, suffix: str, *shape: int) -> Read:
        name = f"{self.names.experts}.{module}" + suffix.replace(".weight", "").replace(".", "_")
        return self.tensor(name, self.experts, *shape)

    def _experts(self, fill: Callable[[int], Fill]) -> Fill:
        return _stack([fill(expert) for expert in range(self.experts)])

    def router(self) -> Fill:
        shape = (self.experts, self.model.hidden_size)
        return _copy(self.tensor(self.names.router + ".weight", *shape), shape)

    def router_bias(self) -> Fill:
        shape = (self.experts,)
        return _copy(self.tensor(self.names.router + ".bias", *shape), shape)
