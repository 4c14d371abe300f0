"""Rotary embeddings as configs spell them.

``rope_parameters`` (transformers 5), or ``rope_theta`` with ``rope_scaling``, whose kind is ``rope_type`` or, in older
files, ``type``. In ``rope_parameters`` each layer type may have its own."""

from __future__ import annotations

import dataclasses
import math

from engine.config import ConfigError, HfConfig, RopeConfig
from engine.families.family import Fields

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
ALIASES = {"su": "longrope"}  # the first name of longrope
KNOWN = frozenset(
    """rope_type type rope_theta factor partial_rotary_factor original_max_position_embeddings low_freq_factor
    high_freq_factor attention_factor beta_fast beta_slow mscale mscale_all_dim truncate short_factor long_factor
    finetuned""".split()
)


@dataclasses.dataclass(frozen=True)
class RopeDefaults:
    """What a family takes where its config is silent, and what it can have."""

    theta: float = 10_000.0
    partial: bool = False  # a part of each head may be rotated
    aliases: tuple[tuple[str, str], ...] = ()  # kinds that this family names otherwise


def rope_config(hf: HfConfig, max_position: int, head_dim: int, defaults: RopeDefaults = RopeDefaults()) -> RopeConfig:
    """The rotary embedding of a model that has one for all layers."""
    name, scaling = _parameters(hf)
    if any(isinstance(value, dict) for value in scaling.values()):
        kinds = list(scaling)
        raise ConfigError(
            f"config.json: {name} differs between layers ({', '.join(kinds)}), which this family does not have"
        )
    return read_rope(hf, name, scaling, max_position, head_dim, defaults)


def _parameters(hf: HfConfig) -> tuple[str, HfConfig]:
    # Where both are there, transformers takes rope_scaling.
    name = (
        "rope_scaling" if hf.get("rope_scaling") is not None or hf.get("rope_parameters") is None else "rope_parameters"
    )
    return name, Fields(hf).object(name)


def read_rope(
    hf: HfConfig, name: str, scaling: HfConfig, max_position: int, head_dim: int, defaults: RopeDefaults = RopeDefaults()
) -> RopeConfig:
    """One object of parameters, called ``name`` in messages; what it does not say is in ``hf`` itself, or a default."""
    fields, top = Fields(scaling, f"config.json: {name}"), Fields(hf)
    if unknown := sorted(scaling.keys() - KNOWN):
        raise ConfigError(f"config.json: {name} has {', '.join(unknown)}, which is not served")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if isinstance(kind, str):
        kind = dict(defaults.aliases).get(kind) or ALIASES.get(kind, kind)
    if kind not in KINDS:
        raise ConfigError(
            f"config.json: {name} has rope_type {kind!r}, which is not served; served are {', '.join(KINDS)}"
        )
    theta = fields.number("rope_theta", top.number("rope_theta", defaults.theta))
    partial = fields.number("partial_rotary_factor", top.number("partial_rotary_factor", 1.0))
    if partial != 1.0 and not defaults.partial:
        raise ConfigError(f"config.json: partial_rotary_factor is {partial}; this family rotates whole heads (1.0)")
    rotated = int(head_dim * partial)
    if partial > 1 or rotated % 2 or not rotated:
        raise ConfigError(
            f"config.json: partial_rotary_factor is {partial}, which rotates {rotated} of {head_dim} dimensions"
        )
    rope = RopeConfig(theta=theta, rotary_dim=None if rotated == head_dim else rotated)
    original = top.integer(
        "original_max_position_embeddings", fields.integer("original_max_position_embeddings", max_position)
    )
    match kind:
        case "default":
            return rope
        case "linear":
            return dataclasses.replace(rope, kind="linear", factor=fields.number("factor"))
        case "dynamic":
            factor = fields.number("factor")
            return dataclasses.replace(rope, kind="dynamic", factor=factor, original_max_position=max_position)
        case "llama3":
            return _llama3(rope, fields, original)
        case "yarn":
            return _yarn(rope, fields, original, max_position)
    return _longrope(rope, fields, original, max_position, rotated)


def _llama3(rope: RopeConfig, fields: Fields, original: int) -> RopeConfig:
    rope = dataclasses.replace(
        rope,
        kind="llama3",
        factor=fields.number("factor"),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        original_max_position=original,
    )
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise fields.fail("high_freq_factor", f"it must be over low_freq_factor ({rope.low_freq_factor})")
    return rope


def _yarn(rope: RopeConfig, fields: Fields, original: int, max_position: int) -> RopeConfig:
    """``attention_factor`` as transformers infers it: 0.1 ln(factor) + 1 (arXiv:2309.00071), or the ratio of two
    such."""
    factor = fields.number("factor", max_position / original)

    def length_scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    inferred = length_scale(1.0)
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        inferred = length_scale(fields.number("mscale")) / length_scale(fields.number("mscale_all_dim"))
    return dataclasses.replace(
        rope,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        attention_factor=fields.number("attention_factor", inferred),
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        truncate=fields.flag("truncate", True),
    )


def _longrope(rope: RopeConfig, fields: Fields, original: int, max_position: int, rotated: int) -> RopeConfig:
    factor = fields.number("factor", max_position / original)
    inferred = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return dataclasses.replace(
        rope,
        kind="longrope",
        factor=factor,
        original_max_position=original,
        attention_factor=fields.number("attention_factor", inferred),
        short_factor=fields.numbers("short_factor", rotated // 2),
        long_factor=fields.numbers("long_factor", rotated // 2),
    )


def longest(rope: RopeConfig, max_position: int) -> int:
    """The longest sequence that the rotation is made for, where ``max_position_embeddings`` may still be the trained
    length."""
    if rope.kind in ("yarn", "dynamic"):
        return max(max_position, round(rope.original_max_position * rope.factor))
    return max_position
