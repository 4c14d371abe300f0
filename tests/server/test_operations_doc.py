"""The fields of a request's log line in docs/operations.md are those that are logged."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from orchestrator_harness import WAIT, serving

TEXT = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()


def test_the_fields_of_a_request_in_the_log_are_described(caplog):
    with caplog.at_level(logging.INFO, "preheat.request"), serving() as server:
        server.run(b"hello", 3, adapter="poet")
        server.engine.fault("prefill", RuntimeError("broken"))
        server.submit(b"unlucky", 3)[1].wait()
        assert server.orchestrator.drain(WAIT)
    logged = set().union(*(record.request for record in caplog.records if record.name == "preheat.request"))
    names = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", TEXT.split("field of `request`")[1], re.M)
    assert {name for row in names for name in re.findall(r"\w+", row)} == logged
