"""``prefill/BUCKET``: one chunk of a prompt, and its first token where it is the last; and ``first_token``, which programs of all
buckets share where prefill runs in segments.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax
import numpy as np

from engine import functions
from engine.api import SamplingParams
from engine.kinds.builder import Builder, named
from engine.kinds.kind import Kind, Running
from engine.programs import Executable, Program
from engine.sampling import result_width, sampling_width
from engine.sharding import replicated
from engine.state import PrefixBuffer, mask_words


def head_of(build: Builder) -> jax.ShapeDtypeStruct:
    """A request without its tokens."""
    width = functions.PREFILL_HEADER + sampling_width() + mask_words(build.model.vocab_size) + build.config.max_len
    return build.host(width)


def last_row(build: Builder) -> jax.ShapeDtypeStruct:
    """The hidden state of a chunk's last token."""
    return replicated(build.mesh, (1, build.model.hidden_size), build.config.dtype)


def programs(build: Builder) -> Iterator[Program]:
    bound = (build.model, build.ways, build.config)
    parts: dict[str, Executable] = {"begin_": functions.begin_prefill, "end_": functions.end_prefill}
    head, first = head_of(build), build.host(1, result_width())

    def functions_of(part: str, bucket: int) -> Executable:
        if part:
            return functools.partial(parts[part], *bound, bucket)
        return functools.partial(functions.prefill, *bound, build.attention, bucket)

    for bucket in build.config.prefill_buckets:
        prompt = build.per_row(bucket, result_width())
        yield from build.chain(
            f"prefill/{bucket}",
            functools.partial(functions_of, bucket=bucket),
            rows=bucket,
            cache=functions.PrefixCache(start=build.host(), positions=build.per_row(bucket), length=build.host()),
            adapters=None if build.config.adapters is None else build.host(1),
            carried=build.prefix,
            request=build.host(head.shape[0] + bucket),
            outputs=(first, prompt),
            end_outputs=(prompt, last_row(build), head),
        )


def first_token_programs(build: Builder) -> Iterator[Program]:
    if any(name.startswith("prefill/") for name in build.chains):
        function = named("first_token", functions.first_token, build.model, build.ways, build.config)
        outer = dataclasses.replace(build.weights, layers=())
        arguments = (build.prefix.with_pools((), ()), outer, head_of(build), last_row(build))
        yield build.program("first_token", function, arguments, build.host(1, result_width()))


def request(engine: Running, size: str) -> jax.Array:
    return engine.prefill_request(np.zeros(int(size), np.int32), 0, SamplingParams(), last=True)


def touch(engine: Running, size: str, prefix: PrefixBuffer) -> object:
    return engine.prefill(prefix, np.zeros(int(size), np.int32), 0, SamplingParams(), last=True).results


def touch_first_token(engine: Running, size: str, prefix: PrefixBuffer) -> object:
    bucket = engine.config.prefill_bucket(1)
    head = np.asarray(request(engine, "1"))[:-bucket]
    row = np.zeros((1, engine.model.hidden_size), engine.config.dtype)
    return engine.first_token(prefix, engine.put(head), engine.put(row))


PREFILL = Kind("prefill", 20, programs, touch, request, carries_prefix=True)
FIRST_TOKEN = Kind("first_token", 21, first_token_programs, touch_first_token)
