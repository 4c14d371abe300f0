"""Building for TPUs that are not here. Needs libtpu, which is a test dependency on Linux x86-64."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from engine.sharding import device_order
from warmup.errors import WarmupError
from warmup.target import parse_target, target_devices

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "chips", "topology", "hbm"),
    [
        ("v5e-1", 1, "v5e:1x1", 16),
        ("v5e-4", 4, "v5e:2x2", 16),
        ("v5e-8", 8, "v5e:2x4", 16),
        ("v5e-16", 16, "v5e:4x4", 16),
        ("v6e-8", 8, "v6e:2x4", 32),
        ("v5p-8", 4, "v5p:2x2x1", 95),
        ("v5p-16", 8, "v5p:2x2x2", 95),
        ("v4-8", 4, "v4:2x2x1", 32),
    ],
)
def test_names_count_as_google_does(name, chips, topology, hbm):
    target = parse_target(name)
    assert (target.chips, target.topology, target.hbm) == (chips, topology, hbm * 2**30)


@pytest.mark.parametrize("name", ["v5e", "v5e-0", "v5e-3", "v5p-7", "v5p-6", "v9-4", "4", "", "v5e-4 ", "v5e:2x2"])
def test_other_names_are_refused_with_what_would_do(name):
    with pytest.raises(WarmupError, match="v5e" if name.startswith("v5e") else "v"):
        parse_target(name)


def test_more_devices_than_the_slice_has():
    with pytest.raises(WarmupError, match="= 8 is more than the 4 devices of v5e-4"):
        target_devices(parse_target("v5e-4"), 8)


def test_devices_have_one_order():
    """By process, then row by row of the torus, then by number: whatever order the runtime lists them in."""

    def device(id, process=0, coords=None):
        return types.SimpleNamespace(id=id, process_index=process, **({} if coords is None else {"coords": coords}))

    torus = [device(9 - x - 2 * y, coords=(x, y, 0)) for x in (1, 0) for y in (1, 0)]
    assert [each.coords[:2] for each in device_order(torus)] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [(each.process_index, each.id) for each in device_order([device(0, 1), device(7), device(3)])] == [(0, 3), (0, 7), (1, 0)]


# In a process of its own, because libtpu reads its environment once and stays loaded.
SCRIPT = """
import dataclasses, json, sys
from pathlib import Path
from tests.warmup import toy
from warmup.guard import Guard
from warmup.report import WarmupReport
from warmup.target import build_target, parse_target, target_devices

root = Path(sys.argv[1])
result = {}
for name, tp in (("v5e-4", 4), ("v5p-8", 1), ("v4-8", 4)):
    target = parse_target(name)
    devices = target_devices(target, tp)
    with Guard() as guard:
        build = build_target(
            lambda config: toy.ToyEngine(config=config, devices=devices), toy.engine_config(tp=tp, kv_pages=0),
            devices, root, target.budget, guard=guard, report=WarmupReport("aot", guard=guard),
        )
    result[name] = {
        "devices": len(devices), "stored": build.stored, "fits": build.plan.fits,
        "budget": build.plan.budget, "code": build.plan.code,
        "components": build.store.fingerprint.components, "pages": build.store.resolved["kv_pages"],
        "alias": {row.name: row.memory.alias for row in build.report.programs},
        "compiles": guard.counts("startup").compiles, "folder": str(build.store.folder),
    }
print(json.dumps(result))
"""


@pytest.mark.slow
def test_a_table_is_built_for_slices_that_are_not_here(tmp_path):
    pytest.importorskip("libtpu")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(REPO), *sys.path])}
    del environment["XLA_FLAGS"]  # libtpu does not know the CPU's options
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "cache")],
        env=environment,
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    kinds = {"v5e-4": "TPU v5 lite", "v5p-8": "TPU v5", "v4-8": "TPU v4"}
    for name, kind in kinds.items():
        built = result[name]
        assert built["components"]["devices"]["kind"] == kind and "cpu" not in built["components"]["backend"]
        assert len(built["stored"]) == built["compiles"] == 7
        assert built["fits"] and built["code"] > 0 and built["pages"] == 5
        assert built["alias"]["insert"] >= 5 * 8 * 4 + 4  # the whole state, in the TPU's padded layout or not
        manifest = json.loads((Path(built["folder"]) / "manifest.json").read_text())
        assert set(manifest["entries"]) == set(built["stored"])
        assert all(
            (Path(built["folder"]) / entry["file"]).stat().st_size == entry["size"]
            for entry in manifest["entries"].values()
        )
    assert len({result[name]["folder"] for name in kinds}) == 3
    assert result["v5e-4"]["budget"] == int(0.85 * 16 * 2**30)
