"""Logical axes, the one table that maps them to the mesh, and how the devices of a mesh meet.

Every array that lives on the devices is described by logical axis names; its sharding follows from `RULES`, and so do the programs:
each is one function over the parts that a device holds (`split`), written for the sizes that a device sees (`device_model`,
`device_config`), and where parts have to meet it says so (`Ways`). The partitioner of XLA decides nothing, so what moves
between devices in a step is what is written in ``engine/model.py`` and ``engine/functions.py``, and on a single device none of
it is there.

The mesh has three axes:

``tensor`` (``--tp``)   heads, the feed-forward width and the vocabulary are split; partial sums are added up after attention and after
                        the feed-forward layer.
``expert`` (``--ep``)   the experts of a mixture are split.
``data`` (``--dp``)     weights are whole on each.

The devices of one place on ``data`` and ``expert`` are a *group*: it has its own slots, its own pages and its own rows of each step, and
nothing of these ever leaves it. Groups of different experts exchange the rows that go through them. A prompt's chunk is
computed by all groups together, each its share of the tokens; each keeps the whole prefix, so that any can take it into its
pages.

With more tensor devices than KV heads, or a number that does not divide them, heads are stored in copies (`stored_model`), so that each
device has the KV heads of its own query heads.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from engine.config import ConfigError, EngineConfig, ModelConfig
from engine.programs import Executable

DATA, EXPERT, TENSOR = AXES = ("data", "expert", "tensor")
GROUPS = (DATA, EXPERT)

RULES: dict[str | None, str | tuple[str, ...] | None] = {
    "kv_heads": TENSOR,
    "heads": TENSOR,
    "ffn": TENSOR,
    "vocab": TENSOR,
    "experts": EXPERT,
    "rows": GROUPS,  # of a step, or tokens of a chunk
    "slots": GROUPS,
    "pages": GROUPS,
    None: None,
}


def device_order(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """Devices in the order that all starts, and builds for devices that are not here, agree on: by process, by place in the torus
    where there is one, by number."""
    return sorted(devices, key=lambda device: (device.process_index, *reversed(getattr(device, "coords", None) or ()), device.id))


def make_mesh(devices: Sequence[jax.Device], *, dp: int = 1, ep: int = 1) -> Mesh:
    """A mesh over the devices in the order given, which is also the order in which executables are loaded. Neighbours share a tensor
    axis; ``data`` is the outermost."""
    return Mesh(np.array(devices).reshape(dp, ep, -1), AXES)


def sharding(mesh: Mesh, axes: Sequence[str | None]) -> NamedSharding:
    """The sharding of an array whose dimensions have these logical names (`None`: replicated)."""
    return NamedSharding(mesh, PartitionSpec(*(RULES[axis] for axis in axes)))


def describe(mesh: Mesh, shape: Sequence[int], dtype: str | np.dtype, axes: Sequence[str | None]) -> jax.ShapeDtypeStruct:
    """The abstract array that creation, loading, lowering and memory planning all start from."""
    if len(shape) != len(axes):
        raise ValueError(f"shape {tuple(shape)} has {len(shape)} dimensions, axes {tuple(axes)} name {len(axes)}")
    return jax.ShapeDtypeStruct(tuple(shape), jax.dtypes.canonicalize_dtype(dtype), sharding=sharding(mesh, axes))


def replicated(mesh: Mesh, shape: Sequence[int], dtype: str | np.dtype) -> jax.ShapeDtypeStruct:
    """An abstract array that every device holds whole."""
    return describe(mesh, shape, dtype, [None] * len(shape))


def split(function: Executable, mesh: Mesh, arguments: object, outputs: object) -> Executable:
    """A function over whole arrays from one over the parts of a device. ``arguments`` and ``outputs`` are abstract."""
    if mesh.size == 1:
        return function
    specs = functools.partial(jax.tree.map, lambda leaf: leaf.sharding.spec)
    # What a device computes from whole arrays is the same on all; JAX cannot know that of a gathered one.
    per_device: Executable = jax.shard_map(function, mesh=mesh, in_specs=specs(arguments), out_specs=specs(outputs), check_vma=False)
    return per_device


@dataclasses.dataclass(frozen=True)
class Ways:
    """Into how many parts each axis of the mesh splits what it splits, and where the parts meet. Its methods are traced on every
    device at once; an axis of one part costs nothing."""

    data: int = 1
    expert: int = 1
    tensor: int = 1

    @property
    def groups(self) -> int:
        return self.data * self.expert

    def _parts(self, axes: str | tuple[str, ...]) -> int:
        return math.prod(getattr(self, axis) for axis in ((axes,) if isinstance(axes, str) else axes))

    def index(self, axes: str | tuple[str, ...]) -> jax.Array | int:
        """Which of the parts is this device's."""
        return jax.lax.axis_index(axes) if self._parts(axes) > 1 else 0

    def sum(self, x: jax.Array, axes: str | tuple[str, ...]) -> jax.Array:
        """The sum of all parts' ``x``, on each."""
        return jax.lax.psum(x, axes) if self._parts(axes) > 1 else x

    def join(self, x: jax.Array, axes: str | tuple[str, ...], dimension: int) -> jax.Array:
        """All parts' ``x``, one after the other along a dimension, on each."""
        return jax.lax.all_gather(x, axes, axis=dimension, tiled=True) if self._parts(axes) > 1 else x

    def share(self, x: jax.Array, axes: str | tuple[str, ...], dimension: int) -> jax.Array:
        """This part's share, along a dimension, of the sum of all parts' ``x``."""
        return jax.lax.psum_scatter(x, axes, scatter_dimension=dimension, tiled=True) if self._parts(axes) > 1 else x

    def only(self, x: jax.Array, axes: str | tuple[str, ...], part: jax.Array | int = 0) -> jax.Array:
        """``x`` on one part and zeros on the others."""
        return jnp.where(self.index(axes) == part, x, jnp.zeros_like(x)) if self._parts(axes) > 1 else x


def ways(config: EngineConfig) -> Ways:
    return Ways(config.dp, config.ep, config.tp)


def stored_model(model: ModelConfig, config: EngineConfig) -> ModelConfig:
    """The model with its KV heads as they are stored: as many copies of each as it takes to split them over ``config.tp`` devices.

    The query heads of a KV head are shared out among its copies, in their order, so that a copy is read for its own only. The number of
    stored heads is the least common multiple of the two, which divides the query heads because both do.
    """
    return dataclasses.replace(model, num_kv_heads=math.lcm(model.num_kv_heads, config.tp))


def device_model(model: ModelConfig, config: EngineConfig) -> ModelConfig:
    """The model as one device computes it: its share of heads and of the feed-forward width. Vocabulary and experts count whole."""
    stored = stored_model(model, config)
    return dataclasses.replace(
        stored,
        num_heads=model.num_heads // config.tp,
        num_kv_heads=stored.num_kv_heads // config.tp,
        intermediate_size=model.intermediate_size // config.tp,
    )


def device_config(config: EngineConfig) -> EngineConfig:
    """The layout as one group has it: its share of slots and rows."""
    return dataclasses.replace(
        config, slots=config.group_slots, batch_sizes=tuple(size // config.groups for size in config.batch_sizes)
    )


def explain_split(model: ModelConfig, config: EngineConfig) -> str:
    """One line for people; empty for one device."""
    if config.devices == 1:
        return ""
    ways = {name: getattr(config, name) for name in ("dp", "ep", "tp")}
    line = f"{config.devices} devices: " + " x ".join(f"--{name} {size}" for name, size in ways.items() if size > 1)
    copies = stored_model(model, config).num_kv_heads // model.num_kv_heads
    return line if copies == 1 else f"{line}; each of the {model.num_kv_heads} KV heads is stored {copies} times"


def check_split(model: ModelConfig, config: EngineConfig) -> None:
    """Raises `ConfigError`, with the sizes that work, where the model or the layout cannot be split as the configuration says."""
    extents = {
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.intermediate_size,
        "vocab_size": model.vocab_size,
    }
    _check_divides("--tp", config.tp, "the model's", extents)
    if config.ep > 1 and model.moe is None:
        raise ConfigError(f"--ep {config.ep}: the model has no experts to split; use --dp or --tp")
    if model.moe is not None:
        _check_divides("--ep", config.ep, "the model's", {"number of experts": model.moe.experts})
    option = "--dp" if config.ep == 1 else "--ep" if config.dp == 1 else "--dp x --ep"
    _check_divides(option, config.groups, "the layout's", {"--slots": config.slots})
    for name, sizes in (("--batch-sizes", config.batch_sizes), ("--prefill-buckets", config.prefill_buckets)):
        if odd := [size for size in sizes if size % config.groups]:
            raise ConfigError(
                f"{name} {odd[0]} cannot be shared by the {config.groups} groups of {option}: give multiples of {config.groups}"
            )


def _check_divides(option: str, parts: int, whose: str, extents: dict[str, int]) -> None:
    for name, extent in extents.items():
        if extent % parts:
            common = math.gcd(*extents.values())
            sizes = ", ".join(str(size) for size in range(1, common + 1) if common % size == 0)
            raise ConfigError(f"{option} {parts} does not divide {whose} {name} = {extent}: sizes that work are {sizes}")
