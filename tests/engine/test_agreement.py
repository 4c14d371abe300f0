"""Config and tensors that disagree: what transformers does (``tests/golden/disagreements.py``), said in a warning, or an error."""

from __future__ import annotations

import json
import logging
import mmap
import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.agreement import read_model
from engine.checkpoints import CheckpointError, open_checkpoint
from server.commands import build
from server.config.commands import ServeConfig
from tests.engine.loader_harness import changed, load, log_probs
from tests.golden.disagreements import CASES

GOLDEN = json.loads((pathlib.Path(__file__).parent.parent / "golden" / "disagreements.json").read_text())
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def case(folder: pathlib.Path, name: str) -> pathlib.Path:
    def change(config, tensors):
        tensors.update({key: value.astype(np.float32) for key, value in tensors.items()})
        CASES[name](config, tensors)

    return changed(folder, change)


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", [name for name in CASES if "tokens" in GOLDEN[name]])
def test_a_model_answers_as_in_transformers(tmp_path, caplog, name):
    """And says so in one warning where transformers does, naming the file and the tensors."""
    golden = GOLDEN[name]
    model, weights = load(case(tmp_path, name))
    found = log_probs(model, weights, np.array(GOLDEN["prompt"]))
    assert found.argmax(-1).tolist() == golden["tokens"]
    np.testing.assert_allclose(found.max(-1), golden["logprobs"], atol=2e-5)
    said = warnings(caplog)
    named = golden["missing"] + golden["unused"] + [HEAD, EMBED] * golden["not_tied"]
    assert len(said) == bool(named)
    for part in named[:4] + [str(tmp_path)] * bool(named):
        assert part in said[0]


@pytest.mark.parametrize("name, parts", [
    ("neither_a_tie_nor_a_head", [HEAD, "tie_word_embeddings"]),
    ("no_word_of_a_tie_and_no_head", [HEAD, "tie_word_embeddings"]),
    ("more_layers_than_are_there", ["model.layers.3.input_layernorm.weight", "num_hidden_layers", "4 layers", "has 3"]),
    ("a_larger_vocabulary_than_the_embedding", [EMBED, "[320, 64]", "[330, 64]", "vocab_size", "model.safetensors"]),
    ("a_smaller_vocabulary_than_the_embedding", [EMBED, "[320, 64]", "[310, 64]", "vocab_size", "model.safetensors"]),
])  # fmt: skip
def test_what_transformers_makes_up_or_refuses_is_an_error(tmp_path, name, parts):
    assert GOLDEN[name].get("missing") or GOLDEN[name]["error"]
    with pytest.raises(CheckpointError) as caught:
        load(case(tmp_path, name))
    for part in (str(tmp_path), *parts):
        assert part in str(caught.value)


def test_several_files_without_an_index_must_be_one_model(tmp_path):
    case(tmp_path, "tensors_of_no_use")
    tensors = load_file(tmp_path / "model.safetensors")
    for part, keep in ((1, lambda name: "layers" in name), (2, lambda name: "layers" not in name)):
        save_file({name: value for name, value in tensors.items() if keep(name)}, tmp_path / f"{part}.safetensors")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"2\.safetensors has tensor lm_head\.bias, model\.layers\.0\.self_attn\.q_norm"):
        load(tmp_path)


def test_every_case_is_tested():
    assert GOLDEN.keys() - {"transformers", "prompt"} == CASES.keys()


def tied(folder: pathlib.Path, change) -> pathlib.Path:
    """A folder that ties head and embedding, with a head made from the embedding."""

    def both(config, tensors):
        config["tie_word_embeddings"] = True
        tensors[HEAD] = change(tensors[EMBED].copy())

    return changed(folder, both)


def last_number(array: np.ndarray) -> np.ndarray:
    array[-1, -1] += 1
    return array


@pytest.mark.parametrize("change, is_tied", [
    (lambda embed: embed, True),
    (lambda embed: embed.astype(np.float32), True),  # the same numbers in another type
    (lambda embed: np.where(embed == 0, -embed, embed), True),
    (last_number, False),
    (lambda embed: embed[:-1].copy(), False),  # which its shape makes an error, by name
])  # fmt: skip
def test_a_head_is_compared_whole(tmp_path, monkeypatch, caplog, change, is_tied):
    monkeypatch.setattr("engine.agreement.BLOCK", 1000)  # in many blocks
    folder = tied(tmp_path, change)
    assert read_model(open_checkpoint(folder)).tie_embeddings is is_tied
    assert len(warnings(caplog)) == (not is_tied)


def test_a_tied_head_of_its_own_is_a_model_of_its_own(tmp_path):
    """Stored programs are told apart by the model's configuration, as `warmup.fingerprint` has it."""
    models = []
    for name, change in (("same", lambda embed: embed), ("other", last_number)):
        (tmp_path / name).mkdir()
        models.append(read_model(open_checkpoint(tied(tmp_path / name, change))))
    assert models[0] != models[1]


def test_a_plan_needs_the_config_alone_but_looks_at_a_head_that_is_there(tmp_path):
    folder = tied(tmp_path, last_number)
    config = ServeConfig(model=str(folder))
    assert not build._model_config(config).tie_embeddings
    (folder / "model.safetensors").unlink()
    assert build._model_config(config).tie_embeddings


def test_comparing_maps_no_more_than_blocks(tmp_path, monkeypatch):
    """The tensors are read through the mapped file, whose pages are let go behind the comparison."""
    folder, released = tied(tmp_path, lambda embed: embed), []
    checkpoint = open_checkpoint(folder)
    monkeypatch.setattr("engine.agreement.BLOCK", mmap.PAGESIZE)
    release = checkpoint.release
    monkeypatch.setattr(checkpoint, "release", lambda name: (released.append(name), release(name)))
    assert read_model(checkpoint).tie_embeddings
    blocks = 320 * 64 * 2 / mmap.PAGESIZE
    assert released.count(EMBED) >= blocks and released.count(HEAD) >= blocks


def test_a_part_of_a_used_weight_is_an_error(tmp_path):
    """Without its scale a quantized weight would answer wrong, which transformers lets it do."""

    def change(config, tensors):
        tensors["model.layers.1.mlp.down_proj.weight_scale_inv"] = np.ones((1, 1), np.float32)

    with pytest.raises(CheckpointError, match=r"model\.safetensors has tensor model\.layers\.1\.mlp\.down_proj\.weight_scale_inv"):
        load(changed(tmp_path, change))
