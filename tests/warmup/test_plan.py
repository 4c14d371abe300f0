"""The memory plan of the toy engine, whose bytes are counted by hand."""

import dataclasses

import jax
import pytest

from tests.warmup import toy
from warmup import plan as plans
from warmup.errors import DoesNotFit
from warmup.guard import Guard
from warmup.plan import format_bytes, measure, memory_budget, resolve_kv_pages, with_max_len, with_slots
from warmup.prepare import open_store, prepare_fitting
from warmup.report import ProgramMemory, WarmupReport

ROW = toy.HIDDEN * 4  # bytes of a row of float32: a KV page of the toy
WEIGHTS = toy.HIDDEN * ROW
PREFIX = 96 * ROW  # max_len 64 + chunk 32, in whole pages


def make(config):
    return toy.ToyEngine(config=config)


NOTHING = {program.name: ProgramMemory() for program in toy.ToyEngine().programs()}


def test_the_sum_is_counted_by_hand():
    memory = NOTHING | {
        "prefill/16": ProgramMemory(temp=700),
        "prefill/32": ProgramMemory(temp=1000, output=PREFIX + 4, alias=PREFIX, code=50),
        "insert": ProgramMemory(temp=300, output=5 * ROW + 4, alias=5 * ROW + 4),
        "generate/2": ProgramMemory(temp=100, output=5 * ROW + 8, alias=5 * ROW + 4, code=60),
        "init_state": ProgramMemory(temp=20, output=5 * ROW + 4),
    }
    plan = measure(toy.ToyEngine(), 10_000, memory)
    assert plan.measured
    assert (plan.weights, plan.state, plan.prefixes) == (WEIGHTS, 5 * ROW + 4, 2 * PREFIX)
    assert plan.temporaries == 1004 + 300  # the largest prefill with its output of 4, and the largest of the owner's
    assert plan.code == 110
    assert plan.total == WEIGHTS + 5 * ROW + 4 + 2 * PREFIX + 1304 + 110
    assert plan.fits
    assert not dataclasses.replace(plan, budget=plan.total - 1).fits
    assert dataclasses.replace(plan, budget=plan.total).fits


def base(pages: int) -> int:
    return WEIGHTS + pages * ROW + 4 + 2 * PREFIX


def test_pages_are_what_the_slots_can_use_where_the_budget_allows():
    # 2 slots of 64 tokens, pages of 32: 4, and the scratch page.
    assert resolve_kv_pages(make, toy.engine_config(), 10**9, memory=NOTHING) == 5


@pytest.mark.parametrize("pages", [3, 4])
def test_pages_are_what_the_budget_leaves(pages):
    config = toy.engine_config(kv_pages=0)
    assert resolve_kv_pages(make, config, base(pages), memory=NOTHING) == pages
    assert resolve_kv_pages(make, config, base(pages) + ROW - 1, memory=NOTHING) == pages


def test_less_than_one_sequence_is_refused_with_both_numbers():
    with pytest.raises(DoesNotFit) as caught:
        resolve_kv_pages(make, toy.engine_config(), base(3) - 1, memory=NOTHING)
    message = str(caught.value)
    assert format_bytes(base(3)) in message and format_bytes(base(3) - 1) in message
    assert "--slots 2" in message and "--max-len 64" in message


def test_the_refusal_names_the_largest_max_len_that_fits():
    config = toy.engine_config(max_len=1024, prefill_buckets=(16,))

    def need(max_len):  # the least that a layout takes by the estimates
        changed = with_max_len(config, max_len)
        return measure(make(dataclasses.replace(changed, kv_pages=changed.pages_per_slot + 1)), 0).total

    with pytest.raises(DoesNotFit, match=r"What fits: (--slots 1 or )?--max-len (\d+)$") as caught:
        resolve_kv_pages(make, config, need(608))
    length = int(str(caught.value).rsplit(" ", 1)[1])
    assert need(length) <= need(608) < need(length + 1)


def test_a_stored_number_is_used_again():
    assert resolve_kv_pages(make, toy.engine_config(), 10**9, stored=4, memory=NOTHING) == 4


@pytest.mark.parametrize("stored", [4, 2, 6, 0, -5, 10**30, True, 3.5, "4", [4], {}])
def test_a_stored_number_that_cannot_be_right_is_found_again(stored, caplog):
    """One that does not fit (4), less than a sequence needs (3), more than all slots can use (5), and what is no number."""
    assert resolve_kv_pages(make, toy.engine_config(), base(4) - 1, stored=stored, memory=NOTHING) == 3
    (line,) = caplog.messages
    assert "KV pages" in line and repr(stored) in line


def test_layouts_shrink_whole():
    config = toy.engine_config(slots=8, batch_sizes=(1, 2, 4, 8), max_len=512, prefill_buckets=(16, 32, 64, 128))
    assert with_slots(config, 3).batch_sizes == (1, 2, 3)
    assert with_slots(config, 1).batch_sizes == (1,)
    assert with_max_len(config, 40).prefill_buckets == (16, 32, 64)
    assert with_max_len(config, 300).prefill_buckets == (16, 32, 64, 128)


def test_the_budget_is_what_the_device_has(monkeypatch):
    devices = jax.devices()[:1]
    monkeypatch.setattr(plans, "ram_bytes", lambda: 24 * 2**30)
    assert memory_budget(None, devices) == 12 * 2**30
    assert memory_budget(None, devices * 2) == 6 * 2**30  # two devices of one machine share its memory
    assert memory_budget(5, devices) == 5

    class Accelerator:
        platform, device_kind = "gpu", "a GPU"

        def memory_stats(self):
            return {"bytes_limit": 1000, "bytes_in_use": 900}

    assert memory_budget(None, [Accelerator()]) == 850


def start(root, budget, guard):
    engine = toy.ToyEngine()
    config = toy.engine_config(kv_pages=0)
    store = open_store(root, engine.model, config, engine.devices, budget=budget)
    made, prepared, plan = prepare_fitting(
        make, config, "aot", store, budget, report=WarmupReport("aot", guard=guard), guard=guard
    )
    made.install(prepared.executables)
    made.set_weights()
    prepared.allocate(made)
    prepared.touch_all(made)
    return made, plan


@pytest.mark.slow
def test_a_start_resolves_once_and_a_restart_does_not_drift(tmp_path, monkeypatch):
    with Guard() as guard:
        engine, plan = start(tmp_path / "cache", 10**9, guard)
        assert engine.config.kv_pages == 5 and plan.measured and plan.fits
        # Were the number found again, it would be another one now.
        monkeypatch.setattr(plans, "_pages_that_fit", lambda *_: 3)
        before = guard.counts("startup").compiles
        engine, _ = start(tmp_path / "cache", 10**9, guard)
        assert engine.config.kv_pages == 5 and guard.counts("startup").compiles == before


@pytest.mark.slow
def test_estimates_that_were_too_low_are_corrected_from_the_executables(tmp_path, monkeypatch):
    monkeypatch.setattr(plans, "_estimate", lambda engine, program: ProgramMemory())
    monkeypatch.setattr(  # each owner's program claims a page's worth of temporaries
        plans, "_transient", lambda memory, program: ROW if memory.argument and program.takes_state else 0
    )
    with Guard() as guard:
        engine = toy.ToyEngine()
        store = open_store(None, engine.model, engine.config, engine.devices)
        # The code of the executables is measured too: the serialized size, known only to AOT with a store; here 0.
        made, _, plan = prepare_fitting(
            make, toy.engine_config(), "manual", store, base(5), report=WarmupReport("manual"), guard=guard
        )
    assert made.config.kv_pages == 4 and plan.fits


def test_the_table_tells_the_verdict():
    plan = measure(toy.ToyEngine(), 100)
    text = plan.table()
    assert "does not fit, per device" in text and "temporaries (estimated)" in text and "budget" in text
    for program in toy.ToyEngine().programs():
        assert program.name in text
