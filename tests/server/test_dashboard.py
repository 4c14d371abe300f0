"""The Grafana dashboard queries metrics that exist, by labels that exist, and leaves none out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.telemetry.metrics import OUTCOMES, PHASES, Metrics

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


@pytest.fixture(scope="module")
def dashboard():
    return json.loads(DASHBOARD.read_text())


@pytest.fixture(scope="module")
def families():
    """The names of each family's series, with a value in every one that has labels."""
    metrics = Metrics()
    metrics.startup_seconds.labels(stage="total").set(1.0)
    parsed = text_string_to_metric_families(metrics.render())
    return {family.name: {sample.name for sample in family.samples} for family in parsed}


def panels(dashboard):
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries(dashboard):
    return [target["expr"] for panel in panels(dashboard) for target in panel["targets"]]


def names(expression):
    return set(re.findall(r"\bpreheat_[a-z_]+", expression))


def test_every_name_queried_exists(dashboard, families):
    known = set().union(*families.values())
    for expression in [*queries(dashboard), *(v.get("definition", "") for v in dashboard["templating"]["list"])]:
        assert names(expression) <= known, expression


def test_every_metric_is_shown(dashboard, families):
    shown = set().union(*(names(expression) for expression in queries(dashboard)))
    assert len(families) == 20
    assert [family for family, series in families.items() if not series & shown] == []


def test_labels_and_their_values_exist(dashboard):
    labels = {"outcome": set(OUTCOMES), "phase": set(PHASES), "stage": None, "le": None, "instance": None}
    for expression in queries(dashboard):
        for group in re.findall(r"\bby \(([^)]*)\)", expression):
            assert set(re.split(r",\s*", group)) <= labels.keys(), expression
        for label, value in re.findall(r'(\w+)="([^"]*)"', expression):
            assert value in (labels[label] or ()), expression
        assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")


def test_counters_are_read_as_rates_and_histograms_as_quantiles(dashboard):
    """Totals since the start are shown of compiles and traces only, where a single one matters."""
    for expression in queries(dashboard):
        for name in names(expression):
            if name.endswith(("_total", "_bucket", "_sum", "_count")) and not re.search("_xla_|kv_pages", name):
                assert f"rate({name}" in expression, expression
        if "_bucket" in expression:
            assert re.match(r"histogram_quantile\(0\.\d+, sum by \(le\) \(rate\(", expression), expression


def test_panels_do_not_overlap_and_have_numbers_of_their_own(dashboard):
    cells = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] <= 24 - place["w"]
        taken = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not taken & cells, panel["title"]
        cells |= taken
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert all(panel["description"] and panel["targets"] for panel in panels(dashboard))
