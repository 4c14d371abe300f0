"""What ``preheat build`` leaves in the warmup cache is all that a start needs: nothing is compiled, and one request proves it."""

from __future__ import annotations

import json
import os

import pytest

from server.commands import serve
from server.commands.cli import main
from server.config.commands import load_serve_config
from tests.golden import known
from warmup.guard import Guard

pytestmark = pytest.mark.slow


def test_a_start_after_a_build_is_a_second_start(tmp_path, monkeypatch, capsys):
    for name in [name for name in os.environ if name.startswith("PREHEAT_")]:
        monkeypatch.delenv(name)
    model, cache = known.make(tmp_path / "model", known.chain({}), layers=1), tmp_path / "cache"
    known.write_tokenizer(model)
    options = {"model": model, "warmup_cache": cache, "slots": 1, "max_len": 64, "prefill_buckets": 16, "memory": "200MiB"}
    for name, value in options.items():
        monkeypatch.setenv(f"PREHEAT_{name.upper()}", str(value))

    assert main(["build"]) == 0
    [manifest] = [json.loads(path.read_bytes()) for path in cache.glob("programs/*/manifest.json")]
    assert manifest["proof"]["requests"] > 2 and f"{len(manifest['entries'])} programs for this machine" in capsys.readouterr().out

    with Guard() as guard:
        warm, report = serve.rehearse(load_serve_config({}, os.environ))
    assert warm.prepared.unchanged and {program.source for program in report.programs} == {"aot"}
    assert guard.counts("startup").total == 0
