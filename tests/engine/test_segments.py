"""Where a model is cut, by hand; that segments give the same tokens is in test_golden.py."""

import dataclasses

import jax
import pytest

from engine.config import EngineConfig, LayerKind, ModelConfig
from engine.jax_engine import JaxEngine
from engine.segments import segments

MODEL = ModelConfig("llama", 64, 16, 32, 30, 2, 1, 8, 64)
CONFIG = EngineConfig(slots=2, max_len=32, kv_pages=3, prefill_buckets=(16, 32), batch_sizes=(1, 2), call_bytes=50)


def cut(rows=1, *, layer_bytes=10, model=MODEL, **changes):
    found = segments(model, dataclasses.replace(CONFIG, **changes), rows, layer_bytes)
    return [(segment.part, segment.layers.start, segment.layers.stop) for segment in found]


def test_a_call_reads_at_least_what_is_asked():
    assert cut() == [("layers", first, first + 5) for first in range(0, 30, 5)]  # 5 layers of 10 bytes
    assert cut(16) == cut()  # reading the weights takes as long as so few rows do
    assert cut(80) == [("layers", first, first + 1) for first in range(30)]  # five times the work
    assert cut(32) == [("layers", first, first + 3) for first in range(0, 30, 3)]  # 50 * 16 / (10 * 32) = 2.5 layers


def test_one_program_where_nothing_is_gained():
    assert cut(call_bytes=0) == []
    assert cut(layers="scanned") == []
    assert cut(call_bytes=151) == []  # 16 layers a call: not two of them
    assert cut(call_bytes=150) == [("layers", 0, 15), ("layers", 15, 30)]


def test_a_length_that_needs_fewer_programs_is_taken():
    """Seven layers: 4 + 3 and 2 + 2 + 2 + 1 need two programs, 3 + 3 + 1 too; the shortest of them is taken."""
    assert cut(call_bytes=20, model=dataclasses.replace(MODEL, num_layers=7)) == [
        ("layers", 0, 2),
        ("layers", 2, 4),
        ("layers", 4, 6),
        ("layers-2", 6, 7),
    ]
    # Eleven layers, four a call: 4 + 4 + 3. Nine: 4 + 4 + 1.
    assert [part for part, *_ in cut(call_bytes=40, model=dataclasses.replace(MODEL, num_layers=11))] == ["layers", "layers", "layers-2"]


def test_segments_follow_the_pattern_of_kinds():
    """Every third layer sees everything: three layers a call need one program, two would need three."""
    kinds = (LayerKind(window=8), LayerKind())
    model = dataclasses.replace(MODEL, num_layers=12, layer_kinds=kinds, layer_pattern=(0, 0, 1) * 4)
    assert cut(call_bytes=20, model=model) == [("layers", first, first + 3) for first in range(0, 12, 3)]


@pytest.fixture(scope="module")
def engine():
    return JaxEngine(MODEL, dataclasses.replace(CONFIG, call_bytes=1), jax.devices()[:1])


def test_the_table_has_each_program_once(engine):
    names = [program.name for program in engine.programs()]
    assert len(set(names)) == len(names)
    verbs = ["prefill/16", "prefill/32", "generate/1", "generate/2"]
    chains = [f"{verb}/{part}" for verb in verbs for part in ("begin", "layers", "end")]
    assert sorted(names) == sorted([*chains, "init_state", "init_prefix", "first_token", "insert", "fetch", "set_mask"])


def test_what_is_donated_adds_up(engine):
    """The layers' share, times the segments, and the rest that the end takes are all of the state."""
    programs = {program.name: program for program in engine.programs()}
    layers, end, whole = (programs[name].donated_bytes for name in ("generate/2/layers", "generate/2/end", "insert"))
    assert 30 * layers + end == whole
    assert layers == 2 * 3 * 32 * 8 * 4  # keys and values: 3 pages of 32 tokens, 8 floats of one head
    assert programs["generate/2/begin"].donates is None
