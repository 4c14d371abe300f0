"""What moves between devices in a compiled program: the collectives of its HLO, with how often each runs.

Loops count as often as they turn, where that is written in them (scanned layers); a loop whose turns are found at run time counts as
one turn.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import pathlib
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from engine.programs import Program

KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute", "ragged-all-to-all", "reduce-scatter")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([a-z][\w\-]*)\(")
_CALLED = re.compile(r"(?:calls|to_apply|body|branch_computations|true_computation|false_computation|called_computations)="
                     r"(\{[^}]*\}|%?[\w.\-]+)")  # fmt: skip
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_CONSTANT = re.compile(r"%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")
_BELOW = re.compile(r"ROOT .* compare\(%?[\w.\-]+, %?([\w.\-]+)\), direction=LT")
_ARRAY = re.compile(r"([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")
_LISTED = re.compile(r"replica_groups=\{\{([0-9,]*)\}")
_IOTA = re.compile(r"replica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?")


@dataclasses.dataclass(frozen=True)
class Collective:
    """Devices that meet, ``times`` in one run of the program. ``shape`` is what each has afterwards; of several arrays the largest."""

    kind: str  # of KINDS
    shape: str  # as HLO writes it: "f32[8,4096]"
    bytes: int  # of it
    axes: tuple[str, ...]  # of the mesh: those along which the devices that meet differ
    times: int

    def __str__(self) -> str:
        return f"{self.times} x {self.kind} of {self.shape} over {' and '.join(self.axes)}"


class Listing:
    """Lists the collectives of programs while they are compiled.

    A TPU's compiler has to print its HLO itself: what it fuses collectives with, JAX's own XLA cannot print.
    """

    def __init__(self, mesh: Mapping[str, int], platform: str):
        self.found: dict[str, list[Collective]] = {}  # by program
        self._mesh, self._printed = mesh, platform == "tpu"
        self._folder = tempfile.TemporaryDirectory(prefix="preheat-hlo-")

    def options(self, program: Program) -> dict[str, str | bool]:
        """What a program is to be compiled with."""
        return {"xla_dump_to": str(self._of(program)), "xla_dump_hlo_as_text": True} if self._printed else {}

    def add(self, program: Program, compiled: jax.stages.Compiled) -> None:
        if not self._printed:
            text = compiled.as_text() or ""
        else:
            (file,) = self._of(program).glob("*after_optimizations.txt")
            text = file.read_text()
        self.found[program.name] = collectives(text, self._mesh)

    def close(self) -> None:
        self._folder.cleanup()

    def _of(self, program: Program) -> pathlib.Path:
        return pathlib.Path(self._folder.name, program.name.replace("/", "-"))


def collectives(text: str, mesh: Mapping[str, int]) -> list[Collective]:
    """Those of one program's optimized HLO, the most bytes first. ``mesh`` are the sizes of its axes, in order."""
    computations, entry = _computations(text)
    counts: collections.Counter[tuple[str, str, int, tuple[str, ...]]] = collections.Counter()

    def visit(name: str, times: int) -> None:
        for line in computations.get(name, ()):
            found = _INSTRUCTION.match(line)
            if found is None:
                continue
            kind = found[2].removesuffix("-start")
            if kind in KINDS:
                shape, size = _largest(found[1])
                counts[kind, shape, size, _axes(line, mesh)] += times
            turns = _turns(line, computations) if kind == "while" else 1
            for called in _called(line):
                if kind not in KINDS:  # what a collective calls is its sum
                    visit(called, times * turns)

    visit(entry, 1)
    found = [Collective(*key, times) for key, times in counts.items()]
    return sorted(found, key=lambda one: (-one.bytes * one.times, one.kind, one.shape))


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation by its name, and the name of the first that runs."""
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if not line.startswith(" ") and (header := _COMPUTATION.match(line)) and not line.startswith("HloModule"):
            lines = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        else:
            lines.append(line)
    return computations, entry


def _turns(line: str, computations: Mapping[str, Sequence[str]]) -> int:
    """How often a loop turns: as XLA says, or up to what its condition counts from zero; 1 where neither tells."""
    if found := _TURNS.search(line):
        return int(found[1])
    named = _CONDITION.search(line)
    condition = "\n".join(computations.get(named[1], ())) if named else ""
    bound = _BELOW.search(condition)
    constants = dict(_CONSTANT.findall(condition))
    return int(constants.get(bound[1], 1)) if bound else 1


def _called(line: str) -> Iterator[str]:
    for names in _CALLED.findall(line):
        for name in names.strip("{}").split(","):
            yield name.strip().removeprefix("%")


def _largest(shape: str) -> tuple[str, int]:
    """The largest array of a shape, which may be a tuple's, and its bytes."""

    def size(array: Sequence[str]) -> int:
        kind, extents = array
        digits = re.search(r"\d+", kind)  # "pred" has none: a byte
        bits = int(digits[0]) if digits else 8
        return math.prod(int(extent) for extent in extents.split(",") if extent) * bits // 8

    largest = max(_ARRAY.findall(shape), key=size)
    return f"{largest[0]}[{largest[1]}]", size(largest)


def _axes(line: str, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of the mesh along which the devices of one group differ; all, where everybody meets."""
    if listed := _LISTED.search(line):
        group = [int(number) for number in listed[1].split(",") if number]
    elif iota := _IOTA.search(line):
        groups, extents, order = ([int(number) for number in (part or "").split(",") if number] for part in iota.groups())
        devices = np.arange(math.prod(extents)).reshape(extents)
        group = devices.transpose(order or range(len(extents))).reshape(groups)[0].tolist()
    else:
        group = list(range(math.prod(mesh.values())))
    places = np.unravel_index(group, tuple(mesh.values()))
    return tuple(axis for axis, along in zip(mesh, places, strict=True) if len(set(along.tolist())) > 1)
