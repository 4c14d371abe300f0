"""The metrics of several orchestrators as one text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families


def merge(texts: Mapping[str, str]) -> str:
    """One orchestrator's text as it is; of several, each series with the label ``upstream``, its address."""
    if len(texts) == 1:
        return next(iter(texts.values()))
    families: dict[str, Metric] = {}
    for address, text in texts.items():
        for family in text_string_to_metric_families(text):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.add_sample(sample.name, {**sample.labels, "upstream": address}, sample.value)
    return generate_latest(_Families(families)).decode()


class _Families:
    """What `generate_latest` asks of a registry."""

    def __init__(self, families: Mapping[str, Metric]):
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families.values())
