"""Model families: how a Hugging Face config and its tensor names map onto the one decoder.

A family is a `Family` at the top of a module of this package; it is found here, so that nothing else has to list it
(``docs/models.md`` shows one being added). Which family a model is of, its config's ``architectures`` say, or its
``model_type`` where that is absent. Everything a family does not understand is an error that names the field: a default
taken in silence is a model that answers wrong.
"""

from __future__ import annotations

from engine.config import ConfigError, HfConfig, ModelConfig
from engine.discovery import declared, unique
from engine.families.family import Family, TensorNames

__all__ = ["FAMILIES", "Family", "TensorNames", "find_family", "get_family", "load_config"]

FAMILIES = unique(declared(__name__, Family), "name", "architecture", "model_type")


def find_family(hf: HfConfig) -> Family:
    """The family of a config.json. Raises `ConfigError` with the names that are served."""
    served = ", ".join(family.architecture for family in FAMILIES)
    architectures = hf.get("architectures")
    if not isinstance(architectures, (list, type(None))):
        raise ConfigError(f"config.json: architectures is {architectures!r}; a list of names is needed")
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


def load_config(hf: HfConfig) -> ModelConfig:
    """The `ModelConfig` of a config.json. Raises `ConfigError`, which names the field, what was found and the
    remedy.
    """
    return find_family(hf).load_config(hf)
