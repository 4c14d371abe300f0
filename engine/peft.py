"""LoRA adapters as Hugging Face PEFT saves them: ``adapter_config.json`` and ``adapter_model.safetensors`` in a directory.

`open_adapter` reads the configuration and the header and checks both against the model, so that an adapter that does not fit is an
error before anything is compiled. `adapter_layout` says how much room all of them need, which is part of the engine's
configuration; `adapter_fills` says how they fill the arrays of `engine.adapters`. What an adapter is scaled by (alpha / rank, or
alpha / sqrt(rank) for rank-stabilized ones, arXiv:2312.03732) goes into its B here.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import mmap
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from engine.adapters import Adapters, LowRank
from engine.checkpoints import CheckpointError
from engine.checkpoints.safetensors import DTYPES, Entry, read_header
from engine.config import ADAPTER_MAPS, AdapterLayout, ModelConfig
from engine.families import get_family

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every tensor: PEFT's wrapper
RANK_MULTIPLE = 8  # ranks are padded to it, so that adapters of similar ranks have the same programs

Fill = Callable[[np.ndarray], None]

# Fields that say nothing about the result. Any other that is set is refused.
_IRRELEVANT = {
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
}  # fmt: skip
_UNDERSTOOD = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"}
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")  # of training; others change the base model's weights too


@dataclasses.dataclass(frozen=True)
class _Target:
    """A linear module of the checkpoint as the engine has it: parts of a map, one after the other in the module's rows."""

    map: str  # of ADAPTER_MAPS
    parts: tuple[int, ...]
    rows: tuple[int, ...]  # of each part
    columns: int


@dataclasses.dataclass(frozen=True)
class _Module:
    """What an adapter does to one module of one layer."""

    target: _Target
    a: str  # tensor names
    b: str
    rank: int
    scale: float


@dataclasses.dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter that fits the model; its weights are read when they are asked for."""

    name: str  # what requests call it
    path: pathlib.Path
    base: str  # the model it was made for, as its configuration calls it; may be empty
    modules: Mapping[int, tuple[_Module, ...]]  # by layer
    _file: _File

    @property
    def files(self) -> tuple[pathlib.Path, ...]:
        """What it is read from."""
        return self.path / CONFIG, self.path / WEIGHTS

    @property
    def rank(self) -> int:
        """The largest of its modules."""
        return max(module.rank for modules in self.modules.values() for module in modules)

    @property
    def maps(self) -> set[str]:
        """The maps it changes."""
        return {module.target.map for modules in self.modules.values() for module in modules}

    def of(self, layer: int, map: str) -> list[_Module]:
        """What it does to one map of one layer."""
        return [module for module in self.modules.get(layer, ()) if module.target.map == map]

    def read(self, tensor: str) -> np.ndarray:
        """A tensor as float32."""
        return self._file.read(tensor).astype(np.float32)


def open_adapter(name: str, path: pathlib.Path, model: ModelConfig) -> Adapter:
    """Opens an adapter and checks that it is one of ``model``.

    Raises `CheckpointError`, which names the adapter's file, the field or tensor at fault, and the remedy.
    """
    config = _Config(path)
    file = _File(path / WEIGHTS)
    made_for = f", which says it is of {config.base}" if config.base else ""
    fits = f"the adapter{made_for}, does not fit the served {model.family} model: serve it with the model it was trained on"
    targets = _targets(model)
    pairs: dict[tuple[int, str, _Target], dict[str, str]] = {}  # layer, module -> "A" or "B" -> tensor
    for tensor in file.entries:
        module, half = _split_name(file, tensor)
        layer, target = _find(file, tensor, module, targets, model)
        if layer >= model.num_layers:
            raise CheckpointError(
                f"{file.path}: tensor {tensor} is of layer {layer}, the model has {model.num_layers}; {fits}"
            )
        pairs.setdefault((layer, module, target), {})[half] = tensor
    if not pairs:
        raise CheckpointError(f"{file.path} has no tensors: the adapter was saved wrong, save it again")
    modules: dict[int, list[_Module]] = {}
    for (layer, module, target), tensors in pairs.items():
        if missing := {"A", "B"} - tensors.keys():
            raise CheckpointError(
                f"{file.path} has no tensor {PREFIX}{module}.lora_{missing.pop()}.weight: the file is incomplete, "
                "download it again"
            )
        rank = config.rank(module)
        for half, shape in (("A", (rank, target.columns)), ("B", (sum(target.rows), rank))):
            found = file.entries[tensors[half]].shape
            if found != shape:
                raise CheckpointError(
                    f"{file.path}: tensor {tensors[half]} has shape {list(found)}, where {list(shape)} is needed "
                    f"(rank {rank} by {CONFIG}, the rest by the model); {fits}"
                )
        modules.setdefault(layer, []).append(_Module(target, tensors["A"], tensors["B"], rank, config.scale(module)))
    return Adapter(name, path, config.base, {layer: tuple(found) for layer, found in modules.items()}, file)


def adapter_layout(adapters: Sequence[Adapter]) -> AdapterLayout | None:
    """The room that all of them need together; `None` for none."""
    if not adapters:
        return None
    rank = max(adapter.rank for adapter in adapters)
    maps = {name for adapter in adapters for name in adapter.maps}
    padded = -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE
    return AdapterLayout(len(adapters), padded, tuple(name for name in ADAPTER_MAPS if name in maps))


def adapter_fills(adapters: Sequence[Adapter], abstract: Adapters, layers: range) -> Adapters:
    """A tree like the abstract one, of a group of layers, that holds what fills each array, in place."""

    def low_rank(name: str) -> LowRank | None:
        if getattr(abstract, name) is None:
            return None
        parts = (functools.partial(fill, adapters, layers, name) for fill in (_fill_a, _fill_b))
        return LowRank(*parts)

    return Adapters(**{name: low_rank(name) for name in ADAPTER_MAPS})


def _fill_a(adapters: Sequence[Adapter], layers: range, map: str, out: np.ndarray) -> None:
    """[n, adapters, parts, rank, in]."""
    out[...] = 0
    for i, layer in enumerate(layers):
        for j, adapter in enumerate(adapters):
            for module in adapter.of(layer, map):
                out[i, j, list(module.target.parts), : module.rank] = adapter.read(module.a)[None]


def _fill_b(adapters: Sequence[Adapter], layers: range, map: str, out: np.ndarray) -> None:
    """[n, groups, ..., adapters, rank]."""
    out[...] = 0
    for i, layer in enumerate(layers):
        for j, adapter in enumerate(adapters):
            for module in adapter.of(layer, map):
                scaled = adapter.read(module.b) * np.float32(module.scale)
                pieces = np.split(scaled, np.cumsum(module.target.rows)[:-1])
                for part, piece in zip(module.target.parts, pieces, strict=True):
                    into = out[i, ..., j, : module.rank]  # [groups, ..., rank]
                    if map == "qkv" and part == 0:  # the queries of each KV head
                        queries, kv_heads, head_dim, rank = into[:-2].shape
                        into[:-2] = piece.reshape(kv_heads, queries, head_dim, rank).swapaxes(0, 1)
                    else:
                        group = part - 3 if map == "qkv" else part
                        shape = into[group].shape
                        copies = into[group].size // piece.size if map == "qkv" else 1  # of KV heads: `engine.sharding`
                        into[group] = piece.reshape(-1, *shape[1:]).repeat(copies, axis=0)


def _targets(model: ModelConfig) -> dict[str, _Target]:
    """The modules that an adapter may change, by their name with ``{layer}`` in it."""
    names = get_family(model.family).tensors
    hidden, ffn = model.hidden_size, model.intermediate_size
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    if names.qkv is not None:
        targets = {names.qkv: _Target("qkv", (0, 1, 2), (q, kv, kv), hidden)}
    else:
        targets = {
            names.q: _Target("qkv", (0,), (q,), hidden),
            names.k: _Target("qkv", (1,), (kv,), hidden),
            names.v: _Target("qkv", (2,), (kv,), hidden),
        }
    targets[names.o] = _Target("o", (0,), (hidden,), q)
    if model.moe is not None:
        return targets
    if names.gate_up is not None:
        targets[names.gate_up] = _Target("gate_up", (0, 1), (ffn, ffn), hidden)
    else:
        targets[names.gate] = _Target("gate_up", (0,), (ffn,), hidden)
        targets[names.up] = _Target("gate_up", (1,), (ffn,), hidden)
    targets[names.down] = _Target("down", (0,), (hidden,), ffn)
    return targets


def _split_name(file: _File, tensor: str) -> tuple[str, str]:
    """``base_model.model.<module>.lora_A.weight`` -> the module, ``A``."""
    match = re.fullmatch(re.escape(PREFIX) + r"(.+)\.lora_([AB])\.weight", tensor)
    if match is None:
        raise CheckpointError(
            f"{file.path}: tensor {tensor} is not the lora_A or lora_B of a linear module, which is all that is served; "
            "train the adapter without it"
        )
    return match[1], match[2]


def _find(
    file: _File, tensor: str, module: str, targets: Mapping[str, _Target], model: ModelConfig
) -> tuple[int, _Target]:
    """The layer and the target that a module is."""
    pattern = re.sub(r"(\.layers\.)\d+", r"\g<1>{layer}", module, count=1)
    target = targets.get(pattern)
    if target is None:
        if (model.moe is not None and ".mlp." in module + ".") or ".experts." in module:
            raise CheckpointError(
                f"{file.path}: tensor {tensor} adapts the experts or the router of a mixture, which is not served; "
                "train the adapter on the attention's projections only"
            )
        served = ", ".join(sorted(name.rpartition(".")[2] for name in targets))
        raise CheckpointError(
            f"{file.path}: tensor {tensor} adapts the module {module}, which is not served: of a {model.family} model, "
            f"{served} of its layers are; train the adapter on these, or serve it with the model it was trained on"
        )
    layer = re.search(r"\.layers\.(\d+)", module)
    assert layer is not None  # a target is of a layer
    return int(layer[1]), target


class _File:
    """``adapter_model.safetensors``: its header, and its tensors on demand."""

    def __init__(self, path: pathlib.Path):
        if not path.is_file():
            old = path.with_suffix(".bin").exists()
            remedy = "save the adapter as safetensors" if old else "give the directory of an adapter that PEFT has saved"
            raise CheckpointError(f"{path} does not exist{' (but a .bin of it)' if old else ''}: {remedy}")
        self.path = path
        self._map: mmap.mmap
        self.entries: dict[str, Entry]
        self._map, self.entries = read_header(path)
        for name, entry in self.entries.items():
            if entry.dtype not in DTYPES:
                raise CheckpointError(
                    f"{path}: tensor {name} has dtype {entry.dtype}; adapters of {', '.join(DTYPES)} can be loaded"
                )

    def read(self, name: str) -> np.ndarray:
        entry = self.entries[name]
        return np.frombuffer(self._map, DTYPES[entry.dtype], math.prod(entry.shape), entry.begin).reshape(entry.shape)


class _Config:
    """``adapter_config.json``, strictly."""

    def __init__(self, path: pathlib.Path):
        self.file = file = path / CONFIG
        try:
            self.values = json.loads(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(
                f"{file} does not exist: give the directory of an adapter that PEFT has saved"
            ) from None
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise CheckpointError(f"{file} is not valid JSON ({error}); download it again") from None
        if not isinstance(self.values, dict):
            raise CheckpointError(
                f"{file} holds {type(self.values).__name__} where an object is expected; download it again"
            )
        self._check()

    def _check(self) -> None:
        values = self.values
        if values.get("peft_type") != "LORA":
            raise self._fail("peft_type", "only LORA is served")
        if values.get("bias", "none") != "none":
            raise self._fail("bias", "adapters that train biases are not served: train it with bias none")
        if values.get("init_lora_weights") not in _PLAIN_STARTS:
            raise self._fail(
                "init_lora_weights", "such an adapter needs changed weights of the model: convert it to a plain LoRA with PEFT"
            )
        for name in sorted(values.keys() - _IRRELEVANT - _UNDERSTOOD):
            if values[name]:
                raise self._fail(name, "which is not served: train the adapter without it, or merge it into the model")
        self._number("r", values.get("r"), integer=True)
        self._number("lora_alpha", values.get("lora_alpha"))
        for name, integer in (("rank_pattern", True), ("alpha_pattern", False)):
            if not isinstance(values.get(name) or {}, dict):
                raise self._fail(name, "an object is needed")
            for pattern, value in (values.get(name) or {}).items():
                self._number(f"{name}[{pattern!r}]", value, integer=integer)
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise self._fail(name, f"where {pattern!r} is no regular expression ({error})") from None

    @property
    def base(self) -> str:
        return str(self.values.get("base_model_name_or_path") or "")

    def rank(self, module: str) -> int:
        return int(self._of("rank_pattern", module, self.values["r"]))

    def scale(self, module: str) -> float:
        rank, alpha = self.rank(module), self._of("alpha_pattern", module, self.values["lora_alpha"])
        return alpha / (math.sqrt(rank) if self.values.get("use_rslora") else rank)

    def _of(self, name: str, module: str, default: float) -> float:
        """The entry of a pattern that fits a module: PEFT matches the end of its name, the first entry first."""
        for pattern, value in (self.values.get(name) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return float(value)
        return default

    def _number(self, name: str, value: object, *, integer: bool = False) -> None:
        allowed = int if integer else (int, float)
        if isinstance(value, bool) or not isinstance(value, allowed) or value <= 0:
            needed = "integer" if integer else "number"
            raise CheckpointError(f"{self.file}: {name} is {value!r}; a positive {needed} is needed")

    def _fail(self, name: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {name} is {self.values.get(name)!r}, {why}")
