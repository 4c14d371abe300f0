"""Ahead-of-time warmup: executables are loaded from the artifact store; those missing are compiled, stored and loaded
back.

Loading is reading and deserializing, in parallel threads, and nothing else: no tracing, no lowering. A program that is
not stored, or whose entry is faulty, is lowered and compiled as the table says, with JAX's persistent cache off: an
executable that came out of that cache serializes without complaint and fails when it is loaded and run (CPU, jax 0.10
and 0.12). What then serves is not the fresh executable but the one reloaded from its own bytes, so that the touch-run
tests what the next start will load; only after that run does the entry enter the manifest (`warmup.prepare`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from engine.programs import Program
from warmup.compiling import Compilation, check_donation, compile_programs, memory_of, naming, worker_count
from warmup.errors import DonationLost
from warmup.fingerprint import ArgumentDescriber
from warmup.guard import Guard
from warmup.report import ProgramMemory, WarmupReport
from warmup.store import Artifact, ArtifactStore, Miss, Pending

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A program that can be called. ``pending`` is its new entry, to be committed after it has run."""

    compiled: jax.stages.Compiled
    memory: ProgramMemory
    from_store: bool
    pending: Pending | None = None


def load_or_compile(
    programs: Sequence[Program],
    devices: Sequence[jax.Device],
    store: ArtifactStore,
    describer: ArgumentDescriber,
    guard: Guard,
    report: WarmupReport,
    *,
    workers: int | None = None,
) -> dict[str, Loaded]:
    """Every program, by name. ``devices`` are those of the mesh, in its order.

    Raises: as `warmup.compiling.compile_programs`.
    """
    digests = {program.name: describer.digest(program) for program in programs}
    results: dict[str, Loaded] = {}
    missing: list[Program] = []

    def load(program: Program) -> Loaded | Miss:
        began = time.perf_counter()
        found = store.load(program.name, digests[program.name], lambda: describer.lines(program))
        loaded = found if isinstance(found, Miss) else load_artifact(program, found, devices)
        if isinstance(loaded, Loaded):
            report.prepared(program.name, "aot", loaded.memory, load=time.perf_counter() - began)
        return loaded

    if store.names:
        with concurrent.futures.ThreadPoolExecutor(workers or worker_count(), thread_name_prefix="load") as pool:
            outcomes = list(pool.map(load, programs))
    else:
        outcomes = [Miss("not in the cache", quiet=True)] * len(programs)
        if store.folder is not None:
            logger.info("warmup cache: compiling all %d programs: %s", len(programs), store.explain_miss())
    for program, outcome in zip(programs, outcomes, strict=True):
        if isinstance(outcome, Loaded):
            results[program.name] = outcome
            continue
        missing.append(program)
        if not outcome.quiet or store.names:
            logger.warning("warmup cache: compiling program %s again: %s", program.name, outcome.reason)
    if missing:
        with no_persistent_cache():
            fresh = compile_programs(
                missing,
                guard,
                lambda done: _store(done, digests[done.program.name], devices, store, report),
                workers=workers,
            )
        results.update(zip((program.name for program in missing), fresh, strict=True))
    return results


def load_artifact(program: Program, artifact: Artifact, devices: Sequence[jax.Device]) -> Loaded | Miss:
    """Makes a stored executable callable on these devices, or says why it cannot be."""
    in_tree = jax.tree.structure((program.arguments, {}))
    out_tree = jax.tree.structure(artifact.out_tree)
    try:
        compiled = serialize_executable.deserialize_and_load(
            artifact.payload, in_tree, out_tree, backend=devices[0].client, execution_devices=devices
        )
        memory = memory_of(compiled, code=len(artifact.payload))
        check_donation(program, memory)
    except DonationLost as error:
        return Miss(str(error))
    except Exception as error:  # whatever XLA or pickle raise: the entry is bad, and compiling is the remedy
        return Miss(
            f"it cannot be loaded: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else error!r}"
        )
    return Loaded(compiled, memory, from_store=True)


def serialize(program: Program, compiled: jax.stages.Compiled) -> Artifact:
    """The bytes of an executable, with its output tree."""
    payload, _, out_tree = serialize_executable.serialize(compiled)
    return Artifact(payload, jax.tree.unflatten(out_tree, range(out_tree.num_leaves)))


def _store(
    done: Compilation, digest: str, devices: Sequence[jax.Device], store: ArtifactStore, report: WarmupReport
) -> Loaded:
    program = done.program
    began = time.perf_counter()
    pending = None
    if not store.writable:
        loaded = Loaded(done.compiled, done.memory, from_store=False)
    else:
        artifact = naming(program, "serialize", lambda: serialize(program, done.compiled))
        reloaded = load_artifact(program, artifact, devices)
        if isinstance(reloaded, Miss):
            logger.warning("warmup cache: program %s is not stored: %s", program.name, reloaded.reason)
            loaded = Loaded(done.compiled, done.memory, from_store=False)
        else:
            pending = naming(program, "be stored", lambda: store.put(program.name, artifact, digest))
            loaded = dataclasses.replace(reloaded, from_store=False, pending=pending)
    report.prepared(
        program.name,
        "compiled",
        loaded.memory,
        trace=done.seconds_trace,
        compile=done.seconds_compile,
        load=time.perf_counter() - began,
    )
    return loaded


@contextlib.contextmanager
def no_persistent_cache() -> Iterator[None]:
    """JAX's persistent cache is off inside the block, for all threads."""
    option = "jax_enable_compilation_cache"
    before = getattr(jax.config, option)
    jax.config.update(option, False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update(option, before)
        compilation_cache.reset_cache()
