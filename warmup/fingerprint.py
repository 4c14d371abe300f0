"""What a compiled program depends on, as data a person can read and compare.

A `Fingerprint` covers everything that is known before the engine is made: versions, devices, flags, the model and
engine configuration, the source text of what is traced. Its digest names a folder of the artifact store. ``kv_pages``
is left out on purpose: it is *resolved* from the budget once and stored in that folder, so that a restart finds the
number again.

What is only known with the engine, each program's abstract arguments, is described by `describe_arguments`, and its
digest stands beside the program's entry. Arguments are described by key paths, dtypes, shapes and shardings: the repr
of a tree definition differs between processes.

Nothing here traces.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from engine.config import EngineConfig, ModelConfig
from engine.programs import Program

Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]

# Parts of ``engine`` that run on the host and shape no program but through the configurations.
_HOST_ONLY = (
    "engine/agreement.py", "engine/checkpoints/", "engine/families/", "engine/fills.py", "engine/loader.py", "engine/mock",
    "engine/peft.py",
)  # fmt: skip

# JAX options that change what is traced or compiled.
_OPTIONS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
    "jax_debug_nans",
    "jax_debug_infs",
    "jax_disable_jit",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_optimization_level",
)


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """``components`` is nested and JSON-ready; equal components, equal digest."""

    components: Mapping[str, Json]

    @functools.cached_property
    def digest(self) -> str:
        """20 hex digits."""
        return _digest(json.dumps(self.components, sort_keys=True))

    @property
    def platform(self) -> str:
        """A digest of the versions and the backend alone, its instruction set included: what any executable depends on."""
        return _digest(json.dumps([self.components["versions"], self.components["backend"]], sort_keys=True))

    def diff(self, older: Mapping[str, Json]) -> list[str]:
        """What differs from an older fingerprint's components: one ``path: old -> new`` each."""
        return _diff("", dict(older), dict(self.components))


def fingerprint(
    model: ModelConfig, config: EngineConfig, devices: Sequence[jax.Device], *, budget: int = 0
) -> Fingerprint:
    """The fingerprint of a server on these devices, in mesh order. ``budget`` is the memory budget in bytes per
    device."""
    layout = dataclasses.asdict(config)
    del layout["kv_pages"]
    return Fingerprint(
        _object(
            {
                "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")},
                "backend": _backend(devices[0]),
                "devices": _devices(devices),
                "flags": _flags(),
                "options": {name: _plain(getattr(jax.config, name)) for name in _OPTIONS if hasattr(jax.config, name)},
                "model": dataclasses.asdict(model),
                "engine": layout,
                "budget": budget,
                "sources": source_digests("engine"),
            }
        )
    )


def source_digests(package: str, *, host_only: bool = False) -> dict[str, Json]:
    """A digest of each file of a package that may be traced or called, by path: Python files and native libraries; with
    ``host_only`` of the others."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"no package {package!r}")
    root = Path(spec.submodule_search_locations[0])
    files = sorted([*root.rglob("*.py"), *root.rglob("*.so")])
    paths = {f"{package}/{path.relative_to(root).as_posix()}": path for path in files}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for name, path in paths.items()
        if name.startswith(_HOST_ONLY) == host_only
    }


class ArgumentDescriber:
    """Describes what a program is made for, beyond the fingerprint: its arguments, and what was resolved
    (``kv_pages``).

    The latter because arguments do not say all: the program that creates the decode state has none. Remembers each
    subtree, for the weights are an argument of most programs.
    """

    def __init__(self, resolved: Mapping[str, Json]) -> None:
        self._known: dict[int, tuple[object, str]] = {}
        lines = [f"{name}: {value}" for name, value in sorted(resolved.items())]
        self._resolved = _digest("\n".join(lines))
        self.groups: dict[str, list[str]] = {self._resolved: lines}  # digest of one argument -> its lines

    def describe(self, program: Program) -> list[str]:
        """The digests of what was resolved and of a program's arguments, in order."""
        return [self._resolved, *(self._argument(argument) for argument in program.arguments)]

    def lines(self, program: Program) -> list[str]:
        """The description of what was resolved, and of all arguments leaf by leaf."""
        return [line for digest in self.describe(program) for line in self.groups[digest]]

    def digest(self, program: Program) -> str:
        """One digest of all arguments, and of what is donated."""
        return _digest(json.dumps([self.describe(program), program.donates]))

    def _argument(self, argument: object) -> str:
        known = self._known.get(id(argument))
        if known is not None:
            return known[1]
        lines = describe_arguments(argument)
        digest = _digest("\n".join(lines))
        self.groups[digest] = lines
        self._known[id(argument)] = (argument, digest)  # keeps the argument alive, and with it its id
        return digest


def describe_arguments(tree: object) -> list[str]:
    """One line per leaf: ``path: dtype[shape] sharding``."""
    return [
        f"{jax.tree_util.keystr(path)}: {leaf.dtype}{list(leaf.shape)} {_sharding(leaf.sharding)}"
        + (" weak" if leaf.weak_type else "")
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]


def _sharding(sharding: jax.sharding.Sharding | None) -> str:
    match sharding:
        case None:
            return "unplaced"
        case jax.sharding.NamedSharding():
            mesh = ",".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
            memory = f" {sharding.memory_kind}" if sharding.memory_kind else ""
            return f"{sharding.spec} over ({mesh}){memory}"
        case jax.sharding.SingleDeviceSharding():
            return f"one device{f' {sharding.memory_kind}' if sharding.memory_kind else ''}"
        case _:
            return repr(sharding)


def _backend(device: jax.Device) -> dict[str, Json]:
    result: dict[str, Json] = {
        "platform": device.platform,
        "version": device.client.platform_version,
    }
    if device.platform == "cpu":
        result["cpu"] = _cpu()  # XLA compiles for the features of the host it runs on
    return result


def _devices(devices: Sequence[jax.Device]) -> dict[str, Json]:
    """Kind, number and, where devices have coordinates, the topology in mesh order."""
    return {
        "kind": devices[0].device_kind,
        "count": len(devices),
        "coordinates": [list(getattr(device, "coords", [])) for device in devices],
    }


def _cpu() -> dict[str, Json]:
    """Model and instruction-set features of the host."""
    name, features = platform.processor() or platform.machine(), []
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            match key.strip():
                case "model name":
                    name = value.strip()
                case "flags" | "Features":
                    features = sorted(value.split())
                    break
    except OSError:  # no such file outside Linux: the model's name must do
        pass
    return {"machine": platform.machine(), "model": name, "features": list(features), "cores": os.cpu_count()}


def _flags() -> dict[str, Json]:
    """Compiler flags from the environment, one by one."""
    return {name: [*sorted(os.environ.get(name, "").split())] for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}


def _object(value: Mapping[str, object]) -> dict[str, Json]:
    """A mapping as JSON; see `_plain`."""
    return {str(key): _plain(item) for key, item in value.items()}


def _plain(value: object) -> Json:
    """JSON's own types: tuples become lists, anything else its text."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Mapping():
            return _object(value)
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            return str(value)


def _diff(path: str, old: Json, new: Json) -> list[str]:
    if old == new:
        return []
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        lines = []
        for key in sorted(old.keys() | new.keys()):
            lines += _diff(f"{path}.{key}" if path else key, old.get(key), new.get(key))
        return lines
    if isinstance(old, list) and isinstance(new, list) and all(isinstance(item, str) for item in [*old, *new]):
        gone = [f"-{item}" for item in old if item not in new]
        come = [f"+{item}" for item in new if item not in old]
        return [f"{path}: {' '.join(gone + come) or 'another order'}"]
    return [f"{path}: {json.dumps(old)} -> {json.dumps(new)}"]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:20]
