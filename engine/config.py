"""What a model is, and how it is laid out to be served.

`ModelConfig` is read from a checkpoint by a family (``engine/families``) and says everything that the decoder needs to know.
`EngineConfig` holds the resolved numbers of one server: after it is made, no number of it is found again at run time, so
a restart with the same `EngineConfig` has the same programs.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

HfConfig = dict[str, object]  # config.json as Hugging Face has it; `engine.families.family.Fields` reads it strictly


class ConfigError(ValueError):
    """A model or engine configuration that cannot be served. The message names the field, what was found and the remedy."""


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base frequency and how it is stretched beyond the trained length.

    ``kind`` is Hugging Face's ``rope_type``; each kind uses the fields that it has there, and ``engine/rope.py`` has the formulas.
    ``attention_factor`` scales the rotation (yarn and longrope lengthen queries and keys by it). ``rotary_dim`` is how many
    dimensions of a head are rotated, the first ones; None: all.
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()  # longrope: one divisor per rotated pair, for sequences up to the original length
    long_factor: tuple[float, ...] = ()  # and for longer ones
    rotary_dim: int | None = None

    @property
    def follows_length(self) -> bool:
        """Whether the frequencies depend on how long the whole sequence is."""
        return self.kind in ("dynamic", "longrope")

    def regime(self, length: int) -> int:
        """Names the frequencies that a sequence of ``length`` tokens has: keys computed in one regime are of no use in another."""
        if not self.follows_length or length <= self.original_max_position:
            return 0
        return length if self.kind == "dynamic" else 1


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """How the layers of one kind attend.

    ``rope`` is None in layers that rotate nothing. ``window`` is how many tokens a query sees, itself included; None: all.
    """

    rope: RopeConfig | None = RopeConfig()
    window: int | None = None


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """Mixture of experts in place of the feed-forward layer: each token goes through ``per_token`` of ``experts``."""

    experts: int
    per_token: int
    normalize: bool  # the chosen experts' probabilities are scaled to sum to 1
    bias: bool = False  # of the router and of the experts


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer, as data. One decoder (``engine/model.py``) serves them all."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of one expert in a mixture
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # the longest sequence the model was made for, in tokens
    norm_eps: float = 1e-5
    activation: Literal["silu", "gelu", "gelu_tanh", "clamped_swiglu"] = "silu"
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool = False  # the output head is the embedding matrix
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    # Layers that differ: their kinds, and the kind of each. Empty: all layers rotate by `rope` and see everything.
    layer_kinds: tuple[LayerKind, ...] = ()
    layer_pattern: tuple[int, ...] = ()
    norms: Literal["pre", "post", "both"] = "pre"  # norms before attention and feed-forward, after them, or both
    norm_offset: float = 0.0  # added to norm weights when they are loaded
    wide_norms: bool = False  # norm weights are float32 and multiply before the result is rounded to the model's dtype
    qk_norm: Literal["none", "head", "projection"] = "none"  # norm of queries and keys: per head, or over all heads
    query_scale: float | None = None  # of attention scores; None: 1 / sqrt(head_dim)
    attention_softcap: float | None = None  # scores become cap * tanh(score / cap)
    sinks: bool = False  # each query head has a score of its own for attending to nothing
    logit_softcap: float | None = None
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and feed-forward add
    logit_scale: float = 1.0
    moe: MoeConfig | None = None

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """All kinds of layers; at least one."""
        return self.layer_kinds or (LayerKind(self.rope),)

    @property
    def pattern(self) -> tuple[int, ...]:
        """The index in `kinds` of each layer's kind."""
        return self.layer_pattern or (0,) * self.num_layers

    @property
    def follows_length(self) -> bool:
        """Whether keys depend on how long the whole sequence is (`RopeConfig.regime`)."""
        return any(kind.rope is not None and kind.rope.follows_length for kind in self.kinds)

    def outgrows(self, before: int, length: int) -> bool:
        """Whether the keys of a sequence that had ``before`` tokens are computed anew when it has ``length``.

        So longrope does where the frequencies change; the keys of ``dynamic`` stay what they were when they were made.
        """
        ropes = [kind.rope for kind in self.kinds if kind.rope is not None and kind.rope.kind == "longrope"]
        return any(before <= rope.original_max_position < length for rope in ropes)

    def regime(self, length: int) -> tuple[int, ...]:
        """Names the rotary frequencies of a sequence of ``length`` tokens; keys are only shared within one regime."""
        return tuple(0 if kind.rope is None else kind.rope.regime(length) for kind in self.kinds)


AdapterMap = Literal["qkv", "o", "gate_up", "down"]
ADAPTER_MAPS: tuple[AdapterMap, ...] = ("qkv", "o", "gate_up", "down")  # the linear maps of a layer, as the engine has them


@dataclasses.dataclass(frozen=True)
class AdapterLayout:
    """The LoRA adapters that a server holds: how many, padded to which rank, and which maps of a layer any of them changes."""

    count: int
    rank: int
    maps: tuple[AdapterMap, ...]  # some of `ADAPTER_MAPS`, in that order


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """The resolved layout of one server. Lengths are in tokens.

    Slots, batch sizes and prefill buckets count for all devices together. ``kv_pages`` counts the pages of a pool, the scratch page 0
    included (padded rows write there); each of the ``groups`` (``engine/sharding.py``) has one.
    ``prefixes`` is the number of contiguous prefix buffers, that is of prompts between prefill and insert at once.
    """

    slots: int
    max_len: int
    kv_pages: int
    prefill_buckets: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    page_size: int = 32
    prefixes: int = 2
    dtype: Literal["float32", "bfloat16"] = "float32"
    quantize: Literal["none", "int8"] = "none"  # of the layers' matrices
    kv_dtype: Literal["auto", "int8"] = "auto"  # of keys and values, stored; auto: ``dtype``
    tp: int = 1
    dp: int = 1
    ep: int = 1
    layers: Literal["unrolled", "scanned"] = "unrolled"  # chosen by backend in one place: see `layer_layout`
    attention: Literal["xla", "pallas", "native"] = "xla"  # likewise: see `attention_choice`
    lanes: int = 1  # keys and values are stored padded to a multiple of so many dimensions: see `vector_lanes`
    adapters: AdapterLayout | None = None
    call_bytes: int = 0  # of weights that a call of some unrolled layers reads (`engine.segments`); 0: all layers in one program

    @property
    def devices(self) -> int:
        """Devices that hold the model."""
        return self.dp * self.ep * self.tp

    @property
    def groups(self) -> int:
        """Groups of devices with slots and pages of their own."""
        return self.dp * self.ep

    @property
    def group_slots(self) -> int:
        """Slots of one group; slot s is in group ``s % groups``."""
        return self.slots // self.groups

    @property
    def pages_per_slot(self) -> int:
        """Pages that a sequence of ``max_len`` tokens takes."""
        return -(-self.max_len // self.page_size)

    @property
    def prefill_chunk(self) -> int:
        """The longest chunk prefilled in one call."""
        return self.prefill_buckets[-1]

    @property
    def prefix_capacity(self) -> int:
        """Tokens a prefix buffer holds: ``max_len``, and room for the padding of its last chunk; whole pages."""
        whole = math.lcm(self.page_size, self.lanes)
        return -(-(self.max_len + self.prefill_chunk) // whole) * whole

    def stored_head_dim(self, head_dim: int) -> int:
        """Dimensions that a head's key or value takes where it is stored."""
        return -(-head_dim // self.lanes) * self.lanes

    def prefill_bucket(self, length: int) -> int:
        """The smallest bucket that holds ``length`` tokens."""
        return next(bucket for bucket in self.prefill_buckets if bucket >= length)

    def batch_size(self, rows: int) -> int:
        """The smallest batch size that holds ``rows`` rows."""
        return next(size for size in self.batch_sizes if size >= rows)


CPU_CALL_BYTES = 64 * 2**20


def layer_layout(platform: str) -> Literal["unrolled", "scanned"]:
    """Whether layers are unrolled or scanned on a backend (``cpu``, ``gpu``, ``tpu``).

    On CPU a scan copies every layer's weights out of the stack at each step and halves the speed of decoding; elsewhere it
    costs nothing and makes programs whose size does not grow with the number of layers.
    """
    return "unrolled" if platform == "cpu" else "scanned"


def call_bytes(platform: str) -> int:
    """`EngineConfig.call_bytes` for a backend: only on CPU does a program's start-up cost grow with the number of layers."""
    return CPU_CALL_BYTES if platform == "cpu" else 0


def attention_choice(
    option: Literal["auto", "xla", "pallas", "native"], platform: str
) -> Literal["xla", "pallas", "native"]:
    """What ``--attention`` means on a backend. `engine.kernels` falls back to XLA for what its kernels cannot do.

    The TPU's kernels have been compiled by the TPU's compiler and compared in interpret mode. The GPU's could only be compared: there
    they have to be asked for.
    """
    if option != "auto":
        return option
    return "native" if platform == "cpu" else "pallas" if platform == "tpu" else "xla"


def vector_lanes(platform: str) -> int:
    """A TPU's vectors are 128 wide. A pool of narrower heads would be laid out with another dimension innermost, and copied by
    every program that reads or writes it.
    """
    return 128 if platform == "tpu" else 1
