"""Registries are found: a file in the package is all that it takes."""

import dataclasses
import pathlib
import re
import sys

import jax
import numpy as np
import pytest

from engine import families, kinds, table
from engine.checkpoints import gguf_blocks, quant_methods
from engine.config import EngineConfig, ModelConfig
from engine.discovery import declared, modules, unique
from engine.families.family import Family
from engine.jax_engine import JaxEngine
from engine.kinds.kind import Kind
from warmup.plan import measure

MODELS = pathlib.Path(__file__).parents[2] / "docs" / "models.md"


@pytest.fixture
def drawer(tmp_path, monkeypatch):
    """A folder that counts as part of a package, for as long as the test runs."""

    def open_in(package) -> pathlib.Path:
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
        return tmp_path

    before = set(sys.modules)
    yield open_in
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_the_documented_family_is_found_where_it_is_saved(drawer, monkeypatch):
    (drawer(families) / "seed_oss.py").write_text(re.search(r"```python\n(.*?)```", MODELS.read_text(), re.DOTALL)[1])
    found = declared("engine.families", Family)
    assert [family.name for family in found if family not in families.FAMILIES] == ["seed_oss"]
    names = [module.__name__.rpartition(".")[2] for module in modules("engine.families")]
    assert names == sorted(names)
    monkeypatch.setattr(families, "FAMILIES", found)
    assert families.find_family({"architectures": ["SeedOssForCausalLM"]}).name == "seed_oss"


def test_quantized_formats_are_found_where_they_are_saved(drawer):
    folder = drawer(quant_methods)
    (folder / "mine.py").write_text(
        "from engine.checkpoints.quant_methods.base import QuantMethod\nMINE = QuantMethod('mine', lambda stored, config: {})\n"
    )
    found = declared("engine.checkpoints.quant_methods", quant_methods.QuantMethod)
    assert [method.name for method in found if method not in quant_methods.METHODS] == ["mine"]


def test_block_types_are_found_where_they_are_saved(drawer):
    folder = drawer(gguf_blocks)
    (folder / "mine.py").write_text(
        "import gguf\nfrom engine.checkpoints.gguf_blocks.base import BlockType\n"
        "Q6_K = BlockType(gguf.GGMLQuantizationType.Q6_K, lambda blocks, out: None)\n"
    )
    found = declared("engine.checkpoints.gguf_blocks", gguf_blocks.BlockType)
    assert [block.type.name for block in found if block.type not in gguf_blocks.BLOCK_TYPES] == ["Q6_K"]


def test_what_two_modules_name_is_found_once(drawer):
    folder = drawer(families)
    (folder / "another.py").write_text("from engine.families.llama import LLAMA\n")
    assert [family.name for family in declared("engine.families", Family)].count("llama") == 1


def test_two_of_the_same_name_are_refused():
    llama = families.get_family("llama")
    with pytest.raises(ValueError, match="architecture 'LlamaForCausalLM'.*'llama'.*'mine'"):
        unique((llama, dataclasses.replace(llama, name="mine")), "name", "architecture")


WAVE = '''
import jax
from engine.kinds.builder import named
from engine.kinds.kind import Kind

def wave(request):
    return request + 1

def programs(build):
    request = build.host(4)
    yield build.program("wave/4", named("wave_4", wave), (request,), request, rows=4)

def touch(engine, size, prefix):
    return engine.call("wave/" + size, engine.put(engine.WORDS))

WAVE = Kind("wave", 99, programs, touch)
'''


def test_a_kind_of_program_is_one_file(drawer, monkeypatch):
    """It is in the table that warmup and plan read, and `JaxEngine.touch` runs it."""
    (drawer(kinds) / "wave.py").write_text(WAVE)
    found = {kind.name: kind for kind in declared("engine.kinds", Kind)}
    assert found.keys() - table.KINDS.keys() == {"wave"}
    monkeypatch.setattr(table, "KINDS", found)
    engine = small_engine()
    names = [program.name for program in engine.programs()]
    assert {"wave/4", "prefill/16", "insert", "generate/2"} <= set(names)
    called = []
    engine.install({program.name: lambda *arguments, name=program.name: called.append((name, arguments)) for program in engine.programs()})
    engine.WORDS = np.arange(4, dtype=np.int32)
    monkeypatch.setattr(engine, "acquire_prefix", lambda: None)
    monkeypatch.setattr(engine, "release_prefix", lambda prefix: None)
    engine.touch("wave/4")
    ((name, (words,)),) = called
    assert name == "wave/4" and words.tolist() == [0, 1, 2, 3]
    (row,) = [row for row in measure(engine, budget=10**9).programs if row[0] == "wave/4"]
    assert row[1].temp > 0  # it says that it runs rows


def test_a_kind_keeps_to_its_name(drawer, monkeypatch):
    (drawer(kinds) / "wave.py").write_text(WAVE.replace('Kind("wave"', 'Kind("swell"'))
    monkeypatch.setattr(table, "KINDS", {kind.name: kind for kind in declared("engine.kinds", Kind)})
    with pytest.raises(ValueError, match="kind 'swell' makes a program 'wave/4'"):
        small_engine()


def test_every_kind_of_the_table_can_be_run(monkeypatch):
    """The engine finds kind, size and part by a program's name, segments included."""
    engine = small_engine(call_bytes=1)
    for program in engine.programs():
        kind, size, part = table.kind_of(program.name)
        assert program.name == "/".join(filter(None, (kind.name, size, part)))
        assert not part or kind.request is not None, program.name
        assert bool(program.rows) == (kind.name in ("prefill", "generate")) and program.rows in (0, int(size or 0))
        assert program.decodes == (kind.name == "generate")


def small_engine(**layout) -> JaxEngine:
    model = ModelConfig("llama", 64, 16, 32, 4, 2, 1, 8, 64)
    config = EngineConfig(slots=2, max_len=32, kv_pages=3, prefill_buckets=(16, 32), batch_sizes=(1, 2), **layout)
    return JaxEngine(model, config, jax.devices()[:1])
