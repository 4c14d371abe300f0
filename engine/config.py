"""What a model is, and how it is laid out to be served.

`ModelConfig` is read from a checkpoint by a family (``engine/families``) and says everything that the decoder needs to know.
`EngineConfig` holds the resolved numbers of one server: after it is made, no number of it is found again at run time, so
a restart with the same `EngineConfig` has the same programs.
"""

from __future__ import annotations

import dataclasses
from typing import Literal


class ConfigError(ValueError):
    """A model or engine configuration that cannot be served. The message names the field, what was found and the remedy."""


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base frequency and how it is stretched beyond the trained length.

    ``kind`` is Hugging Face's ``rope_type``. ``factor``, ``low_freq_factor``, ``high_freq_factor`` and
    ``original_max_position`` are used by the kinds that have them (``llama3``: section 3.1 of "The Llama 3 Herd of Models").
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer, as data. One decoder (``engine/model.py``) serves them all."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # the longest sequence the model was made for, in tokens
    norm_eps: float = 1e-5
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool = False  # the output head is the embedding matrix
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """The resolved layout of one server. Lengths are in tokens.

    ``kv_pages`` counts the pages of the pool, the scratch page 0 included (padded rows write there).
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
    quantize: Literal["none", "int8"] = "none"
    tp: int = 1
    layers: Literal["unrolled", "scanned"] = "unrolled"  # chosen by backend in one place: see `layer_layout`

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
        return -(-(self.max_len + self.prefill_chunk) // self.page_size) * self.page_size

    def prefill_bucket(self, length: int) -> int:
        """The smallest bucket that holds ``length`` tokens."""
        return next(bucket for bucket in self.prefill_buckets if bucket >= length)

    def batch_size(self, rows: int) -> int:
        """The smallest batch size that holds ``rows`` rows."""
        return next(size for size in self.batch_sizes if size >= rows)


def layer_layout(platform: str) -> Literal["unrolled", "scanned"]:
    """Whether layers are unrolled or scanned on a backend (``cpu``, ``gpu``, ``tpu``).

    On CPU a scan copies every layer's weights out of the stack at each step and halves the speed of decoding; elsewhere it
    costs nothing and makes programs whose size does not grow with the number of layers.
    """
    return "unrolled" if platform == "cpu" else "scanned"
