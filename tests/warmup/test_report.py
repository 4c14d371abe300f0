"""The report against a clock of the test's own; the field names are the contract's."""

import json

import pytest

from warmup.report import ProgramMemory, WarmupReport


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_the_json_has_the_fields_of_the_contract(clock):
    report = WarmupReport("aot", started=90.0, clock=clock)
    report.begin(["prefill/16", "insert"])
    report.prepared("insert", "aot", ProgramMemory(argument=1, output=2, alias=3, temp=4, code=5), load=0.25)
    snapshot = json.loads(json.dumps(report.snapshot()))
    assert set(snapshot) == {
        "mode",
        "state",
        "programs",
        "done",
        "total",
        "eta_seconds",
        "startup",
        "compiles_since_ready",
        "traces_since_ready",
    }
    assert snapshot["programs"][1] == {
        "name": "insert",
        "source": "aot",
        "seconds_trace": 0,
        "seconds_compile": 0,
        "seconds_load": 0.25,
        "seconds_run": 0,
        "argument_bytes": 1,
        "output_bytes": 2,
        "alias_bytes": 3,
        "temp_bytes": 4,
        "code_bytes": 5,
    }
    assert snapshot["programs"][0]["source"] is None
    assert set(snapshot["startup"]) == {
        "seconds_import",
        "seconds_weights",
        "seconds_programs",
        "seconds_proof",
        "seconds_total",
    }
    assert snapshot["startup"]["seconds_total"] == 10.0


def test_states_progress_and_eta(clock):
    report = WarmupReport("manual", started=100.0, clock=clock)
    assert (report.state, report.snapshot()["eta_seconds"]) == ("loading", None)
    report.begin(["a", "b", "c", "d"])
    assert (report.state, report.snapshot()["eta_seconds"]) == ("warming", None)
    clock.now += 3
    report.prepared("a", "compiled", ProgramMemory())
    assert report.snapshot()["eta_seconds"] == 9  # 3 s for one, three to go
    for name in "bcd":
        report.prepared(name, "compiled", ProgramMemory())
    report.touching()
    clock.now += 1
    report.touched("a", 1.0)
    report.touched("b", 0.5)
    assert report.touch_seconds == 1
    snapshot = report.snapshot()
    assert (snapshot["done"], snapshot["total"], snapshot["eta_seconds"]) == (2, 4, 1)  # 1 s for two, two to go
    clock.now += 2
    report.ready()
    clock.now += 50
    snapshot = report.snapshot()
    assert (snapshot["state"], snapshot["eta_seconds"], snapshot["startup"]["seconds_total"]) == ("ready", 0, 6)


def test_progress_is_a_line_until_all_have_run(clock):
    report = WarmupReport("manual", started=100.0, clock=clock)
    assert report.progress() is None
    report.begin(["a", "b"])
    assert report.progress() == "0 of 2 programs are compiled or loaded"
    clock.now += 4
    report.prepared("b", "compiled", ProgramMemory())
    assert report.progress() == "1 of 2 programs are compiled or loaded, about 4 s left"
    report.prepared("a", "compiled", ProgramMemory())
    report.touching()
    clock.now += 2
    report.touched("a", 2.0)
    assert report.progress() == "1 of 2 programs have run, about 2 s left"
    report.touched("b", 0.5)
    assert report.progress() is None


def test_stages_are_timed(clock):
    report = WarmupReport("manual", started=100.0, clock=clock)
    with pytest.raises(RuntimeError), report.stage("weights"):  # noqa: PT012 (the stage takes time before it fails)
        clock.now += 2.5
        raise RuntimeError
    report.set_stage("import", 1.5)
    startup = report.snapshot()["startup"]
    assert (startup["seconds_weights"], startup["seconds_import"], startup["seconds_proof"]) == (2.5, 1.5, None)


def test_a_failed_start_says_why(clock):
    report = WarmupReport("manual", started=100.0, clock=clock)
    report.begin(["a"])
    report.fail("program a failed")
    assert (report.state, report.snapshot()["error"], report.snapshot()["eta_seconds"]) == (
        "failed",
        "program a failed",
        0,
    )


def test_the_table_has_a_line_per_program_and_the_sums(clock):
    report = WarmupReport("manual", started=100.0, clock=clock)
    report.begin(["prefill/16", "insert"])
    report.prepared("prefill/16", "compiled", ProgramMemory(temp=3 * 1024**2, code=1024**2), trace=0.5, compile=1.25)
    report.prepared("insert", "cache", ProgramMemory(code=2 * 1024**2), compile=0.25)
    lines = report.table().splitlines()
    assert len(lines) == 4
    assert lines[1].split() == [
        "prefill/16",
        "compiled",
        "0.500",
        "1.250",
        "0.000",
        "0.000",
        "0.0",
        "0.0",
        "0.0",
        "3.0",
        "1.0",
    ]
    assert lines[3].split() == ["2", "programs", "0.500", "1.500", "0.000", "0.000", "3.0"]
