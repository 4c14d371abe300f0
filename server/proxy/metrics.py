"""The metrics of several orchestrators as one text, and the proxy's own about them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from server.proxy.upstreams import REASONS, STATES, Upstream

_Values = Mapping[str, tuple[str, Callable[[Upstream], float]]]  # name -> documentation, value

_GAUGES: _Values = {
    "sequences": ("sequences that this proxy has in progress there", lambda upstream: upstream.sequences),
    "unanswered_tokens": ("prompt tokens sent there of which nothing has come back", lambda upstream: upstream.unanswered),
}
_COUNTERS: _Values = {
    "requests": ("requests accepted there", lambda upstream: upstream.requests),
    "retries": ("requests that went on to another upstream because this one was lost", lambda upstream: upstream.retries),
    "ejections": ("times that it was left out for failing", lambda upstream: upstream.ejection.count),
    "prompt_tokens": ("prompt tokens sent there, estimated where prompts are text", lambda upstream: upstream.prompt_tokens),
    "matched_tokens": ("of these, tokens that it had been sent before", lambda upstream: upstream.matched_tokens),
}


def merge(texts: Mapping[str, str], *, labelled: bool) -> str:
    """The only orchestrator's text as it is; ``labelled``: each series with the label ``upstream``, its address."""
    if not labelled:
        return next(iter(texts.values()))
    families: dict[str, Metric] = {}
    for address, text in texts.items():
        for family in text_string_to_metric_families(text):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.add_sample(sample.name, {**sample.labels, "upstream": address}, sample.value)
    return generate_latest(_Families(families)).decode()


def own(upstreams: Iterable[Upstream]) -> str:
    """What the proxy knows of its upstreams."""
    prefix, now = "preheat_proxy_upstream", time.monotonic()
    families: dict[str, Metric] = {}

    def family(name: str, documentation: str, kind: str) -> Metric:
        return families.setdefault(name, Metric(f"{prefix}_{name}", documentation, kind))

    for upstream in upstreams:
        labels = {"upstream": upstream.address}
        states = family("state", "1 for the state that it is in", "gauge")
        for state in STATES:
            states.add_sample(states.name, {**labels, "state": state}, float(upstream.described_state(now) == state))
        failures = family("failures", "calls and checks that came to nothing", "counter")
        for reason in REASONS:
            failures.add_sample(f"{failures.name}_total", {**labels, "reason": reason}, upstream.failures[reason])
        for name, (documentation, value) in _GAUGES.items():
            gauge = family(name, documentation, "gauge")
            gauge.add_sample(gauge.name, labels, value(upstream))
        for name, (documentation, value) in _COUNTERS.items():
            counter = family(name, documentation, "counter")
            counter.add_sample(f"{counter.name}_total", labels, value(upstream))
    return generate_latest(_Families(families)).decode()


class _Families:
    """What `generate_latest` asks of a registry."""

    def __init__(self, families: Mapping[str, Metric]):
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families.values())
