"""From a described engine to one that has run every program once.

The flow of a start, in the order things happen::

    budget = plan.memory_budget(...)
    store  = open_store(root, model, config, devices, budget=budget)
    engine, prepared, plan = prepare_fitting(make, config, mode, store, budget, report=report, guard=guard)
             finds the KV pages, or takes those the store has; `prepare`s; checks the plan before anything big is
             allocated
             (weights load meanwhile, in another thread: they do not depend on the KV pages)
    engine.install(prepared.executables); engine.set_weights(...); prepared.allocate(engine)
    prepared.touch_all(engine)
    the proof (one request if prepared.unchanged); prepared.record_proof(...)

Each step names the program that fails, and a failure ends the start; but where the program came out of a cache, it is compiled without it,
once, after a warning.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import jax

from engine.config import EngineConfig, ModelConfig
from engine.programs import Executable, Program, tree_bytes
from warmup import aot, manual
from warmup.cache import keep_within_limit
from warmup.compiling import compile_programs, naming, one_line
from warmup.errors import WarmupError
from warmup.fingerprint import ArgumentDescriber, fingerprint
from warmup.guard import Guard
from warmup.plan import MemoryPlan, measure, resolve_kv_pages
from warmup.report import ProgramMemory, WarmupReport
from warmup.store import ArtifactStore, Pending
from warmup.xla_cache import XlaCache, use_xla_cache

logger = logging.getLogger(__name__)

MOST_TOUCH_LANES = 2
OWNER_SHARE = 0.2  # what the first run of an owner's program costs, on average, beside one of prefill

Mode = Literal["manual", "aot", "none"]


class WarmableEngine(Protocol):
    """What warmup needs of an engine; `engine.jax_engine.JaxEngine` has it."""

    model: ModelConfig
    config: EngineConfig

    @property
    def devices(self) -> Sequence[jax.Device]: ...

    @property
    def abstract_weights(self) -> object: ...  # pytree of ShapeDtypeStruct

    def programs(self) -> tuple[Program, ...]: ...

    def install(self, executables: Mapping[str, Executable]) -> None: ...

    def allocate(self) -> None: ...

    def touch(self, name: str) -> None: ...


def touch_lanes(programs: Sequence[Program], prefixes: int) -> list[list[Program]]:
    """Programs that may run side by side: at most as many lanes as there are prefixes, for each lane needs one.

    Those that make, read or write the decode state stay in the first lane; those that work on a prefix alone are spread,
    the one with the largest arguments first, each to the lane with the fewest programs so far. Programs of one chain stay
    together, in their order, so that one which fails is the first to run.
    """
    states = [
        program.arguments[program.donates]
        for program in programs
        if program.takes_state and program.donates is not None
    ]

    def prefill(program: Program) -> bool:
        return program.donates is not None and not program.loads and not any(
            argument is state for argument in program.arguments for state in states
        )

    chains: dict[str, list[Program]] = {}
    for program in programs:
        chains.setdefault(program.chain, []).append(program)
    prefills = {name: chain for name, chain in chains.items() if any(map(prefill, chain))}
    owner = [chain for name, chain in chains.items() if name not in prefills]
    lanes = [[program for chain in owner for program in chain]]
    lanes += [[] for _ in range(min(prefixes, MOST_TOUCH_LANES) - 1)]
    cost = [OWNER_SHARE * len(owner), *(0.0 for _ in lanes[1:])]
    for chain in sorted(prefills.values(), key=lambda chain: -max(tree_bytes(program.arguments) for program in chain)):
        cheapest = cost.index(min(cost))
        lanes[cheapest] += chain
        cost[cheapest] += 1
    return [lane for lane in lanes if lane]


Engine = TypeVar("Engine", bound=WarmableEngine)


def open_store(
    root: Path | None, model: ModelConfig, config: EngineConfig, devices: Sequence[jax.Device], *, budget: int = 0
) -> ArtifactStore:
    """The store of a configuration under the warmup cache ``root``; `None` stores nothing. ``config.kv_pages`` does
    not matter.

    ``budget`` is the memory budget in bytes per device: it decides ``kv_pages``, which the store keeps.
    """
    return ArtifactStore(root, fingerprint(model, config, devices, budget=budget))


@dataclasses.dataclass
class Prepared:
    """A table whose programs can be called, by name.

    ``unchanged``: every one was loaded from the store, and this set has passed the proof before, so one request proves
    it again.
    """

    mode: Mode
    programs: Sequence[Program]
    executables: dict[str, Executable]
    memory: dict[str, ProgramMemory]
    unchanged: bool
    _store: ArtifactStore
    _xla_cache: XlaCache | None  # manual
    _report: WarmupReport
    _guard: Guard
    _describer: ArgumentDescriber
    _forget: dict[str, Callable[[], None]]  # for each program that came out of a cache: makes the cache forget it
    _pending: list[Pending]

    def allocate(self, engine: WarmableEngine) -> None:
        """`WarmableEngine.allocate`, which runs the programs that make the decode state and the prefixes."""
        try:
            engine.allocate()
        except Exception as error:  # whatever XLA raises
            restored = [program for program in self.programs if not program.arguments and program.name in self._forget]
            if not restored:
                raise
            for program in restored:
                self._recompile(engine, program, f"buffers cannot be made: {type(error).__name__}: {error}")
            engine.allocate()

    def touch_all(self, engine: WarmableEngine) -> None:
        """Runs every program once on the engine's real buffers, which must be allocated; in mode none, does nothing.

        A first run costs far more than a later one (on CPU, XLA prepares each matrix product: 0.5 s for 30 layers), so
        programs that work on a prefix alone run beside the others, as they do in serving, and beside each other.

        A program out of a cache that fails here is compiled again, once. What has run enters the manifest.

        Raises:
          WarmupError: a program failed, by name.
        """
        if self.mode == "none":
            return
        self._report.touching()
        lanes = touch_lanes(self.programs, engine.config.prefixes)
        with concurrent.futures.ThreadPoolExecutor(len(lanes), thread_name_prefix="touch") as pool:
            rests = list(pool.map(lambda lane: self._touch(engine, lane), lanes))
        for failed, rest in rests:
            while failed is not None:
                self._recompile(engine, rest[0], failed)
                self.allocate(engine)  # the failed run may have taken the donated buffers with it
                failed, rest = self._touch(engine, rest)
        self._store.commit(
            self._pending,
            arguments={program.name: self._describer.describe(program) for program in self.programs},
            groups=self._describer.groups,
        )
        if self._store.root is not None and self._store.writable and not self.unchanged:
            used = self._xla_cache.folder if self._xla_cache else self._store.folder
            keep_within_limit(self._store.root, keep=used)

    def _touch(self, engine: WarmableEngine, lane: Sequence[Program]) -> tuple[str | None, Sequence[Program]]:
        """Runs programs one after another. Where one that came out of a cache fails, returns why, and those that are left from it on."""
        for index, program in enumerate(lane):
            began = time.perf_counter()
            try:
                naming(program, "run", functools.partial(engine.touch, program.name))
            except WarmupError as error:
                if program.name not in self._forget:
                    raise
                return str(error), lane[index:]
            self._report.touched(program.name, time.perf_counter() - began)
        return None, []

    def record_proof(self, seconds: float, requests: int) -> None:
        """The whole serving path has been proven with these programs: the next unchanged start proves it with one
        request."""
        if self.mode == "aot":
            self._store.record_proof(self.mode, seconds, requests)

    def _recompile(self, engine: WarmableEngine, program: Program, why: str) -> None:
        """Replaces a program that came out of a cache and does not run."""
        logger.warning("warmup cache: compiling program %s again: %s", program.name, one_line(why))
        self._forget.pop(program.name)()
        self.unchanged = False
        if self.mode == "manual":
            program.function.clear_cache()  # the executable is in there
            (done,) = compile_programs([program], self._guard, lambda done: done, cache=self._xla_cache)
        else:
            with aot.no_persistent_cache():
                (done,) = compile_programs([program], self._guard, lambda done: done)
            self.executables[program.name] = done.compiled
        self._report.prepared(
            program.name, "compiled", done.memory, trace=done.seconds_trace, compile=done.seconds_compile
        )
        engine.install(self.executables)


def prepare(
    engine: WarmableEngine,
    mode: Mode,
    store: ArtifactStore,
    *,
    report: WarmupReport,
    guard: Guard,
    workers: int | None = None,
) -> Prepared:
    """Makes every program of the table callable: compiled (manual), loaded or compiled (aot), or left to first use
    (none).

    ``workers`` is the number of threads that load or compile; by default one per core.

    Raises:
      WarmupError: a program failed, by name; `DonationLost` where one does not write its donated argument in place.
    """
    programs = engine.programs()
    report.begin([program.name for program in programs])
    describer = ArgumentDescriber({"kv_pages": engine.config.kv_pages})
    xla_cache: XlaCache | None = None
    forget: dict[str, Callable[[], None]] = {}
    pending: list[Pending] = []
    unchanged = False
    memory: dict[str, ProgramMemory] = {}
    executables: dict[str, Executable] = {program.name: program.function for program in programs}
    match mode:
        case "none":
            pass
        case "manual":
            xla_cache = use_xla_cache(store.root, store.fingerprint.platform)
            for done in manual.compile_table(programs, xla_cache, guard, report, workers=workers):
                memory[done.program.name] = done.memory
                if xla_cache is not None and done.keys:
                    forget[done.program.name] = functools.partial(xla_cache.distrust, done.keys)
        case "aot":
            loaded = aot.load_or_compile(programs, engine.devices, store, describer, guard, report, workers=workers)
            for program in programs:
                item = loaded[program.name]
                executables[program.name], memory[program.name] = item.compiled, item.memory
                if item.from_store:
                    forget[program.name] = functools.partial(store.discard, program.name)
                if item.pending is not None:
                    pending.append(item.pending)
            unchanged = store.proven and all(item.from_store for item in loaded.values())
        case _:
            raise ValueError(f"no warmup mode {mode!r}: manual, aot or none")
    return Prepared(
        mode, programs, executables, memory, unchanged, store, xla_cache, report, guard, describer, forget, pending
    )


def prepare_fitting(
    make: Callable[[EngineConfig], Engine],
    config: EngineConfig,
    mode: Mode,
    store: ArtifactStore,
    budget: int,
    *,
    report: WarmupReport,
    guard: Guard,
    workers: int | None = None,
) -> tuple[Engine, Prepared, MemoryPlan]:
    """Resolves the KV pages, makes the engine, prepares its table and checks that all of it fits ``budget`` bytes per
    device.

    The number of pages comes from the store, if an earlier start resolved it and it fits, and is recorded there otherwise. If the
    executables turn out to take more than was estimated, the pages are found once more from their own numbers, and
    what depends on the pages is prepared again. ``config.kv_pages`` is not read.

    Raises:
      WarmupError: as `prepare`. `DoesNotFit`: the configuration does not fit, with both numbers and what would.
    """
    pages = resolve_kv_pages(make, config, budget, stored=store.resolved.get("kv_pages"))
    engine = make(dataclasses.replace(config, kv_pages=pages))
    prepared = prepare(engine, mode, store, report=report, guard=guard, workers=workers)
    plan = measure(engine, budget, prepared.memory)
    if not plan.fits:
        pages = resolve_kv_pages(make, config, budget, memory=prepared.memory)
        logger.info("the programs need more memory than estimated: %d KV pages instead of %d", pages, plan.kv_pages)
        engine = make(dataclasses.replace(config, kv_pages=pages))
        prepared = prepare(engine, mode, store, report=report, guard=guard, workers=workers)
        plan = measure(engine, budget, prepared.memory)
    plan.check(make)
    store.record_resolved({"kv_pages": pages})
    return engine, prepared, plan
