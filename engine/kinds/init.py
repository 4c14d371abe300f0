"""``init_state`` and ``init_prefix``: the buffers, before the first request."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp

from engine.api import SamplingParams
from engine.kinds.builder import Builder, zeros
from engine.kinds.kind import Kind, Running
from engine.programs import Program
from engine.sampling import pack
from engine.state import DecodeState, PrefixBuffer


def state_programs(build: Builder) -> Iterator[Program]:
    state = build.state

    def init_state() -> DecodeState:
        empty: DecodeState = zeros("init_state", state)()
        neutral = jnp.broadcast_to(pack(SamplingParams()), state.sampling.shape)
        return dataclasses.replace(empty, sampling=neutral)

    yield build.program("init_state", init_state, (), state)


def prefix_programs(build: Builder) -> Iterator[Program]:
    yield build.program("init_prefix", zeros("init_prefix", build.prefix), (), build.prefix)


def touch_state(engine: Running, size: str, prefix: PrefixBuffer) -> object:
    return ()  # `JaxEngine.allocate` ran it: a second state would not fit beside the first


def touch_prefix(engine: Running, size: str, prefix: PrefixBuffer) -> object:
    prefix.arrays = engine.call("init_prefix")
    return prefix.arrays


INIT_STATE = Kind("init_state", 10, state_programs, touch_state)
INIT_PREFIX = Kind("init_prefix", 11, prefix_programs, touch_prefix)
