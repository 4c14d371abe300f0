"""The memory plan: does a configuration fit the device, and how many KV pages does it get.

Per device, in bytes::

    weights                     the abstract weights
    KV pages + decode state     the donated argument of the programs that take the decode state
    prefixes                    as many prefix buffers as may be in flight
    temporaries                 the largest of a prefill and the largest of the programs that take the state:
                                one of each can be in flight
    code                        all executables
    ----------------------------------------------------------------------------------------------------
    at most the budget

Everything but temporaries and code is known from abstract shapes before anything is compiled or allocated. Those two
are estimated when the number of KV pages is found (`resolve_kv_pages`; the number is then stored and never found
again), and known from each executable's own ``memory_analysis`` once the table is compiled (`measure`), still before
the pool is allocated.

The budget comes from what the device *has*, never from what happens to be free, so a restart finds the same number.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import jax

from engine.config import EngineConfig, ModelConfig
from engine.programs import Program, tree_bytes
from engine.sharding import device_model
from warmup.errors import DoesNotFit, WarmupError
from warmup.report import ProgramMemory, format_table

logger = logging.getLogger(__name__)

ACCELERATOR_SHARE = 0.85  # of an accelerator's memory; the rest is the runtime's and for fragmentation
HOST_SHARE = 0.5  # of the RAM

# Bytes of one program's code on an accelerator. Llama-3-8B, scanned, for v5e: 10 MiB where the model is in it, 2 MiB
# where not.
_CODE_MODEL, _CODE_OTHER = 12 * 2**20, 2 * 2**20
_MARGIN = 1.25  # of the estimate: padding to tiles
_ATTENTION_BLOCK = 256  # positions that attention reads at once, at most
_SCORED_ROWS = 32  # prompt positions whose log-probs are computed at once


class PlannableEngine(Protocol):
    """What the plan needs of an engine; nothing is allocated for it."""

    model: ModelConfig
    config: EngineConfig

    @property
    def abstract_weights(self) -> object: ...  # pytree of ShapeDtypeStruct

    def programs(self) -> tuple[Program, ...]: ...


Factory = Callable[[EngineConfig], PlannableEngine]


def memory_budget(option: int | None, devices: Sequence[jax.Device]) -> int:
    """Bytes per device: ``option`` (``--memory``) where given, else 85 % of an accelerator's memory, half of the RAM
    on CPU.

    On CPU several devices share one RAM, and each gets its part. For devices that are not here:
    `warmup.target.Target.hbm`.

    Raises:
      WarmupError: the device does not tell how much it has.
    """
    if option is not None:
        return option
    device = devices[0]
    if device.platform == "cpu":
        return int(HOST_SHARE * ram_bytes()) // len(devices)
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if not limit:
        raise WarmupError(f"{device.device_kind} does not tell how much memory it has: give --memory")
    return int(ACCELERATOR_SHARE * limit)


def ram_bytes() -> int:
    """The machine's RAM, or the limit of this process's control group if that is less."""
    ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                text = file.read().strip()
        except OSError:
            continue  # no such control group here
        if text.isdigit():
            ram = min(ram, int(text))
    return ram


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What a configuration takes on each device, in bytes, and of how much."""

    budget: int
    weights: int
    state: int  # KV pages included
    prefixes: int
    temporaries: int
    code: int
    kv_pages: int
    measured: bool  # temporaries and code are the executables' own numbers, not estimates
    programs: tuple[tuple[str, ProgramMemory], ...]
    config: EngineConfig

    @property
    def total(self) -> int:
        return self.weights + self.state + self.prefixes + self.temporaries + self.code

    @property
    def fits(self) -> bool:
        return self.total <= self.budget

    def check(self, make: Factory | None = None) -> None:
        """Raises `DoesNotFit` with both numbers, and with what would fit where ``make`` is given to find it."""
        if self.fits:
            return
        raise DoesNotFit(f"{self._sentence()}{_advice(make, self.config, self.budget) if make else ''}")

    def _sentence(self) -> str:
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in self._parts())
        return (
            f"{format_bytes(self.total)} per device are needed with --slots {self.config.slots} "
            f"and --max-len {self.config.max_len} "
            f"({parts}), and the budget is {format_bytes(self.budget)} (--memory)"
        )

    def _parts(self) -> list[tuple[str, int]]:
        return [
            ("weights", self.weights),
            (f"decode state with {self.kv_pages} KV pages" + (" in each group" if self.config.groups > 1 else ""), self.state),
            (f"{self.config.prefixes} prefixes", self.prefixes),
            ("temporaries" + ("" if self.measured else " (estimated)"), self.temporaries),
            ("code" + ("" if self.measured else " (estimated)"), self.code),
        ]

    def table(self) -> str:
        """Programs with their memory, then the sums and the verdict."""
        rows: list[tuple[str, ...]] = [("program", "arguments", "output", "aliased", "temporary", "code")]
        for name, memory in self.programs:
            sizes = (memory.argument, memory.output, memory.alias, memory.temp, memory.code)
            rows.append((name, *(format_bytes(size) for size in sizes)))
        parts = [
            (name, format_bytes(size))
            for name, size in [*self._parts(), ("total", self.total), ("budget", self.budget)]
        ]
        verdict = "fits" if self.fits else "does not fit"
        return f"{format_table(rows)}\n\n{format_table(parts)}\n{verdict}, per device"


def measure(engine: PlannableEngine, budget: int, memory: Mapping[str, ProgramMemory] | None = None) -> MemoryPlan:
    """The plan of an engine. ``memory`` is what the executables say (`Prepared.memory`); without it, estimates.

    ``budget`` is in bytes per device.
    """
    programs = engine.programs()
    known = dict(memory or {})
    measured = all(program.name in known for program in programs)
    rows = tuple((program.name, known.get(program.name) or _estimate(engine, program)) for program in programs)
    by_name = dict(rows)

    def largest(chosen: Sequence[Program]) -> int:
        return max((_transient(by_name[program.name], program) for program in chosen), default=0)

    owner = [program for program in programs if program.takes_state]
    others = [program for program in programs if not program.takes_state and not program.loads]
    state, prefix = state_bytes(programs), prefix_bytes(programs)
    return MemoryPlan(
        budget=budget,
        weights=tree_bytes(engine.abstract_weights),
        state=state,
        prefixes=prefix * engine.config.prefixes,
        temporaries=largest(owner) + largest(others),
        code=sum(row.code for _, row in rows),
        kv_pages=engine.config.kv_pages,
        measured=measured,
        programs=rows,
        config=engine.config,
    )


def resolve_kv_pages(
    make: Factory,
    config: EngineConfig,
    budget: int,
    *,
    stored: object = None,
    memory: Mapping[str, ProgramMemory] | None = None,
) -> int:
    """The number of KV pages, scratch included: what slots x max-len can use, or what the budget leaves if that is
    less.

    Args:
      make: describes an engine for a configuration, allocating nothing.
      config: the configuration; its ``kv_pages`` is not read.
      budget: bytes per device.
      stored: what an earlier start resolved, and a file has kept; it is used again, unless it cannot be right.
      memory: the executables' own numbers, where a compile has shown that the estimates were too low.

    Raises:
      DoesNotFit: not even one sequence of ``max_len`` fits; with both numbers and the remedy.
    """
    most = config.group_slots * config.pages_per_slot + 1
    least = config.pages_per_slot + 1
    if (
        type(stored) is int
        and least <= stored <= most
        and measure(make(dataclasses.replace(config, kv_pages=stored)), budget, memory).fits
    ):
        return stored
    if stored is not None:
        logger.warning("warmup cache: the stored number of KV pages, %.100r, cannot be used and is found again", stored)
    pages = _pages_that_fit(make, config, budget, memory)
    if pages >= least:
        return min(pages, most)
    plan = measure(make(dataclasses.replace(config, kv_pages=least)), budget, memory)
    raise DoesNotFit(f"not even one sequence of --max-len fits: {plan._sentence()}{_advice(make, config, budget)}")


def _pages_that_fit(
    make: Factory, config: EngineConfig, budget: int, memory: Mapping[str, ProgramMemory] | None
) -> int:
    """How many pages the budget holds. The total is linear in the number of pages, so two plans tell it; may be
    negative."""
    base = config.pages_per_slot + 1
    first = measure(make(dataclasses.replace(config, kv_pages=base)), budget, memory).total
    second = measure(make(dataclasses.replace(config, kv_pages=base + 1)), budget, memory).total
    return base + (budget - first) // (second - first)


def _advice(make: Factory, config: EngineConfig, budget: int) -> str:
    """The largest ``--slots`` and ``--max-len`` with which one whole sequence fits."""

    def fits(changed: EngineConfig) -> bool:
        return _pages_that_fit(make, changed, budget, None) >= changed.pages_per_slot + 1

    groups = config.groups
    slots = groups * (_largest(1, config.group_slots - 1, lambda slots: fits(with_slots(config, slots * groups))) or 0)
    length = _largest(config.page_size, config.max_len - 1, lambda length: fits(with_max_len(config, length)))
    found = [f"--slots {slots}"] if slots else []
    if length:
        found.append(f"--max-len {length}")
    if not found:
        return ". No --slots and no --max-len fit alone: give more --memory, more devices (--tp), or --quantize int8"
    return f". What fits: {' or '.join(found)}"


def _largest(low: int, high: int, good: Callable[[int], bool]) -> int | None:
    """The largest number in [low, high] that is good, if every smaller one is too; `None` if none is."""
    best = None
    while low <= high:
        middle = (low + high) // 2
        if good(middle):
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return best


def with_slots(config: EngineConfig, slots: int) -> EngineConfig:
    """The configuration with fewer slots, and no batch size beyond them."""
    sizes = tuple(size for size in config.batch_sizes if size < slots)
    return dataclasses.replace(config, slots=slots, batch_sizes=(*sizes, slots))


def with_max_len(config: EngineConfig, max_len: int) -> EngineConfig:
    """The configuration with shorter sequences, and no bucket that only longer ones need."""
    needed = [bucket for bucket in config.prefill_buckets if bucket < max_len]
    next_up = [bucket for bucket in config.prefill_buckets if bucket >= max_len][:1]
    return dataclasses.replace(config, max_len=max_len, prefill_buckets=tuple(needed + next_up))


def state_bytes(programs: Sequence[Program]) -> int:
    """Bytes of the decode state, KV pages included."""
    return max((program.donated_bytes for program in programs if program.takes_state), default=0)


def prefix_bytes(programs: Sequence[Program]) -> int:
    """Bytes of one prefix buffer."""
    others = (program for program in programs if not program.takes_state and not program.loads)
    return max((program.donated_bytes for program in others), default=0)


def _transient(memory: ProgramMemory, program: Program) -> int:
    """Bytes that exist only while a program runs or until its outputs are read. What a program without donation puts
    out is the state or a prefix itself, counted elsewhere."""
    outputs = max(0, memory.output - memory.alias) if program.donates is not None else 0
    return memory.temp + outputs


def _estimate(engine: PlannableEngine, program: Program) -> ProgramMemory:
    """An upper estimate of a program's temporaries and code, before there is an executable.

    Activations of one layer (attention's scores over a block of positions, gathered keys and values, the feed-forward
    width), and the logits with what sampling makes of them. XLA reuses the memory of one layer for the next.
    """
    config = engine.config
    model, groups = device_model(engine.model, config), config.groups
    known = ProgramMemory(
        argument=tree_bytes(program.arguments),
        alias=program.donated_bytes,
        code=0 if _platform(program) == "cpu" else _CODE_MODEL if program.rows else _CODE_OTHER,
    )
    if not program.rows:
        return known
    tokens = -(-program.rows // groups)  # of one group, and those that it runs for others' experts
    exchanged = tokens * config.ep
    heads, kv = model.num_heads, model.num_kv_heads * model.head_dim
    block = min(_ATTENTION_BLOCK, config.prefix_capacity)
    sequences = tokens if program.decodes else 1
    floats = (
        tokens * (6 * model.hidden_size + 3 * model.intermediate_size + 3 * heads * model.head_dim)
        + 2 * tokens * heads * block
        + (3 * exchanged * model.moe.per_token * model.hidden_size if model.moe else 0)  # each token once for each expert
        + 4 * sequences * kv * block
        + (8 * tokens if program.decodes else 8 + 2 * min(tokens, _SCORED_ROWS)) * model.vocab_size
    )
    return dataclasses.replace(known, temp=int(_MARGIN * 4 * floats))


def _platform(program: Program) -> str:
    for leaf in jax.tree.leaves(program.arguments):
        if leaf.sharding is not None:
            return str(next(iter(leaf.sharding.device_set)).platform)
    return "cpu"


def format_bytes(size: int) -> str:
    """In GiB, MiB or KiB, three digits."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} B"
