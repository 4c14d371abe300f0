"""The table of programs of an engine: every kind of program, for every size that serving can call.

Kinds are modules of ``engine/kinds``: each tells its rows of the table, and how one is run once. Warmup, memory plan, report
and cross-target builds know the rows only.
"""

from __future__ import annotations

from jax.sharding import Mesh

from engine.config import EngineConfig, ModelConfig
from engine.kernels import Attention
from engine.kinds import KINDS, Kind
from engine.kinds.builder import Builder
from engine.programs import Program
from engine.segments import Segment
from engine.sharding import device_config, device_model, ways
from engine.state import DecodeState, Prefix
from engine.weights import Weights


def make_table(
    model: ModelConfig,
    config: EngineConfig,
    mesh: Mesh,
    attention: Attention,
    weights: Weights,  # abstract, as are state and prefix
    state: DecodeState,
    prefix: Prefix,
) -> tuple[dict[str, Program], dict[str, tuple[Segment, ...]]]:
    """The programs by name, and the segments of those verbs that run in several programs, by the name of the whole.

    Raises `ValueError` where a kind's program has another kind's name, by which it could not be run.
    """
    of_device = device_model(model, config), device_config(config)
    build = Builder(*of_device, config.batch_sizes, ways(config), mesh, attention, weights, state, prefix)
    table: dict[str, Program] = {}
    for kind in KINDS.values():
        for program in kind.programs(build):
            if program.name.split("/")[0] != kind.name or program.name in table:
                raise ValueError(f"the kind {kind.name!r} makes a program {program.name!r}: names are its own, each once")
            table[program.name] = program
    return table, build.chains


def kind_of(name: str) -> tuple[Kind, str, str]:
    """The kind, size and part of a program's name: of "generate/8/layers" generate, "8" and "layers"."""
    kind, size, part = [*name.split("/"), "", ""][:3]
    return KINDS[kind], size, part
