"""schemathesis against the API's description: requests drawn from it, valid and not, and all its checks of the answers.

It lives in an environment of its own (``make test-clients`` makes it); without that, the test is skipped, and
``test_openapi.py`` does the same with rules written here. Not asked for is that whatever the schemas allow is accepted:
lengths, token ids and fields that exclude each other are refused beyond what they can say.
"""

from __future__ import annotations

import pathlib
import subprocess

import pytest
from front_doors import open_doors

from engine.mock import Table
from server.proxy import openapi
from server.proxy.endpoints import ENDPOINTS

SCHEMATHESIS = pathlib.Path(__file__).parents[2] / "build" / "clients" / "bin" / "schemathesis"
NEXT = Table({token: {(token + 1) % 256: 0.9, 257: 0.1} for token in range(256)})


@pytest.mark.skipif(not SCHEMATHESIS.exists(), reason="schemathesis is not installed: make test-clients")
def test_what_schemathesis_finds(tmp_path):
    with open_doors(NEXT, slots=8, max_queue=512) as doors:
        command = [
            str(SCHEMATHESIS), "run", f"{doors.http}/openapi.json", "--checks", "all", "--exclude-checks",
            "positive_data_acceptance", "--max-examples", "20", "--seed", "1", "--no-color",
        ]  # fmt: skip
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    operations = sum(map(len, openapi.document(ENDPOINTS)["paths"].values())) - 1  # the description itself is left out
    assert f"{operations}/{operations}" in run.stdout.replace(" ", "")
