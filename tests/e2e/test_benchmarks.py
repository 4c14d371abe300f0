"""Every benchmark runs, as short as it can. What it says is checked where it can be known, not how fast anything is."""

import argparse
import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest

from benchmarks import aot_regression, f32_gguf, gpu, peers, performance, serve
from benchmarks.bare_engine import SHAPES, parameters
from benchmarks.engine import prompt_operations
from benchmarks.load import Answer, HttpDoor, Summary, poisson, steady_tokens_per_second
from benchmarks.output import Report, Table
from benchmarks.peer_worker import Absent, Worker
from engine.checkpoints import open_checkpoint
from engine.jax_engine import JaxEngine
from tests import xla
from warmup.compiling import memory_of

ROOT = Path(__file__).parents[2]
TINY = SHAPES["llama-tiny"]


def run(*command: str) -> str:
    """A benchmark in a process of its own, whose programs are compiled as those of the tests."""
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla.flags(xla.QUICK),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", *command], env=environment, stdout=subprocess.PIPE, text=True, timeout=300
    )
    assert done.returncode == 0
    return done.stdout


def tables(path: Path) -> dict[str, dict]:
    return {table["title"]: table for table in json.loads(path.read_text())["tables"]}


# Load, on the server of the session


def test_serve(server, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hello"}\n"How are you?"\n')
    files = ["--json", str(tmp_path / "serve.json"), "--png", str(tmp_path / "serve.png")]
    at = ["--url", server.http, "--grpc", server.grpc, "--quick"]
    assert serve.main([*at, *files]) == 0
    (table,) = tables(tmp_path / "serve.json").values()
    assert [row[:3] for row in table["rows"]] == [["HTTP, 2 clients", 4, 0], ["gRPC, 2 clients", 4, 0]]
    assert all(figure > 0 for row in table["rows"] for figure in row[3:])
    assert (tmp_path / "serve.png").read_bytes().startswith(b"\x89PNG")
    assert serve.main([*at, "--rate", "50", "--prompts", str(prompts), "--door", "http"]) == 0


def test_failed_requests_are_seen(server):
    async def go() -> list[Answer]:
        return await poisson(HttpDoor(server.http), [[1], [2], [10**6]], 3, 100.0)

    answers = asyncio.run(go())
    assert [answer.tokens for answer in answers] == [3, 3, 0]
    assert [bool(answer.error) for answer in answers] == [False, False, True]
    assert "400" in answers[2].error
    assert Summary.of(answers).errors == 1


def test_summary():
    answers = [Answer(0.0, [1.0, 2.0, 4.0], 3), Answer(1.0, [2.0, 3.0, 5.0], 5)]
    summary = Summary.of(answers)
    assert summary.tokens_per_second == 8 / 5
    assert list(summary.first_token) == [1.0, 1.0]
    assert list(summary.per_token) == [1.5, 0.75]
    assert list(summary.gaps) == [1.0, 2.0, 1.0, 2.0]
    # from 2 to 4: the first brings its third token, the second its message of 5/3 tokens at 3
    assert steady_tokens_per_second(answers) == pytest.approx((1 + 5 / 3) / 2)


# The others


def test_engine(tmp_path):
    run("benchmarks.engine", "--quick", "--json", str(tmp_path / "engine.json"))
    found = tables(tmp_path / "engine.json")
    assert found["llama-tiny: decode, 128 prompt + 64 new tokens"]["rows"][0][1] > 0
    assert found["llama-tiny: compiling"]["rows"][0][1] == 7  # programs of one slot and one bucket


def test_gpu(tmp_path):
    run("benchmarks.gpu", "--quick", "--no-starts", "--json", str(tmp_path / "gpu.json"))
    assert tables(tmp_path / "gpu.json")["llama-tiny: decode"]["rows"][0][1] > 0
    assert gpu.STARTS[0][0] == "aot, cold"


def test_aot_regression(tmp_path):
    command = ("--quick", "--batches", "2", "--max-len", "256", "--json", str(tmp_path / "aot.json"))
    run("benchmarks.aot_regression", *command)
    found = tables(tmp_path / "aot.json")
    (steps,), (memory,) = (found[title]["rows"] for title in ("Decode step", "Memory of a second start"))
    assert (steps[0], steps[-2:]) == (2, ["1 + 1", "yes"])
    assert float(memory[2]) > 0


def test_a_jit_around_loses_the_donation():
    options = argparse.Namespace(quick=True, layers=2, max_len=256)
    kept, lost = (
        next(program for program in kind(*aot_regression.describe(options, 1), jax.devices()[:1]).programs()
             if program.name == "generate/1")
        for kind in (JaxEngine, aot_regression.LostEngine)
    )  # fmt: skip
    aliased = [memory_of(program.trace().lower().compile()).alias for program in (kept, lost)]
    assert aliased == [kept.donated_bytes, 0]


def test_interval_of_the_median():
    """Of 100 values, the 41st and the 60th bound the median with about 95 %, by the binomial distribution (94.3 %)."""
    turns = [(1.0, 1.0 + place / 100) for place in range(1, 101)]
    found = aot_regression.Ratio.of(turns, 1, 0)
    assert found.median == pytest.approx(1.505)
    assert found.error == pytest.approx((1.60 - 1.41) / 2)
    assert str(aot_regression.Ratio.of([(2.0, 4.0)], 1, 0)) == "2.000 ± 0.000"


def test_sizes_of_the_shapes():
    """Counted by hand: projections, feed-forward, norms, tables."""
    layer = 4 * 768 * 768 + 3 * 768 * 2560 + 2 * 768
    assert parameters(SHAPES["llama-125m"]) == 12 * layer + 32_000 * 768 + 768 == 123_685_632
    assert round(parameters(SHAPES["llama-1b"]) / 1e9, 2) == 1.24  # as Meta says
    assert round(parameters(SHAPES["llama-8b"]) / 1e9, 2) == 8.03
    one = prompt_operations(SHAPES["llama-125m"], 1)  # every weight once, and each of 12 heads sees one token
    assert one == 2 * (12 * (layer) + 768 + 32_000 * 768) + 4 * 12 * 768


def test_float32_files(tmp_path):
    source, target = tmp_path / "source.gguf", tmp_path / "f32.gguf"
    draw = np.random.default_rng(0)
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_block_count(1)
    writer.add_token_list(["a", "b"])
    blocks = gguf.quants.quantize(draw.standard_normal((4, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    f32_gguf._write(writer)
    f32_gguf.write(str(source), target)
    reader = gguf.GGUFReader(target)
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    (tensor,) = reader.tensors
    assert tensor.tensor_type == gguf.GGMLQuantizationType.F32
    np.testing.assert_array_equal(tensor.data, gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0))


def test_random_file_is_a_model(tmp_path):
    path = tmp_path / "random.gguf"
    f32_gguf.write("llama-tiny", path)
    checkpoint = open_checkpoint(path)
    assert sum(int(np.prod(checkpoint.shape(name))) for name in checkpoint.names()) == parameters(TINY)
    if (name := "model.layers.1.self_attn.k_proj.weight") in checkpoint.names():
        assert checkpoint.shape(name) == (32, 64)


def test_comparison():
    found = peers.Comparison()
    for ours, theirs in ((10.0, 5.0), (30.0, 40.0), (20.0, 10.0)):
        found.add(1, "Preheat", ours)
        found.add(1, "transformers", theirs)
    found.add(8, "Preheat", 100.0)
    table, missed = found.table("Title", "tokens/s", "Preheat")
    assert table.rows == [("1", 20.0, 10.0, 2.0), ("8", 100.0, None, None)]
    assert missed == []
    found.add(8, "transformers", 80.0)
    assert found.table("Title", "tokens/s", "Preheat")[1] == ["Title: 8: 1.25 x transformers, not 2.0 x"]


def test_peers_that_are_not_there(tmp_path):
    with pytest.raises(Absent, match="No module named"):
        Worker(sys.executable, "benchmarks.peer_llama_cpp", tmp_path / "model.gguf")
    with pytest.raises(Absent, match="No such file"):
        Worker(str(tmp_path / "python"), "benchmarks.peer_transformers", tmp_path / "model.gguf")


def test_report():
    table = Table("Title", ("name", "value"), [("a", 0.1234), ("b", 1234.5), ("c", None)], "A note.")
    assert Report("name", {"cores": 2}, [table], ["this"]).text() == (
        "name: cores 2\n\n**Title**\n\n| name | value |\n| --- | --- |\n| a | 0.123 |\n| b | 1234 |\n| c | - |\n\n"
        "A note.\n\nNot reached: this"
    )


def test_orchestrator_as_part_of_all(capfd, tmp_path):
    assert performance.main(["--quick", "--only", "orchestrator", "--out", str(tmp_path)]) == 0
    assert "## python -m benchmarks.orchestrator" in capfd.readouterr().out
    assert (tmp_path / "orchestrator.png").exists()
    found = tables(tmp_path / "orchestrator.json")
    assert [row[0] for row in found["4 streams without an engine's cost"]["rows"]][-1] == "bare grpc.aio"
    assert found["Idle"]["rows"][0][1] >= 0
