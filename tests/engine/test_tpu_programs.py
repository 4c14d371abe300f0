"""Programs compiled for TPUs that are not here: none of them may copy a pool. Needs libtpu, a test dependency on Linux x86-64."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPO = Path(__file__).resolve().parents[2]

# In a process of its own, because libtpu reads its environment once and stays loaded. Pools of hundreds of MiB, which nobody
# allocates, and small models, which compile fast.
SCRIPT = """
import dataclasses, json
from engine.config import EngineConfig, LayerKind, ModelConfig, MoeConfig
from engine.jax_engine import JaxEngine
from engine.programs import bytes_per_device
from warmup.collectives import Listing
from warmup.target import parse_target, target_devices

narrow = ModelConfig("llama", 512, 256, 256, num_layers=2, num_heads=16, num_kv_heads=8, head_dim=64, max_position=4096)
wide = dataclasses.replace(narrow, head_dim=128)
mixed = dataclasses.replace(wide, layer_kinds=(LayerKind(window=64), LayerKind()), layer_pattern=(0, 1), attention_softcap=50.0)
result = {}
for name, model, target, tp, batches, buckets in (
    ("narrow heads", narrow, "v5e-1", 1, (1,), (16,)),
    ("four devices", wide, "v6e-4", 4, (2,), (128,)),
    ("windows", mixed, "v5e-4", 4, (1, 128), (16,)),
):
    config = EngineConfig(
        slots=batches[-1], max_len=512, kv_pages=4097, prefill_buckets=buckets, batch_sizes=batches, dtype="bfloat16", tp=tp,
        layers="scanned", attention="pallas", lanes=128,
    )
    engine = JaxEngine(model, config, target_devices(parse_target(target), tp))
    programs = {}
    for program in engine.programs():
        memory = program.trace().lower().compile().memory_analysis()
        programs[program.name] = [memory.temp_size_in_bytes, memory.alias_size_in_bytes, program.donated_bytes]
    pool = bytes_per_device(engine.abstract_state.k_pages[0])
    result[name] = {"attention": engine.attention.explain(), "pool": pool, "programs": programs}
experts = dataclasses.replace(wide, num_kv_heads=1, moe=MoeConfig(8, 2, True))
config = dataclasses.replace(config, slots=8, batch_sizes=(8,), kv_pages=17, dp=1, ep=2, tp=2)
engine = JaxEngine(experts, config, target_devices(parse_target("v5e-4"), 4))
listing = Listing(dict(engine.mesh.shape), "tpu")
(program,) = (program for program in engine.programs() if program.name == "generate/8")
listing.add(program, program.trace().lower().compile(compiler_options=listing.options(program)))
listing.close()
result["moves"] = [(one.times, one.bytes, one.axes) for one in listing.found["generate/8"]]
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def built():
    pytest.importorskip("libtpu")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(REPO), *sys.path])}
    # Ranks and dtypes are promoted in the kernels that come with JAX; libtpu does not know the CPU's options.
    for name in ("JAX_NUMPY_RANK_PROMOTION", "JAX_NUMPY_DTYPE_PROMOTION", "XLA_FLAGS"):
        del environment[name]
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, cwd=REPO, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["narrow heads", "four devices", "windows"])
def test_no_program_copies_a_pool(built, name):
    pool, programs = built[name]["pool"], built[name]["programs"]
    assert pool >= 64 * 2**20
    for program, (temporary, aliased, donated) in programs.items():
        assert temporary < pool / 4, f"{program} takes {temporary / 2**20:.0f} MiB of temporaries, a pool {pool / 2**20:.0f}"
        assert aliased >= donated, program


def test_what_moves_in_a_decode_step_of_experts(built):
    """Eight rows of 256 on two groups of two devices, two layers. As on CPU (`test_sharding.py`): each layer's tokens to the experts and
    back, five sums over heads and widths, the logits; but of so little the TPU's compiler gathers and scatters by sums."""
    times = {axis: sum(times for times, _, axes in built["moves"] if axes == [axis]) for axis in ("expert", "tensor")}
    assert times == {"expert": 2 + 2, "tensor": 5 + 1}
    assert max(size for _, size, _ in built["moves"]) <= 8 * 512 * 2  # the logits of all rows: no weights, no keys


def test_kernels_compile_for_what_they_are_chosen_for(built):
    kernels = "attention in decode: Pallas paged_attention; in prefill: Pallas splash_attention"
    assert built["narrow heads"]["attention"] == built["four devices"]["attention"] == kernels
    assert built["windows"]["attention"].startswith("attention in decode: XLA, because")
