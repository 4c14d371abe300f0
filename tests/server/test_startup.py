"""What a model's files say that its vocabulary does not have, and files that cannot be read."""

from __future__ import annotations

import pathlib

import pytest

from engine.mock import mock_model
from server.config.commands import ServeConfig
from server.errors import StartError
from server.start.warm_engine import OpenModel, open_model
from tests.golden import known

TINY = pathlib.Path(__file__).parents[1] / "golden" / "tiny_llama"  # has known's tokenizer


def opened(vocab_size: int, eos: tuple[int, ...] = (known.EOS,)) -> OpenModel:
    return OpenModel(TINY, checkpoint=None, config=mock_model(vocab_size, eos), generation_config={})


def test_ends_that_the_model_cannot_choose_are_left_out(caplog):
    """They would not fit into what goes to the device, where they are suppressed until ``min_tokens``."""
    model = opened(264, (known.EOS, 264, 2**40))
    assert model.limits("tiny", 64).eos_token_ids == (known.EOS, known.EOT)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "264, 1099511627776" in said and str(TINY) in said


def test_a_tokenizer_whose_bos_is_no_id_of_the_model(caplog):
    with pytest.raises(StartError, match=f"begins every prompt with the id {known.BOS}.* has 256; .* download both again"):
        opened(known.BOS).limits("tiny", 64)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
def test_a_file_that_the_user_may_not_read(tmp_path, name):
    """A mounted model often belongs to somebody else. Root may read everything, so a folder stands for such a file here."""
    known.make(tmp_path, known.chain({}), layers=1)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir()
    with pytest.raises(StartError, match=f"{tmp_path / name}: Is a directory; it must be a file that the user of the server may read"):
        open_model(ServeConfig(model=str(tmp_path)))
