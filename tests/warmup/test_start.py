"""Whole starts of the toy engine, in each mode. Its tokens are known by hand; JAX's own events tell what was made
anew."""

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from engine.config import EngineConfig, ModelConfig
from engine.jax_engine import JaxEngine
from tests.warmup import toy
from warmup.errors import DonationLost, WarmupError
from warmup.prepare import touch_lanes
from warmup.xla_cache import use_xla_cache

pytestmark = pytest.mark.slow

REPO = Path(__file__).resolve().parents[2]
NAMES = ["init_state", "init_prefix", "prefill/16", "prefill/32", "insert", "generate/1", "generate/2"]


@pytest.fixture
def root(tmp_path):
    yield tmp_path / "cache"
    use_xla_cache(None, "")
    jax.config.update("jax_enable_compilation_cache", True)
    jax.clear_caches()


def command(mode: str, root: Path) -> list[str]:
    return [sys.executable, "-m", "tests.warmup.toy", mode, str(root)]


def environment() -> dict[str, str]:
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPO)}


def start(mode: str, root: Path) -> dict:
    """A start in a process of its own."""
    done = subprocess.run(command(mode, root), cwd=REPO, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "log": done.stderr}


def test_a_second_aot_start_makes_nothing(root):
    first, second = start("aot", root), start("aot", root)
    assert first["startup"]["compiles"] == len(NAMES)
    assert second["startup"] == {"traces": 0, "lowerings": 0, "compiles": 0, "cache_hits": 0}
    assert set(second["sources"].values()) == {"aot"}
    assert (first["unchanged"], second["unchanged"]) == (False, True)
    assert first["tokens"] == second["tokens"] == toy.TOKENS
    assert first["serving"]["compiles"] == second["serving"]["compiles"] == second["serving"]["traces"] == 0


def test_a_second_manual_start_traces_but_does_not_compile(root):
    first, second = start("manual", root), start("manual", root)
    assert first["startup"]["compiles"] == len(NAMES)
    assert (second["startup"]["compiles"], second["startup"]["cache_hits"]) == (0, len(NAMES))
    assert second["startup"]["traces"] == len(NAMES)
    assert set(second["sources"].values()) == {"cache"}
    assert first["tokens"] == second["tokens"] == toy.TOKENS
    assert first["serving"]["compiles"] == second["serving"]["compiles"] == second["serving"]["traces"] == 0


def test_none_compiles_on_first_use():
    result = toy.warm("none", None)
    assert result["tokens"] == toy.TOKENS
    assert result["startup"]["compiles"] == 2  # the two that make the buffers
    assert result["serving"]["compiles"] == 2  # the two batch sizes


def test_without_a_cache_nothing_is_stored(root, caplog):
    for mode in ("aot", "manual"):
        result = toy.warm(mode, None)
        assert result["tokens"] == toy.TOKENS and result["stored"] == []
    assert not root.exists()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("mode", ["manual", "aot"])
def test_a_lost_donation_is_an_error_by_name(root, mode):
    with pytest.raises(
        DonationLost, match=r"program generate/2 aliases 0 of the \d+ bytes of the decode state: the donation was lost"
    ):
        toy.warm(mode, root, lose_donation="generate/2")


@pytest.mark.parametrize("mode", ["manual", "aot"])
def test_a_program_that_fails_is_an_error_by_name(root, mode):
    with pytest.raises(WarmupError, match="program prefill/32 failed to lower: RuntimeError: broken on purpose"):
        toy.warm(mode, root, break_program="prefill/32")


@pytest.mark.parametrize("mode", ["manual", "aot"])
def test_a_touch_run_that_fails_is_an_error_by_name_and_nothing_is_stored(root, mode):
    with pytest.raises(WarmupError, match="program insert failed to run: RuntimeError: broken touch"):
        toy.warm(mode, root, break_touch="insert")
    assert toy.warm("aot", root)["sources"] == dict.fromkeys(NAMES, "compiled")


def test_prefill_is_touched_beside_the_owner_of_the_state():
    def names(prefixes, **options):
        return [[program.name for program in lane] for lane in touch_lanes(toy.ToyEngine(**options).programs(), prefixes)]

    owners = ["init_state", "init_prefix", "insert", "generate/1", "generate/2"]
    more = toy.engine_config(prefill_buckets=(4, 8, 16, 32))
    # Five of the owner's count as one of prefill: the largest goes to the empty lane, the rest in turn.
    assert names(2, config=more) == [[*owners, "prefill/16", "prefill/4"], ["prefill/32", "prefill/8"]]
    assert names(1) == [[*owners, "prefill/32", "prefill/16"]]


def test_the_report_of_a_start_names_sources_and_bytes(root):
    toy.warm("aot", root)
    report = toy.warm("aot", root)["report"]
    assert (report["state"], report["done"], report["total"], report["eta_seconds"]) == ("ready", 7, 7, 0)
    rows = {row["name"]: row for row in report["programs"]}
    assert list(rows) == NAMES
    state = 5 * toy.HIDDEN * 4 + 4  # kv_pages x HIDDEN float32, and the count
    assert rows["insert"]["alias_bytes"] == state
    assert (
        rows["insert"]["seconds_load"] > 0
        and rows["insert"]["seconds_compile"] == 0
        and rows["insert"]["code_bytes"] > 0
    )


def test_two_processes_fill_one_folder_at_once(root):
    processes = [
        subprocess.Popen(command("aot", root), cwd=REPO, env=environment(), stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    results = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert [result["tokens"] for result in results] == [toy.TOKENS] * 2
    third = start("aot", root)
    assert third["startup"]["compiles"] == 0 and third["tokens"] == toy.TOKENS


@pytest.mark.parametrize("mode", ["manual", "aot"])
def test_a_start_killed_while_warming_does_no_harm(root, mode):
    hanging = {**environment(), "TOY_HANG": "generate/1"}  # the programs before it are compiled and written meanwhile
    with subprocess.Popen(command(mode, root), cwd=REPO, env=hanging, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().strip() == toy.HANGING
        process.send_signal(signal.SIGKILL)
    after = start(mode, root)
    assert after["tokens"] == toy.TOKENS
    assert set(after["sources"].values()) <= {"compiled", "cache"}


def test_a_full_disk_is_one_warning(root):
    # A limit on the size of files stands in for a full disk: each write of more fails, as it would there.
    script = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); "
        f"sys.argv = ['toy', 'aot', {str(root)!r}]; "
        "runpy.run_module('tests.warmup.toy', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPO, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["tokens"] == toy.TOKENS and result["stored"] == []
    warnings = [line for line in done.stderr.splitlines() if "warmup cache" in line and "cannot be written" in line]
    assert len(warnings) == 1 and "going on without storing" in warnings[0]
    assert not list(root.rglob(".tmp-*"))


def test_programs_of_a_chain_are_touched_in_their_order():
    """Segments: what a chain begins with runs first, in the lane of the rest, so that the one that fails is named."""
    model = ModelConfig("llama", 64, 16, 32, 2, 2, 1, 8, 64)
    config = EngineConfig(
        slots=1, max_len=32, kv_pages=2, prefill_buckets=(8, 16, 32), batch_sizes=(1,), call_bytes=1
    )
    lanes = touch_lanes(JaxEngine(model, config, jax.devices()[:1]).programs(), 2)
    owner, prefills = ([program.name for program in lane] for lane in lanes)
    chain = ("begin", "layers", "end")
    first, *_, last = (owner.index(f"generate/1/{part}") for part in chain)
    assert owner[first : last + 1] == [f"generate/1/{part}" for part in chain]
    assert prefills == [f"prefill/{size}/{part}" for size in (32, 16) for part in chain]
    assert owner[-3:] == [f"prefill/8/{part}" for part in chain]
