"""What a family is, and reading a Hugging Face config strictly."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from typing import TypeGuard

from engine.config import ConfigError, HfConfig, ModelConfig, MoeConfig


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """Hugging Face names of the decoder's fields; ``{layer}`` stands for the layer's number, ``{expert}`` for an
    expert's.

    q, k, v, o, gate, up, down, router and the experts are modules: ``.weight`` and, where the model has one, ``.bias``
    follow. Where ``qkv`` or ``gate_up`` is given, the checkpoint has these as one module, rows one after the other.
    Where ``experts`` is given, it has all experts of a layer in ``gate_up_proj`` [experts, hidden, 2 * ffn], gate and
    up by turns, ``down_proj`` [experts, ffn, hidden], and their ``_bias``."""

    embed: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    attention_norm: str = "model.layers.{layer}.input_layernorm.weight"
    attention_post_norm: str = "model.layers.{layer}.post_attention_layernorm.weight"
    q: str = "model.layers.{layer}.self_attn.q_proj"
    k: str = "model.layers.{layer}.self_attn.k_proj"
    v: str = "model.layers.{layer}.self_attn.v_proj"
    o: str = "model.layers.{layer}.self_attn.o_proj"
    qkv: str | None = None
    q_norm: str = "model.layers.{layer}.self_attn.q_norm.weight"
    k_norm: str = "model.layers.{layer}.self_attn.k_norm.weight"
    sinks: str = "model.layers.{layer}.self_attn.sinks"
    mlp_norm: str = "model.layers.{layer}.post_attention_layernorm.weight"
    mlp_post_norm: str = "model.layers.{layer}.post_feedforward_layernorm.weight"
    gate: str = "model.layers.{layer}.mlp.gate_proj"
    up: str = "model.layers.{layer}.mlp.up_proj"
    down: str = "model.layers.{layer}.mlp.down_proj"
    gate_up: str | None = None
    router: str = "model.layers.{layer}.mlp.gate"
    expert_gate: str = "model.layers.{layer}.mlp.experts.{expert}.gate_proj"
    expert_up: str = "model.layers.{layer}.mlp.experts.{expert}.up_proj"
    expert_down: str = "model.layers.{layer}.mlp.experts.{expert}.down_proj"
    experts: str | None = None


INT32_MAX = 2**31 - 1
BUFFERS = (r"(.*\.)?rotary_emb\.inv_freq", r"(.*\.)?position_ids")  # which older versions of transformers stored


@dataclasses.dataclass(frozen=True)
class Family:
    """One family. ``ignored`` are patterns of tensors that checkpoints carry and no field uses, such as other towers."""

    name: str  # ModelConfig.family
    architecture: str  # in config.json's architectures
    model_type: str
    load_config: Callable[[HfConfig], ModelConfig]
    tensors: TensorNames = TensorNames()
    ignored: tuple[str, ...] = ()

    def ignores(self, tensor: str) -> bool:
        return any(re.fullmatch(pattern, tensor) for pattern in (*BUFFERS, *self.ignored))


class Fields:
    """Typed access to config.json. Absent and null are the same; a value of another type is a `ConfigError` by name."""

    def __init__(self, hf: HfConfig, prefix: str = "config.json"):
        self.hf = hf
        self.prefix = prefix

    def get(self, name: str) -> object:
        return self.hf.get(name)

    def fail(self, name: str, expected: str) -> ConfigError:
        return ConfigError(f"{self.prefix}: {name} is {self.hf.get(name)!r}; {expected}")

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1, maximum: int = INT32_MAX) -> int:
        value = self.hf.get(name)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self.prefix}: {name} is missing; the model needs it")
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.fail(name, f"an integer of at least {minimum} is needed")
        if value > maximum:
            raise self.fail(name, f"at most {maximum} is served")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.hf.get(name)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self.prefix}: {name} is missing; the model needs it")
        if not _is_positive(value):
            raise self.fail(name, "a positive number is needed")
        return float(value)

    def object(self, name: str) -> HfConfig:
        """An object; empty where it is absent."""
        value = self.hf.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.fail(name, "an object or null is needed")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.hf.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(name, "true or false is needed")
        return value

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of ``count`` positive numbers."""
        value = self.hf.get(name)
        if value is None:
            raise ConfigError(f"{self.prefix}: {name} is missing; the model needs it")
        numbers = [float(item) for item in value if _is_positive(item)] if isinstance(value, list) else []
        if not isinstance(value, list) or not len(value) == len(numbers) == count:
            raise ConfigError(f"{self.prefix}: {name} must be a list of {count} positive numbers")
        return tuple(numbers)

    def moe(self, experts: int, per_token: int, *, normalize: bool, bias: bool = False) -> MoeConfig:
        """A mixture of experts; the numbers are defaults. ``num_experts`` and ``num_local_experts`` are the same."""
        name = "num_experts" if self.hf.get("num_experts") is not None else "num_local_experts"
        experts, per_token = self.integer(name, experts), self.integer("num_experts_per_tok", per_token)
        if per_token > experts:
            raise self.fail("num_experts_per_tok", f"{name} is {experts}")
        return MoeConfig(experts, per_token, normalize, bias)

    def window(self, name: str = "sliding_window") -> int | None:
        """A number of tokens, or none."""
        return None if self.hf.get(name) is None else self.integer(name)

    def token(self, name: str) -> int | None:
        """A token id, or none. Lists (several EOS) are read by `tokens`."""
        ids = self.tokens(name)
        if len(ids) > 1:
            raise self.fail(name, "one id is needed")
        return ids[0] if ids else None

    def tokens(self, name: str) -> tuple[int, ...]:
        """Token ids: an integer, a list of them, or null."""
        value = self.hf.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(id, bool) or not isinstance(id, int) or not 0 <= id <= INT32_MAX for id in ids):
            raise self.fail(name, "token ids are needed")
        return tuple(ids)


def _is_positive(value: object) -> TypeGuard[float]:
    """Whether it is a number above 0, and one that a float can be."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
