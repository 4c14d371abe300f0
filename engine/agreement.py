"""Where a checkpoint's config and its tensors disagree: what transformers does is done, so that a model answers as it does there.

| found | done |
| --- | --- |
| the config ties head and embedding, both are there and differ | the checkpoint's head is used; a warning |
| the config ties them, and the two are equal, or only one is there | tied |
| the config does not tie them, and there is no head | an error (transformers takes random numbers) |
| a bias of a linear map is not there | zeros; a warning |
| another weight is not there, such as those of a layer | an error (transformers takes random numbers) |
| a tensor has another shape than the config says | an error |
| a tensor is of no use, such as those of layers beyond ``num_hidden_layers`` | not used; a warning, but for known buffers |
| a tensor belongs to one that is used, such as the scale of a quantized weight | an error (transformers answers wrong) |

Tensors of no use are an error in a GGUF, as llama.cpp has it, and in several files that no index names (`Checkpoint.strict`).

`read_model` decides what the programs depend on, before there are any; `check_tensors` is the loader's.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable, Mapping

import numpy as np

from engine.checkpoints import Checkpoint, CheckpointError
from engine.config import ConfigError, ModelConfig
from engine.families import Family, get_family, load_config

logger = logging.getLogger(__name__)

BLOCK = 4 * 2**20  # bytes of a tensor that are compared at once
SHOWN = 4  # names of tensors in a message


def read_model(checkpoint: Checkpoint) -> ModelConfig:
    """What the checkpoint's config says, and of its head what its tensors say: a head of its own, or the embedding.

    Where both are there the two are compared, up to the first difference: that reads them, but holds a block of each.

    Raises:
        ConfigError: a field of the config cannot be served; names the file.
    """
    try:
        model = load_config(checkpoint.hf_config)
    except ConfigError as error:
        file = checkpoint.path / "config.json" if checkpoint.path.is_dir() else checkpoint.path
        raise ConfigError(f"{file}: {str(error).removeprefix('config.json: ')}") from None
    names, available = get_family(model.family).tensors, set(checkpoint.names())
    if not model.tie_embeddings or not {names.embed, names.head} <= available:
        return model
    if _equal(checkpoint, names.embed, names.head):
        return model
    logger.warning(
        "%s: tensor %s differs from %s, although the config says that they are one (tie_word_embeddings): the head is used "
        "as it is there; set tie_word_embeddings to false if that is right, or remove the tensor",
        checkpoint.file(names.head), names.head, names.embed,
    )  # fmt: skip
    return dataclasses.replace(model, tie_embeddings=False)


def embedding(model: ModelConfig, available: Iterable[str]) -> str:
    """The tensor that holds the embedding: of a tied pair the one that is there."""
    names = get_family(model.family).tensors
    only_head = model.tie_embeddings and names.embed not in available and names.head in available
    return names.head if only_head else names.embed


def check_tensors(
    checkpoint: Checkpoint, model: ModelConfig, expected: Mapping[str, tuple[int, ...]], zeros: Iterable[str]
) -> None:
    """Checks that a checkpoint has the tensors that a model needs, in their shapes, and says what it has beside them.

    Args:
        expected: names and shapes of all that is read.
        zeros: biases that are not there, and taken as zeros.

    Raises:
        CheckpointError: names the tensor, its file and the remedy; see the module's table.
    """
    family, available = get_family(model.family), set(checkpoint.names())
    missing = sorted(expected.keys() - available)
    if missing:
        raise CheckpointError(f"{checkpoint.path} has no tensor {_some(missing)}, {_why_missing(family, model, available, missing)}")
    for name, shape in expected.items():
        found = tuple(checkpoint.shape(name))
        if found != shape:
            raise CheckpointError(
                f"{checkpoint.file(name)}: tensor {name} has shape {list(found)}, its config says {list(shape)}"
                + (f" (vocab_size {model.vocab_size})" if name in (family.tensors.embed, family.tensors.head) else "")
                + "; config and weights are of different models: download both again"
            )
    if zeros := sorted(zeros):
        logger.warning(
            "%s has no tensor %s, which the %s of its config has: zeros are taken in its place, as transformers does",
            checkpoint.path, _some(zeros), family.architecture,
        )  # fmt: skip
    tied = {family.tensors.head} if model.tie_embeddings else set()  # equal to the embedding: see `read_model`
    unused = sorted(name for name in available - expected.keys() - tied if not family.ignores(name))
    if unused:
        _judge_unused(checkpoint, family, model, expected, unused)


def _judge_unused(
    checkpoint: Checkpoint, family: Family, model: ModelConfig, expected: Mapping[str, tuple[int, ...]], unused: list[str]
) -> None:
    parts = [name for name in unused if any(name[: end.start()] in expected for end in re.finditer(r"[._]", name))]
    if parts:
        raise CheckpointError(
            f"{checkpoint.file(parts[0])} has tensor {_some(parts)}: a part of a weight that is used without it, as of quantized "
            "ones that the config does not tell of (quantization_config); download both again, or use an unquantized version"
        )
    beyond = [name for name in unused if (_layer(family, name) or 0) >= model.num_layers]
    about = f"which no field of {family.architecture} uses"
    if beyond == unused:
        about = f"of layers beyond the {model.num_layers} of its config (num_hidden_layers)"
    if checkpoint.strict:
        raise CheckpointError(
            f"{checkpoint.file(unused[0])} has tensor {_some(unused)}, {about}; "
            "the model has parts that its config does not tell of, or files of two models are mixed"
        )
    logger.warning("%s has tensor %s, %s: not used, as in transformers", checkpoint.file(unused[0]), _some(unused), about)


def _why_missing(family: Family, model: ModelConfig, available: set[str], missing: list[str]) -> str:
    """Why, and what to do."""
    layers = 1 + max((layer for name in available if (layer := _layer(family, name)) is not None), default=-1)
    if all((_layer(family, name) or 0) >= layers > 0 for name in missing):
        return (
            f"of the {model.num_layers} layers that its config says (num_hidden_layers): the checkpoint has {layers}; "
            "it is incomplete or of another model: download it again"
        )
    if missing == [family.tensors.head]:
        return (
            "and its config does not say that the embedding is the head (tie_word_embeddings): set it to true if it is; "
            "otherwise the checkpoint is incomplete: download it again"
        )
    return (
        f"which the {family.architecture} of its config needs; "
        "the checkpoint is incomplete or of another model: download it again"
    )


def _layer(family: Family, name: str) -> int | None:
    """The number of the layer that a tensor is of, or none."""
    prefix = family.tensors.o.partition("{layer}")[0]
    match = re.match(re.escape(prefix) + r"(\d+)\.", name)
    return None if match is None else int(match[1])


def _some(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" (and {more} more)" if more > 0 else "")


def _equal(checkpoint: Checkpoint, one: str, other: str) -> bool:
    """Whether two tensors hold the same numbers."""
    if checkpoint.shape(one) != checkpoint.shape(other):
        return False
    first, second = checkpoint.read(one), checkpoint.read(other)
    rows = max(1, BLOCK * len(first) // max(1, first.nbytes))
    try:
        for begin in range(0, len(first), rows):
            if not _same(first[begin : begin + rows], second[begin : begin + rows]):
                return False
            checkpoint.release(one)
            checkpoint.release(other)
        return True
    finally:
        checkpoint.release(one)
        checkpoint.release(other)


def _same(first: np.ndarray, second: np.ndarray) -> bool:
    """By their bytes, which is quick, or else by their numbers: types may differ, and 0 has two signs."""
    alike = first.dtype == second.dtype and np.array_equal(first.view(np.uint8), second.view(np.uint8))
    return alike or np.array_equal(first.astype(np.float32), second.astype(np.float32))
