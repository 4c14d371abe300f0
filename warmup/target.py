"""Building for a TPU slice on a machine that has none: ``preheat build --target v5e-4``.

The ``libtpu`` package describes any slice (`jax.experimental.topologies`) and holds the whole compiler, so every
program of a configuration can be lowered and compiled here, with the real executable's memory per device, and stored
under the fingerprint that a server on that slice will compute. Weights stay abstract: a ``config.json`` is enough.

A target's name counts as Google's does: chips for v5e and v6e, TensorCores (two a chip) for v4 and v5p.

The entries have not run when they are stored. The first start on the slice runs each once, as every start does, and
compiles anew whatever fails.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from engine.config import EngineConfig
from engine.sharding import device_order, ways
from warmup import aot
from warmup.collectives import Collective, Listing
from warmup.compiling import Compilation, compile_programs, no_options
from warmup.errors import WarmupError
from warmup.fingerprint import ArgumentDescriber
from warmup.guard import Guard
from warmup.plan import ACCELERATOR_SHARE, MemoryPlan, measure, resolve_kv_pages
from warmup.prepare import Engine, open_store
from warmup.report import ProgramMemory, WarmupReport
from warmup.store import ArtifactStore, Pending

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class _Generation:
    """One generation of TPUs. ``hbm`` in bytes per chip, from Google's table of TPU versions."""

    hbm: int
    cores: int  # that a slice's name counts for each chip
    dimensions: int  # of the torus
    options: tuple[tuple[str, str], ...] = ()


_GENERATIONS = {
    "v4": _Generation(32 * _GIB, 2, 3, (("chip_config_name", "megacore"),)),  # else each core is a device of its own
    "v5p": _Generation(95 * _GIB, 2, 3),
    "v5e": _Generation(16 * _GIB, 1, 2),
    "v6e": _Generation(32 * _GIB, 1, 2),
}

# Shapes of slices by number of chips: the ones that Google Cloud offers, up to what one mesh axis is good for.
_SHAPES = {
    2: {1: "1x1", 2: "1x2", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"},
    3: {
        1: "1x1x1",
        2: "1x2x1",
        4: "2x2x1",
        8: "2x2x2",
        16: "2x2x4",
        32: "2x4x4",
        64: "4x4x4",
        128: "4x4x8",
        256: "4x8x8",
    },
}


@dataclasses.dataclass(frozen=True)
class Target:
    """A TPU slice. ``hbm`` is bytes of memory per device; a device is a chip."""

    name: str
    generation: str
    chips: int
    topology: str  # "v5e:2x2", as libtpu names it
    hbm: int
    options: tuple[tuple[str, str], ...]

    @property
    def budget(self) -> int:
        """The memory budget per device where ``--memory`` is not given."""
        return int(ACCELERATOR_SHARE * self.hbm)


def parse_target(name: str) -> Target:
    """``v5e-4``, ``v6e-8``, ``v5p-8``, ``v4-8``. Raises `WarmupError` with the names that would do."""
    match = re.fullmatch(r"(v[0-9]+[ep]?)-([0-9]+)", name)
    if not match or match[1] not in _GENERATIONS:
        raise WarmupError(
            f"unknown target {name!r}: write a TPU generation of {', '.join(_GENERATIONS)} and a size, as in v5e-4"
        )
    generation = _GENERATIONS[match[1]]
    shapes = _SHAPES[generation.dimensions]
    chips, rest = divmod(int(match[2]), generation.cores)
    if rest or chips not in shapes:
        sizes = ", ".join(f"{match[1]}-{size * generation.cores}" for size in shapes)
        counted = "chips" if generation.cores == 1 else "TensorCores, two a chip"
        raise WarmupError(f"no slice {name!r}: {match[1]} sizes count {counted}, and are {sizes}")
    return Target(name, match[1], chips, f"{match[1]}:{shapes[chips]}", generation.hbm, generation.options)


def target_devices(target: Target, count: int) -> tuple[jax.Device, ...]:
    """The first ``count`` devices of the slice, described by libtpu.

    Raises:
      WarmupError: the slice has fewer, or ``libtpu`` is not installed or does not know the slice.
    """
    if count > target.chips:
        raise WarmupError(f"--dp x --ep x --tp = {count} is more than the {target.chips} devices of {target.name}")
    if importlib.util.find_spec("libtpu") is None:
        raise WarmupError("building for a TPU needs the libtpu package: pip install 'preheat[tpu]' (Linux on x86-64)")
    from jax.experimental import topologies

    for name, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),  # no metadata server: this is no TPU machine
        ("TPU_ACCELERATOR_TYPE", "v5litepod-4"),  # keeps it from asking; the topology's name decides
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),  # several builds at once: none of them owns a chip
        ("TPU_MIN_LOG_LEVEL", "3"),
        ("TPU_STDERR_LOG_LEVEL", "3"),
    ):
        os.environ.setdefault(name, value)
    try:
        description = topologies.get_topology_desc(
            platform="tpu", topology_name=target.topology, **dict(target.options)
        )
    except Exception as error:  # libtpu's own errors, of several types
        raise WarmupError(f"libtpu does not describe {target.name} ({target.topology}): {error}") from error
    return tuple(device_order(description.devices)[:count])


@dataclasses.dataclass(frozen=True)
class Build:
    """What a build made. ``stored`` are the programs that entered the store's manifest; ``moves`` is what moves between devices, by
    program, where it was asked for."""

    plan: MemoryPlan
    report: WarmupReport
    store: ArtifactStore
    stored: tuple[str, ...]
    moves: dict[str, list[Collective]]

    def explain_moves(self) -> str:
        """One line for each program and collective, for people; empty on one device."""
        lines = [f"{name}: {'; '.join(map(str, found))}" for name, found in self.moves.items() if found]
        return "\n".join(["between devices, in one run:", *lines]) if lines else ""


def build_target(
    make: Callable[[EngineConfig], Engine],
    config: EngineConfig,
    devices: Sequence[jax.Device],
    root: Path | None,
    budget: int,
    *,
    guard: Guard,
    report: WarmupReport,
    workers: int | None = None,
    list_moves: bool = False,
) -> Build:
    """Compiles every program for devices that are not here, and stores what came out.

    Args:
      make: describes an engine on ``devices`` for a configuration, allocating nothing.
      config: the layout; ``kv_pages`` is resolved here, or taken from the store.
      devices: of `target_devices`, in mesh order.
      root: the warmup cache; `None` stores nothing.
      budget: bytes per device. A configuration over it is built all the same: the plan says so.
      list_moves: fill `Build.moves`.

    Raises:
      WarmupError: a program failed, by name. `DoesNotFit`: not one sequence of ``max_len`` fits by the estimate.
    """
    # Any number of pages makes the same fingerprint.
    model = make(dataclasses.replace(config, kv_pages=config.pages_per_slot + 1)).model
    store = open_store(root, model, config, devices, budget=budget)
    pages = resolve_kv_pages(make, config, budget, stored=store.resolved.get("kv_pages"))

    listing = Listing(dataclasses.asdict(ways(config)), devices[0].platform) if list_moves and len(devices) > 1 else None

    def compile_all(engine: Engine, describer: ArgumentDescriber) -> tuple[dict[str, ProgramMemory], list[Pending]]:
        programs = engine.programs()
        report.begin([program.name for program in programs])

        def use(done: Compilation) -> tuple[ProgramMemory, Pending | None]:
            pending = None
            if store.writable:
                artifact = aot.serialize(done.program, done.compiled)
                pending = store.put(done.program.name, artifact, describer.digest(done.program))
            report.prepared(
                done.program.name, "compiled", done.memory, trace=done.seconds_trace, compile=done.seconds_compile
            )
            if listing is not None:
                listing.add(done.program, done.compiled)
            return done.memory, pending

        with aot.no_persistent_cache():
            options = listing.options if listing else no_options
            results = compile_programs(programs, guard, use, workers=workers, options=options)
        names = [program.name for program in programs]
        return dict(zip(names, (memory for memory, _ in results), strict=True)), [item for _, item in results if item]

    engine, describer = make(dataclasses.replace(config, kv_pages=pages)), ArgumentDescriber({"kv_pages": pages})
    memory, pending = compile_all(engine, describer)
    plan = measure(engine, budget, memory)
    if not plan.fits:
        pages = resolve_kv_pages(make, config, budget, memory=memory)
        engine, describer = make(dataclasses.replace(config, kv_pages=pages)), ArgumentDescriber({"kv_pages": pages})
        memory, pending = compile_all(engine, describer)
        plan = measure(engine, budget, memory)
    store.record_resolved({"kv_pages": pages})
    programs = engine.programs()
    store.commit(
        pending,
        arguments={program.name: describer.describe(program) for program in programs},
        groups=describer.groups,
    )
    moves = {}
    if listing is not None:
        moves = {program.name: listing.found[program.name] for program in programs}
        listing.close()
    return Build(plan, report, store, tuple(item.name for item in pending), moves)
