"""Starts on eight devices, split over all axes at once: warmup makes every program that serving calls, and the store gives them back."""

import dataclasses
import pathlib
import sys

import jax
import numpy as np
import pytest

from engine import weights
from engine.agreement import read_model
from engine.api import SamplingParams
from engine.checkpoints import open_checkpoint
from engine.jax_engine import JaxEngine
from engine.loader import load_weights
from warmup.guard import Guard
from warmup.prepare import open_store, prepare
from warmup.report import WarmupReport
from warmup.xla_cache import use_xla_cache

sys.path.append(str(pathlib.Path(__file__).parents[1] / "engine"))
from jax_harness import LAYOUT, Runner

pytestmark = pytest.mark.slow

MOE = pathlib.Path(__file__).parents[1] / "golden" / "families" / "qwen3_moe"
CONFIG = dataclasses.replace(
    LAYOUT, slots=8, max_len=64, kv_pages=9, page_size=16, prefill_buckets=(16,), batch_sizes=(4, 8), dp=2, ep=2, tp=2
)
ON_CPU = dataclasses.replace(CONFIG, call_bytes=1, attention="native")
SCANNED = dataclasses.replace(CONFIG, layers="scanned")


@pytest.fixture
def root(tmp_path):
    yield tmp_path / "cache"
    use_xla_cache(None, "")
    jax.config.update("jax_enable_compilation_cache", True)


def start(mode, root, config):
    """A start up to ready, and then a few requests. Returns what was made anew before and after, and from where."""
    checkpoint, devices = open_checkpoint(MOE), jax.devices()[:8]
    model = read_model(checkpoint)
    with Guard() as guard:
        engine = JaxEngine(model, config, devices)
        report = WarmupReport(mode, guard=guard)
        prepared = prepare(engine, mode, open_store(root, model, config, devices), report=report, guard=guard)
        engine.install(prepared.executables)
        engine.set_weights(load_weights(checkpoint, model, engine.abstract_weights, stacker=lambda: engine))
        engine.allocate()
        prepared.touch_all(engine)
        guard.ready()
        golden, runner = np.load(MOE / "golden.npz"), Runner(engine)
        sequences = [runner.start(golden["prompt_0"].tolist(), slot, sampling=SamplingParams())[0] for slot in (0, 1, 3)]
        for _ in range(4):
            runner.step(sequences)  # one row in the fullest group: a batch of four
        sequences.append(runner.start(golden["prompt_0"].tolist(), 4, sampling=SamplingParams())[0])
        runner.step(sequences)  # two in group 0: a batch of eight
        engine.set_mask(1, None)
        assert [sequence.tokens for sequence in sequences[:3]] == [golden["greedy_0"][:6].tolist()] * 3
        assert sequences[3].tokens == golden["greedy_0"][:2].tolist()
        return guard.counts("startup"), guard.counts("serving"), {row.source for row in report.programs}


def test_nothing_is_made_after_ready_nor_in_a_second_start(root, monkeypatch):
    """Layers are scanned, and their weights put together on the devices, as on accelerators."""
    monkeypatch.setattr(weights, "STACKED_BYTES", 1)
    first, serving, _ = start("aot", root, SCANNED)
    assert first.compiles > 0 and serving.total == 0
    second, serving, sources = start("aot", root, SCANNED)
    assert (second.total, serving.total, sources) == (0, 0, {"aot"})


def test_manual(root):
    assert start("manual", root, ON_CPU)[1].total == 0
