"""The soak benchmark for some seconds, on the servers of the session: everything that it promises holds."""

import asyncio
import sys

import pytest

from benchmarks.soak import Soak

SECONDS = 12.0  # for each warmup mode


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_soak(server):
    processes = {"server": server.process.pid, "proxy": server.proxy_pid}
    soak = Soak(server.http, server.grpc, processes, vocab=256)
    report = asyncio.run(soak.run(SECONDS))
    print(report.text())
    assert report.problems == [], report.text()
    assert sum(report.outcomes.values()) >= report.sent - report.unsure
    assert min(report.outcomes["ok"], report.outcomes["cancelled"], report.outcomes["invalid"]) > 0
    assert report.outcomes["rejected"] > 0  # the bursts were more than the queue holds
    server.assert_nothing_compiled()
