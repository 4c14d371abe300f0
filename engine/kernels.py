"""How the programs of one engine attend: the plain implementation, the Pallas kernels that come with JAX, or C++ on CPU.

`choose_attention` decides once per engine, from the platform and from what the model needs. A kernel takes what it can do; everything
else falls to `engine.attention`, for a reason that `Attention.explain` gives and `preheat plan` prints.

Where layers are scanned, one pool holds all of them, and a program that made XLA copy it would need it twice. Two rules keep
it in place on TPUs, whichever implementation attends:

* Attention sees a pool [n, kv_heads, pages, page_size, head_dim] as one list of n * kv_heads * pages pages, and each head of a row
  as a row of its own. One index then finds a page, so XLA has no order of dimensions to prefer; merging leading dimensions moves
  nothing.
* What stores into a pool pins the order of its dimensions (`Attention.pin`).

All of it is about what one device has of heads, rows and pages.

Kernels are imported where they are used: Pallas takes a quarter of a second to import.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import warnings
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from engine import native
from engine.attention import Scoring, attend_pages, attend_prefix, attend_rows
from engine.config import ConfigError, EngineConfig, ModelConfig
from engine.quantization import Quantized

PAGES_BLOCK = 512  # tokens of one row that a decode kernel reads at once, at most
QUERY_BLOCK, KEY_BLOCK = 256, 512  # of the prefill kernel, at most
TABLE_LIMIT = 2**19  # bytes of page indices: they are in a TPU's scalar memory, of 1 MiB
LIST_LIMIT = 2**31  # elements of a pool that the GPU kernel can address

Window = jax.Array | int | None
Pool = jax.Array | Quantized
Kernel = Callable[..., jax.Array]  # `_tpu_pages`, `_gpu_pages` or `_tpu_prefix`


@dataclasses.dataclass(frozen=True)
class Choice:
    """Who attends: a kernel, or none for a ``reason``."""

    kernel: Kernel | None = None
    name: str = "XLA"
    reason: str = ""  # why none, where kernels were asked for

    def __str__(self) -> str:
        return f"{self.name}, because {self.reason}" if self.reason else self.name


@dataclasses.dataclass(frozen=True)
class Attention:
    """How the programs attend. ``listed`` is off where every layer has a pool of its own.

    ``pins`` is off on GPUs: there XLA lays arrays out as they are written anyway. With ``native``, `engine.native` attends, and stores in
    decode.
    """

    listed: bool = False
    pins: bool = False
    native: bool = False
    decode: Choice = Choice()
    prefill: Choice = Choice()

    def explain(self) -> str:
        """One line for people."""
        return f"attention in decode: {self.decode}; in prefill: {self.prefill}"

    def pin(self, pool: jax.Array) -> jax.Array:
        """The pool with its dimensions in memory as they are written."""
        return with_layout_constraint(pool, Layout(major_to_minor=tuple(range(pool.ndim)))) if self.pins else pool

    def pages(
        self,
        q: jax.Array,
        k_pages: Pool,
        v_pages: Pool,
        layer: jax.Array | int,
        page_table: jax.Array,
        lengths: jax.Array,
        *,
        scoring: Scoring,
        window: Window,
        sinks: jax.Array | None,
    ) -> jax.Array:
        """`engine.attention.attend_pages`."""
        if not self.listed:
            return attend_pages(
                q, k_pages, v_pages, layer, page_table, lengths, scoring=scoring, window=window, sinks=sinks
            )
        return _attend_listed(self.decode.kernel, scoring, q, k_pages, v_pages, layer, page_table, lengths, window, sinks)

    def prefix(
        self,
        q: jax.Array,
        keys: Pool,
        values: Pool,
        layer: jax.Array | int,
        positions: jax.Array,
        length: jax.Array,
        *,
        scoring: Scoring,
        window: Window,
        sinks: jax.Array | None,
    ) -> jax.Array:
        """`engine.attention.attend_prefix`."""
        if self.native:
            pools = keys, values
            return native.prefill(pools, layer, q, positions[0], length, scoring=scoring, window=window, sinks=sinks)
        if self.prefill.kernel is None:
            return attend_prefix(q, keys, values, layer, positions, length, scoring=scoring, window=window, sinks=sinks)
        return self.prefill.kernel(scoring, window, q, keys, values, layer, positions, sinks)


def choose_attention(model: ModelConfig, config: EngineConfig, platform: str) -> Attention:
    """Who attends in the programs of an engine on devices of ``platform`` (``cpu``, ``gpu``, ``tpu``). Model and layout are one
    device's (`engine.sharding`).

    Raises:
      ConfigError: kernels are asked for where there are none.
    """
    listed = config.layers == "scanned"
    pins = listed and platform != "gpu"
    if config.attention == "xla":
        return Attention(listed, pins)
    if config.attention == "native":
        if platform != "cpu":
            raise ConfigError(f"--attention native is for CPUs, not for {platform}; use --attention auto, xla or pallas")
        if reason := native.obstacle(model.head_dim):
            return Attention(listed, pins, decode=Choice(reason=reason), prefill=Choice(reason=reason))
        return Attention(listed, pins, native=True, decode=Choice(name="native"), prefill=Choice(name="native"))
    if platform not in ("tpu", "gpu") or not listed:
        raise ConfigError(f"--attention pallas: there are no kernels for {platform}; use --attention auto or xla")
    paged = Choice(_tpu_pages if platform == "tpu" else _gpu_pages, "Pallas paged_attention")
    splash = Choice(_tpu_prefix, "Pallas splash_attention")
    if reason := _decode_obstacle(model, config, platform):
        paged = Choice(reason=reason)
    if reason := _prefill_obstacle(model, config, platform):
        splash = Choice(reason=reason)
    return Attention(listed, pins, decode=paged, prefill=splash)


def _decode_obstacle(model: ModelConfig, config: EngineConfig, platform: str) -> str | None:
    if config.kv_dtype != "auto":
        return f"keys are {config.kv_dtype}"
    heads = model.num_kv_heads
    if any(kind.window is not None for kind in model.kinds):
        return "layers have windows"
    if model.sinks:
        return "heads have sinks"
    if platform == "tpu":
        if config.dtype != "bfloat16":
            return f"the kernel would round {config.dtype} keys to bfloat16"
        if config.stored_head_dim(model.head_dim) % 128 or config.page_size % 16:
            return f"pages of {config.page_size} x {config.stored_head_dim(model.head_dim)} are no whole tiles"
        if config.slots * heads * config.pages_per_slot * 4 > TABLE_LIMIT:
            return "the page table of all slots and heads is too large for scalar memory"
    if platform == "gpu":
        if importlib.util.find_spec("jax.experimental.pallas.ops.gpu.paged_attention") is None:
            return "this version of JAX has no kernel"
        if not _power_of_two(model.head_dim) or not _power_of_two(config.page_size):
            return f"pages of {config.page_size} x {model.head_dim} are no powers of two"
        if model.num_layers * heads * config.kv_pages * config.page_size * model.head_dim >= LIST_LIMIT:
            return "the pool has 2^31 elements or more"
    return None


def _prefill_obstacle(model: ModelConfig, config: EngineConfig, platform: str) -> str | None:
    if config.kv_dtype != "auto":
        return f"keys are {config.kv_dtype}"
    if platform == "gpu":
        return "the GPU kernels cannot continue a prefix"
    if len({kind.window for kind in model.kinds}) > 1:
        return "windows differ between layers"
    if config.stored_head_dim(model.head_dim) % 128 or config.prefix_capacity % 128:
        return f"a prefix of {config.prefix_capacity} x {config.stored_head_dim(model.head_dim)} is no whole tiles"
    if odd := [bucket for bucket in config.prefill_buckets if bucket // config.groups % 16]:
        return f"prefill buckets {odd} are no multiples of 16" + (f" for each of {config.groups} groups" if config.groups > 1 else "")
    return None


def _power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _attend_listed(
    kernel: Kernel | None,
    scoring: Scoring,
    q: jax.Array,  # [b, k, g, head_dim]
    k_pages: Pool,  # [n, k, pages, page_size, head_dim]
    v_pages: Pool,
    layer: jax.Array | int,
    page_table: jax.Array,  # int32 [b, width]
    lengths: jax.Array,  # int32 [b]
    window: Window,
    sinks: jax.Array | None,  # [k, g]
) -> jax.Array:  # [b, k, g, head_dim]
    """Attends on one device, over the list of all pages."""
    n, heads, pages = k_pages.shape[:3]
    first = (layer * heads + jnp.arange(heads, dtype=jnp.int32)) * pages
    table = (page_table[:, None, :] + first[None, :, None]).reshape(-1, page_table.shape[1])  # [b * k, width]
    k_list, v_list = (pool.reshape(n * heads * pages, *pool.shape[3:]) for pool in (k_pages, v_pages))
    rows, lengths = q.reshape(-1, *q.shape[2:]), jnp.repeat(lengths, heads)
    if kernel is not None:
        out = kernel(scoring, rows, k_list, v_list, table, lengths)
    else:
        if sinks is not None:
            sinks = jnp.tile(sinks, (q.shape[0], 1))[:, None]  # [b * k, 1, g]
        lists = k_list[None, None], v_list[None, None]
        out = attend_rows(rows[:, None], *lists, 0, table, lengths, scoring=scoring, window=window, sinks=sinks)
    return out.reshape(q.shape)


def _tpu_pages(
    scoring: Scoring, rows: jax.Array, k_list: jax.Array, v_list: jax.Array, table: jax.Array, lengths: jax.Array
) -> jax.Array:
    """rows [r, g, head_dim], lists [pages, page_size, head_dim], table int32 [r, width], lengths int32 [r] -> as rows."""
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    out: jax.Array = paged_attention(
        rows.astype(jnp.float32) * _scale(scoring, rows),  # the kernel does not scale, and computes in float32
        k_list[None],
        v_list[None],
        lengths,
        table,
        pages_per_compute_block=math.gcd(table.shape[1], PAGES_BLOCK // k_list.shape[1]),
        attn_logits_soft_cap=scoring.softcap,
    )
    return out.astype(rows.dtype)


def _gpu_pages(
    scoring: Scoring, rows: jax.Array, k_list: jax.Array, v_list: jax.Array, table: jax.Array, lengths: jax.Array
) -> jax.Array:
    """As `_tpu_pages`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # since JAX 0.12
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    width = table.shape[1]
    splits = math.gcd(width, 16)  # of a row's pages, visited in parallel
    out = paged_attention(
        (rows.astype(jnp.float32) * _scale(scoring, rows)).astype(rows.dtype),
        k_list[None],
        v_list[None],
        table,
        lengths,
        k_splits=splits,
        pages_per_compute_block=math.gcd(width // splits, 8),
        attn_logits_soft_cap=scoring.softcap,
    )
    attended: jax.Array = jnp.where(lengths[:, None, None] > 0, out, 0)
    return attended


@dataclasses.dataclass(frozen=True)
class _Causal:
    """Which keys a query sees; equal ones are traced once."""

    window: int | None

    def __call__(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        seen = keys <= queries
        return seen if self.window is None else seen & (keys > queries - self.window)


def _tpu_prefix(
    scoring: Scoring,
    window: int | None,
    q: jax.Array,  # [t, k, g, head_dim]
    keys: jax.Array,  # [n, k, capacity, head_dim]
    values: jax.Array,
    layer: jax.Array,
    positions: jax.Array,  # int32 [t], consecutive
    sinks: jax.Array | None,  # [k, g]
) -> jax.Array:  # [t, k, g, head_dim]
    """Splash attention with a causal mask that begins at the first query's position, which is not known when it is compiled.

    Its own constructors make a mask's table of blocks from static masks; here it is made from the positions.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as masks

    tokens, heads, group, head_dim = q.shape
    block_q, block_kv = math.gcd(tokens, QUERY_BLOCK), math.gcd(keys.shape[2], KEY_BLOCK)
    lowest, highest = positions[::block_q], positions[block_q - 1 :: block_q]  # [query blocks]
    first = jnp.zeros_like(lowest) if window is None else jnp.maximum(lowest + 1 - window, 0) // block_kv
    last = highest // block_kv
    block = jnp.arange(keys.shape[2] // block_kv, dtype=jnp.int32)[None]
    first, last = first[:, None], last[:, None]
    # Padded queries see what precedes them too, though nobody reads the result: a row that saw nothing would be NaN.
    visited = (block >= first) & (block <= last)
    kernel = splash.SplashAttentionKernel(
        masks.MaskInfo(
            data_next=jnp.clip(block, first, last)[None],  # a block that stays is not fetched again
            mask_next=None,
            block_mask=visited.astype(jnp.int32)[None],
            partial_mask_blocks=None,
            q_sequence=positions,  # type: ignore[arg-type]  # it takes arrays of the device too
        ),
        None,
        None,
        block_sizes=splash.BlockSizes(block_q=block_q, block_kv=block_kv),
        is_mqa=False,
        save_residuals=False,
        mask_value=splash.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=scoring.softcap,
        residual_checkpoint_name=None,
        mask_function=_Causal(window),
        interpret=False,
    )
    scaled = (q.astype(jnp.float32) * _scale(scoring, q)).astype(q.dtype)
    of_layer = [jax.lax.dynamic_index_in_dim(buffer, layer, keepdims=False) for buffer in (keys, values)]
    rows = scaled.transpose(1, 2, 0, 3).reshape(heads * group, tokens, head_dim)
    of_heads = None if sinks is None else sinks.reshape(-1).astype(jnp.float32)
    out = cast(jax.Array, kernel(rows, *of_layer, sinks=of_heads))  # without residuals, as told above
    return out.reshape(heads, group, tokens, head_dim).transpose(2, 0, 1, 3)


def _scale(scoring: Scoring, q: jax.Array) -> float:
    return q.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
