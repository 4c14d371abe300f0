"""The commands that serve nobody: ``generate``, ``build``, ``plan``, ``cache``."""

from __future__ import annotations

import dataclasses
import logging
import queue
import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from engine.agreement import read_model
from engine.checkpoints import open_checkpoint, read_config
from engine.config import EngineConfig, ModelConfig
from engine.families import load_config
from engine.jax_engine import JaxEngine
from engine.kernels import Attention
from server import validation
from server.config import ServeConfig
from server.errors import ServerError, StartError
from server.logs import configure_logging
from server.metrics import Metrics
from server.models import resolve_model
from server.orchestrator import Orchestrator
from server.request import Delta, TokenLogprob, Usage
from server.startup import OpenModel, engine_config, open_adapters, open_model, readable_errors, select_devices, warm_engine
from warmup import cache as warmup_cache
from warmup import plan as memory_plan
from warmup import target as targets
from warmup.guard import Guard
from warmup.plan import format_bytes
from warmup.report import WarmupReport, format_table

if TYPE_CHECKING:
    from server.cli import GenerateOptions


class QueueSink:
    """Puts a request's output into a queue: deltas, then `Usage` or the error."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Delta | Usage | ServerError] = queue.SimpleQueue()

    def prompt_logprobs(self, logprobs: tuple[TokenLogprob | None, ...]) -> None:
        raise AssertionError("nobody asked for the prompt's log-probs")

    def delta(self, delta: Delta) -> None:
        self.events.put(delta)

    def finish(self, usage: Usage) -> None:
        self.events.put(usage)

    def fail(self, error: ServerError) -> None:
        self.events.put(error)


def generate(config: ServeConfig, options: GenerateOptions) -> int:
    """Answers the prompts and prints the answers in order, each as it comes; samples of one prompt one after another."""
    configure_logging(config.log_format)
    logging.getLogger().setLevel(logging.WARNING)
    opened = open_model(config)
    with Guard() as guard:
        warm = warm_engine(config, opened, WarmupReport(config.warmup, guard=guard), guard)
        limits = opened.limits(config.served_model_name, warm.engine.config.max_len)
        samples = len(options.prompts) * (options.sampling.n or 1)
        orchestrator = Orchestrator(warm.engine, opened.tokenizer, metrics=Metrics(), max_queue=samples)
        orchestrator.start()
        orchestrator.open()
        try:
            sinks = []
            for prompt in options.prompts:
                ids = _encode(opened, prompt, options.chat)
                request = validation.build_request(options.sampling, ids, limits, request_id=secrets.token_hex(8))
                sink = QueueSink()
                orchestrator.submit(request, sink)
                sinks.append(sink)
            for sink in sinks:
                _print_answer(sink)
        except ServerError as error:
            raise StartError(error.message) from None
        finally:
            orchestrator.close()
    return 0


def _encode(opened: OpenModel, prompt: str, chat: bool) -> list[int]:
    if not chat:
        return opened.tokenizer.encode(prompt, parse_special=True)
    if opened.tokenizer.chat_template is None:
        raise StartError(f"{opened.path} has no chat template: leave out --chat")
    text = opened.tokenizer.chat_template.render([{"role": "user", "content": prompt}])
    return opened.tokenizer.encode_chat(text)


def _print_answer(sink: QueueSink) -> None:
    """The first sample as it comes; the others, which are generated at the same time, when it is done."""
    waiting: dict[int, list[str]] = {}
    while True:
        event = sink.events.get()
        match event:
            case Delta(sample=0, text=text):
                print(text, end="", flush=True)
            case Delta(sample=sample, text=text):
                waiting.setdefault(sample, []).append(text)
            case Usage():
                print()
                for _, texts in sorted(waiting.items()):
                    print("".join(texts))
                return
            case _:
                raise event


def build(config: ServeConfig, target: str | None) -> int:
    """Compiles every program into the warmup cache; for this machine's device they are run once too."""
    configure_logging(config.log_format)
    if config.warmup_cache is None:
        raise StartError("--warmup-cache off: there is nowhere to store what is built; give a folder")
    began = time.monotonic()
    with Guard() as guard:
        if target is None:
            report = WarmupReport("aot", guard=guard)
            warm = warm_engine(dataclasses.replace(config, warmup="aot"), open_model(config), report, guard)
            plan, where, attention = warm.plan, "this machine", warm.engine.attention
            stored = [program.name for program in report.programs]
        else:
            built, attention = _compile(config, target, config.warmup_cache, guard)
            plan, report, where, stored = built.plan, built.report, target, list(built.stored)
    print(report.table())
    print()
    print(plan.table())
    print(attention.explain())
    print(f"\n{len(stored)} programs for {where} in {config.warmup_cache}, {time.monotonic() - began:.1f} s")
    return 0 if plan.fits else 1


def plan(config: ServeConfig, target: str | None) -> int:
    """Compiles every program, stores and starts nothing, and prints shapes, memory and the verdict."""
    configure_logging(config.log_format)
    logging.getLogger().setLevel(logging.WARNING)
    with Guard() as guard:
        built, attention = _compile(config, target, None, guard)
    print(built.plan.table())
    print(attention.explain())
    return 0 if built.plan.fits else 1


def _compile(config: ServeConfig, target: str | None, root: Path | None, guard: Guard) -> tuple[targets.Build, Attention]:
    """Compiles for a TPU slice, or for this machine's devices, with abstract weights; and says who attends."""
    with readable_errors():
        model = _model_config(config)
        if target is None:
            devices = tuple(select_devices(config))
            budget = memory_plan.memory_budget(config.memory, devices)
        else:
            slice_ = targets.parse_target(target)
            devices = targets.target_devices(slice_, config.tp)
            budget = config.memory or slice_.budget
        layout = engine_config(config, model, devices[0].platform, open_adapters(config, model))

        def make(layout: EngineConfig) -> JaxEngine:
            return JaxEngine(model, layout, devices)

        report = WarmupReport("aot", guard=guard)
        built = targets.build_target(make, layout, devices, root, budget, guard=guard, report=report)
        return built, make(built.plan.config).attention


def _model_config(config: ServeConfig) -> ModelConfig:
    """The model's configuration; a directory needs nothing but its ``config.json``, but a tied head is looked at if it is there."""
    path = Path(resolve_model(config.model))
    if path.is_dir():
        model = load_config(read_config(path))
        if not model.tie_embeddings or not any(path.glob("*.safetensors")):
            return model
    return read_model(open_checkpoint(path))


def cache(config: ServeConfig, action: str) -> int:
    """Lists what the warmup cache holds, or removes what was used longest ago."""
    if config.warmup_cache is None:
        raise StartError("--warmup-cache off: there is no cache")
    root = config.warmup_cache
    with readable_errors():
        removed = warmup_cache.prune(root, warmup_cache.DEFAULT_LIMIT) if action == "prune" else []
        items = warmup_cache.list_cache(root)
    rows = [("folder", "for", "programs", "size", "last used")]
    for item in items:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(item.used))
        rows.append((item.path.name, item.label, str(item.programs), format_bytes(item.size), used))
    print(format_table(rows))
    if action == "prune":
        freed = format_bytes(sum(item.size for item in removed))
        print(f"removed {len(removed)} folders, {freed}; kept at most {format_bytes(warmup_cache.DEFAULT_LIMIT)}", file=sys.stderr)
    return 0
