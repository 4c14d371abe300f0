"""Registries are found: a file in the package is all that it takes."""

import dataclasses
import pathlib
import re
import sys

import pytest

from engine import families
from engine.checkpoints import gguf_blocks, quant_methods
from engine.discovery import declared, modules, unique
from engine.families.family import Family

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
    (drawer(families) / "seed_oss.py").write_text(re.search(r"```python\n(.*?)```", MODELS.read_text(), re.S)[1])
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
