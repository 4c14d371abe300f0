"""The names of the metrics are an interface: they are spelled out here once more."""

import asyncio
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.proxy.metrics import own
from server.proxy.upstreams import Upstreams
from server.telemetry.metrics import Metrics

DOCS = Path(__file__).parents[2] / "docs"
COUNTERS = {
    "preheat_requests_total", "preheat_prompt_tokens_total", "preheat_prefilled_tokens_total",
    "preheat_cached_prompt_tokens_total", "preheat_generated_tokens_total", "preheat_xla_compiles_total",
    "preheat_xla_traces_total",
}  # fmt: skip
GAUGES = {
    "preheat_requests_running", "preheat_requests_waiting", "preheat_slots_used", "preheat_kv_pages_used",
    "preheat_kv_pages_total", "preheat_ready", "preheat_startup_seconds",
}  # fmt: skip
HISTOGRAMS = {
    "preheat_time_to_first_token_seconds", "preheat_time_per_output_token_seconds", "preheat_request_seconds",
    "preheat_queue_seconds", "preheat_decode_step_seconds", "preheat_batch_size",
}  # fmt: skip
PROXY = {
    f"preheat_proxy_upstream_{name}" for name in (
        "state", "sequences", "unanswered_tokens", "requests_total", "failures_total", "ejections_total", "retries_total",
        "prompt_tokens_total", "matched_tokens_total",
    )
}  # fmt: skip


def test_the_proxys_own():
    async def text():
        upstreams = Upstreams(["a:1", "b:2"])
        await upstreams.start()
        first, _ = upstreams.all
        first.failed("lost")
        first.state = "ready"
        described = own(upstreams.all)
        for _ in range(2):
            first.failed("lost")
        ejected = own(upstreams.all)
        await upstreams.stop()
        return described, ejected

    described, ejected = asyncio.run(text())
    samples = [sample for family in text_string_to_metric_families(described) for sample in family.samples]
    assert {sample.name for sample in samples} == PROXY
    assert {sample.labels["upstream"] for sample in samples} == {"a:1", "b:2"}
    lines = described.splitlines()
    assert 'preheat_proxy_upstream_state{state="ready",upstream="a:1"} 1.0' in lines
    assert 'preheat_proxy_upstream_state{state="connecting",upstream="b:2"} 1.0' in lines
    assert 'preheat_proxy_upstream_failures_total{reason="lost",upstream="a:1"} 1.0' in lines
    assert 'preheat_proxy_upstream_ejections_total{upstream="a:1"} 0.0' in lines
    assert 'preheat_proxy_upstream_state{state="ejected",upstream="a:1"} 1.0' in ejected.splitlines()
    assert 'preheat_proxy_upstream_ejections_total{upstream="a:1"} 1.0' in ejected.splitlines()


def test_names_types_and_labels():
    metrics = Metrics()
    metrics.startup_seconds.labels(stage="weights").set(1.5)
    families = {family.name: family for family in text_string_to_metric_families(metrics.render())}
    by_type = {kind: {name for name, family in families.items() if family.type == kind} for kind in
               ("counter", "gauge", "histogram")}  # fmt: skip
    assert {name + "_total" for name in by_type["counter"]} == COUNTERS
    assert by_type["gauge"] == GAUGES
    assert by_type["histogram"] == HISTOGRAMS
    outcomes = {sample.labels["outcome"] for sample in families["preheat_requests"].samples}
    assert outcomes == {"ok", "error", "rejected", "cancelled", "invalid"}
    assert metrics.value("preheat_startup_seconds", stage="weights") == 1.5


def test_gauges_follow_what_they_are_bound_to():
    metrics = Metrics()
    slots = [3]
    metrics.bind(running=lambda: 1, waiting=lambda: 2, slots_used=lambda: slots[0], pages_used=lambda: 4, pages_total=8,
                 ready=lambda: 1)  # fmt: skip
    assert metrics.value("preheat_slots_used") == 3
    slots[0] = 0
    assert metrics.value("preheat_slots_used") == 0
    assert metrics.value("preheat_kv_pages_total") == 8


def test_two_servers_in_one_process_do_not_mix():
    one, other = Metrics(), Metrics()
    one.outcome("ok")
    assert one.value("preheat_requests_total", outcome="ok") == 1
    assert other.value("preheat_requests_total", outcome="ok") == 0


def test_an_unknown_series_is_an_error():
    with pytest.raises(KeyError, match="preheat_nothing"):
        Metrics().value("preheat_nothing")


def test_the_operations_page_names_every_metric_and_no_other():
    text = (DOCS / "operations.md").read_text(encoding="utf-8")
    named = set(re.findall(r"preheat_\w+", text))
    assert {re.sub("_(bucket|count|sum)$", "", name) for name in named} == COUNTERS | GAUGES | HISTOGRAMS | PROXY
