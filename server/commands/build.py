"""``preheat build`` and ``preheat plan``: every program compiled, for this machine or for another; nothing is served.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from engine.agreement import read_model
from engine.checkpoints import open_checkpoint, read_config
from engine.config import EngineConfig, ModelConfig
from engine.families import load_config
from engine.jax_engine import JaxEngine
from server.commands import serve
from server.config.commands import ServeConfig
from server.errors import StartError
from server.start.model_files import resolve_model
from server.start.warm_engine import engine_config, open_adapters, readable_errors, select_devices
from server.telemetry.logs import configure_logging
from warmup import plan as memory_plan
from warmup import target as targets
from warmup.guard import Guard
from warmup.report import WarmupReport


def build(config: ServeConfig, target: str | None) -> int:
    """Compiles every program into the warmup cache; for this machine's devices they also run, alone and in the proof."""
    configure_logging(config.log_format)
    if config.warmup_cache is None:
        raise StartError("--warmup-cache off: there is nowhere to store what is built; give a folder")
    began = time.monotonic()
    if target is None:
        warm, report = serve.rehearse(config)
        plan, where, explained = warm.plan, "this machine", warm.engine.explain()
        stored = [program.name for program in report.programs]
    else:
        with Guard() as guard:
            built, explained = _compile(config, target, config.warmup_cache, guard)
        plan, report, where, stored = built.plan, built.report, target, list(built.stored)
    print(report.table())
    print()
    print(plan.table())
    print(explained)
    print(f"\n{len(stored)} programs for {where} in {config.warmup_cache}, {time.monotonic() - began:.1f} s")
    return 0 if plan.fits else 1


def plan(config: ServeConfig, target: str | None) -> int:
    """Compiles every program, stores and starts nothing, and prints shapes, memory and the verdict."""
    configure_logging(config.log_format)
    logging.getLogger().setLevel(logging.WARNING)
    with Guard() as guard:
        built, explained = _compile(config, target, None, guard)
    print(built.plan.table())
    print(explained)
    if moves := built.explain_moves():
        print(moves)
    return 0 if built.plan.fits else 1


def _compile(config: ServeConfig, target: str | None, root: Path | None, guard: Guard) -> tuple[targets.Build, str]:
    """Compiles for a TPU slice, or for this machine's devices, with abstract weights; and says what was chosen."""
    with readable_errors():
        model = _model_config(config)
        if target is None:
            devices = tuple(select_devices(config))
            budget = memory_plan.memory_budget(config.memory, devices)
        else:
            slice_ = targets.parse_target(target)
            devices = targets.target_devices(slice_, config.dp * config.ep * config.tp)
            budget = config.memory or slice_.budget
        layout = engine_config(config, model, devices[0].platform, open_adapters(config, model))

        def make(layout: EngineConfig) -> JaxEngine:
            return JaxEngine(model, layout, devices)

        report = WarmupReport("aot", guard=guard)
        built = targets.build_target(make, layout, devices, root, budget, guard=guard, report=report, list_moves=root is None)
        return built, make(built.plan.config).explain()


def _model_config(config: ServeConfig) -> ModelConfig:
    """The model's configuration; a directory needs nothing but its ``config.json``, but a tied head is looked at if it is there."""
    path = Path(resolve_model(config.model))
    if path.is_dir():
        model = load_config(read_config(path))
        if not model.tie_embeddings or not any(path.glob("*.safetensors")):
            return model
    return read_model(open_checkpoint(path))
