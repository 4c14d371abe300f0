"""The table of programs of an engine: what `engine.functions` does, jitted and donating, for every size that serving can call.

Everything here is abstract: nothing is traced, compiled or allocated.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from engine import functions
from engine.api import SamplingParams
from engine.config import EngineConfig, ModelConfig, RopeConfig
from engine.kernels import Attention
from engine.programs import Executable, Jitted, Program, tree_bytes
from engine.rope import rotary_dim
from engine.sampling import pack, result_width, sampling_width
from engine.segments import Segment, segments
from engine.sharding import describe, device_config, device_model, replicated, split, ways
from engine.state import DecodeState, Prefix, mask_words
from engine.weights import Weights, one_layer, stacked_fields


def make_table(
    model: ModelConfig,
    config: EngineConfig,
    mesh: Mesh,
    attention: Attention,
    weights: Weights,  # abstract, as are state and prefix
    state: DecodeState,
    prefix: Prefix,
) -> tuple[dict[str, Program], dict[str, tuple[Segment, ...]]]:
    """The programs by name, and the segments of those verbs that run in several programs, by the name of the whole."""
    split_chains: dict[str, tuple[Segment, ...]] = {}
    table = {program.name: program for program in _table(model, config, mesh, attention, weights, state, prefix, split_chains)}
    return table, split_chains


def _table(
    model: ModelConfig,
    config: EngineConfig,
    mesh: Mesh,
    attention: Attention,
    weights: Weights,
    state: DecodeState,
    prefix: Prefix,
    split_chains: dict[str, tuple[Segment, ...]],
) -> Iterator[Program]:
    def host(*shape: int) -> jax.ShapeDtypeStruct:
        return replicated(mesh, shape, "int32")

    def per_row(*shape: int, dtype: str | np.dtype = np.dtype("int32")) -> jax.ShapeDtypeStruct:
        return describe(mesh, shape, dtype, ("rows", *[None] * (len(shape) - 1)))

    def program(
        name: str,
        function: Executable,
        arguments: tuple[object, ...],
        outputs: object,
        *,
        donates: int | None = None,
        takes_state: bool = False,
        loads: bool = False,
    ) -> Program:
        jitted = jax.jit(
            split(function, mesh, arguments, outputs) if arguments else function,
            donate_argnums=() if donates is None else donates,
            in_shardings=jax.tree.map(lambda leaf: leaf.sharding, arguments),
            out_shardings=jax.tree.map(lambda leaf: leaf.sharding, outputs),
        )
        # What JAX calls its type has no clear_cache.
        return Program(name, cast(Jitted, jitted), arguments, donates, takes_state, loads)

    def named(name: str, function: Executable, *bound: object) -> Executable:
        # jit names the program after the function: profiles and logs then read like the table.
        partial = functools.partial(function, *bound)
        partial.__name__ = name  # type: ignore[attr-defined]  # any attribute may be set
        return partial

    def zeros(name: str, abstract: object) -> Executable:  # of whole arrays: XLA makes each device's part
        return named(name, lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract))

    def init_state() -> DecodeState:
        empty: DecodeState = zeros("init_state", state)()
        neutral = jnp.broadcast_to(pack(SamplingParams()), state.sampling.shape)
        return dataclasses.replace(empty, sampling=neutral)

    # What the functions are for: one device's share.
    whole_config, over = config, ways(config)
    model, config = device_model(model, config), device_config(config)
    if stacked := stacked_fields(weights):
        yield program("load", zeros("load", stacked), (), stacked, loads=True)
    for field, node in stacked.items():
        function = named(f"load_{field}", functions.place_layer)
        yield program(f"load/{field}", function, (node, one_layer(node), host()), node, donates=0, loads=True)

    sampling, mask, table = sampling_width(), mask_words(model.vocab_size), state.page_table.shape[1]
    first = host(1, result_width())
    yield program("init_state", init_state, (), state)
    yield program("init_prefix", zeros("init_prefix", prefix), (), prefix)

    def rotation(rope: RopeConfig | None, rows: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct] | None:
        if rope is None:
            return None
        angles = per_row(rows, rotary_dim(rope, model.head_dim) // 2, dtype="float32")
        return angles, angles

    def chain(
        name: str,
        rows: int,
        cache: functions.PrefixCache | functions.PagedCache,
        adapters: jax.ShapeDtypeStruct | None,
        bound: tuple[object, ...],
        carried: DecodeState | Prefix,
        request: jax.ShapeDtypeStruct,
        outputs: tuple[object, ...],
        end_outputs: tuple[object, ...] | None = None,
        *,
        takes_state: bool = False,
    ) -> Iterator[Program]:
        """The programs of `functions.prefill` or `generate`: one, or those of its segments.

        ``end_outputs`` are those of the last of several, where they differ from ``outputs``.
        """
        kind, _, size = name.partition("/")
        whole, begin, end = (
            named(f"{part}{kind}_{size}", getattr(functions, f"{part}{kind}"), model, over, config, *attends, *bound)
            for part, attends in (("", (attention,)), ("begin_", ()), ("end_", ()))
        )
        parts = segments(model, config, rows // over.groups, tree_bytes(weights.layers[0]))
        if not parts:
            yield program(name, whole, (carried, weights, request), (carried, *outputs), donates=0, takes_state=takes_state)
            return
        split_chains[name] = parts
        rest, outer = carried.with_pools((), ()), dataclasses.replace(weights, layers=())
        x = per_row(rows, model.hidden_size, dtype=config.dtype)
        about = functions.Rows(tuple(rotation(layers.rope, rows) for layers in model.kinds), cache, adapters)
        yield program(f"{name}/begin", begin, (rest, outer, request), (x, about))
        for segment in {segment.part: segment for segment in reversed(parts)}.values():
            run = named(f"{kind}_{size}_{segment.part}", functions.run_layers, model, over, attention, segment.pattern)
            pools = segment.of_pools(carried.pools)
            arguments = (pools, weights.layers[segment.layers], x, about)
            yield program(f"{name}/{segment.part}", run, arguments, (pools, x), donates=0, takes_state=takes_state)
        outputs = (rest, *(end_outputs or outputs))
        yield program(f"{name}/end", end, (rest, outer, request, x), outputs, donates=0, takes_state=takes_state)

    head = host(functions.PREFILL_HEADER + sampling + mask + config.max_len)
    row = replicated(mesh, (1, model.hidden_size), config.dtype)
    for bucket in config.prefill_buckets:
        prefix_cache = functions.PrefixCache(start=host(), positions=per_row(bucket), length=host())
        prompt = per_row(bucket, result_width())
        yield from chain(
            f"prefill/{bucket}", bucket, prefix_cache, None if config.adapters is None else host(1), (bucket,), prefix, host(head.shape[0] + bucket),
            (first, prompt), (prompt, row, head),
        )  # fmt: skip
    if any(name.startswith("prefill") for name in split_chains):
        function = named("first_token", functions.first_token, model, over, config)
        yield program("first_token", function, (prefix.with_pools((), ()), dataclasses.replace(weights, layers=()), head, row), first)
    request = host(functions.INSERT_HEADER + sampling + config.max_len + table)
    function = named("insert", functions.insert, model, over, config)
    yield program("insert", function, (state, prefix, first, request), state, donates=0, takes_state=True)
    request = host(functions.FETCH_HEADER + table + table * config.page_size)
    yield program("fetch", named("fetch", functions.fetch, over, config), (prefix, state, request), prefix, donates=0)
    function = named("set_mask", functions.set_mask, model, over)
    yield program(
        "set_mask", function, (state, host(functions.MASK_HEADER + mask)), state, donates=0, takes_state=True
    )
    for batch in whole_config.batch_sizes:
        one = per_row(batch)
        cache = functions.PagedCache(page_table=per_row(batch, table), pages=one, offsets=one, lengths=one)
        adapters = None if config.adapters is None else one
        outputs = (per_row(batch, result_width()),)
        yield from chain(
            f"generate/{batch}", batch, cache, adapters, (), state, per_row(batch, 2), outputs, takes_state=True
        )
