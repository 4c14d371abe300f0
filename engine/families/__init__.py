"""Model families: how a Hugging Face config and its tensor names map onto the one decoder.

A family is a small file that makes a `Family`; adding one is a matter of writing it and listing it in `FAMILIES`.
Families are found by the config's ``architectures``, or by its ``model_type`` where that is absent. Everything a family
does not understand is an error that names the field: a default taken in silence is a model that answers wrong.
"""

from __future__ import annotations

from engine.config import ConfigError, ModelConfig
from engine.families.family import Family, TensorNames
from engine.families.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA3_VISION
from engine.families.gpt_oss import GPT_OSS
from engine.families.granite import GRANITE
from engine.families.llama import LLAMA
from engine.families.mistral import MISTRAL
from engine.families.mixtral import MIXTRAL
from engine.families.olmo2 import OLMO2
from engine.families.phi3 import PHI3
from engine.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from engine.families.smollm3 import SMOLLM3

__all__ = ["FAMILIES", "Family", "TensorNames", "find_family", "get_family", "load_config"]

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GEMMA3_VISION,
    PHI3,
    OLMO2,
    SMOLLM3,
    GRANITE,
    GPT_OSS,
)


def find_family(hf: dict) -> Family:
    """The family of a config.json. Raises `ConfigError` with the names that are served."""
    served = ", ".join(family.architecture for family in FAMILIES)
    architectures = hf.get("architectures")
    if architectures:
        for family in FAMILIES:
            if family.architecture in architectures:
                return family
        raise ConfigError(f"config.json: architectures is {architectures}, which is not served; served are {served}")
    model_type = hf.get("model_type")
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    raise ConfigError(
        f"config.json: architectures is absent and model_type is {model_type!r}, which is not served; "
        f"served are {served}"
    )


def get_family(name: str) -> Family:
    """The family with this `ModelConfig.family`."""
    return next(family for family in FAMILIES if family.name == name)


def load_config(hf: dict) -> ModelConfig:
    """The `ModelConfig` of a config.json. Raises `ConfigError`, which names the field, what was found and the
    remedy.
    """
    return find_family(hf).load_config(hf)
