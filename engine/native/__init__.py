"""What CPUs do in C++, called from XLA programs (``native.cc``): attention, and linear maps of few rows.

Attention reads pages where they lie; linear maps read a weight once, as it is stored. XLA does neither.

The library is built when the package is installed (``setup.py``). Where there is none (no C++ compiler was there), or where it
does not serve (`obstacle`, `takes`), `engine.attention` and `engine.layers` do the same on XLA.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from engine.attention import Scoring
from engine.quantization import Quantized

Pool = jax.Array | Quantized
Window = jax.Array | int | None

VECTOR = 16  # head_dim, and a linear map's inputs, must be a multiple
FEW_ROWS = {"float32": range(2, 17), "bfloat16": range(1, 33), "int8": range(1, 33)}  # of `linear`, by the weight's type
_UNLIMITED = 2**30  # tokens: a window without an end
_NO_SINK = -1e30


def library() -> ctypes.CDLL | None:
    """The library, or None where it was not built."""
    path = Path(__file__).parent / "_native.abi3.so"
    return ctypes.CDLL(str(path)) if path.exists() else None


@functools.cache
def load() -> str | None:
    """Registers the custom calls, once, for this process. Returns why they are not there, or None.

    Executables that call them can be loaded only after this.
    """
    try:
        found = library()
    except OSError as error:
        return f"the native library does not load: {error}"
    if found is None:
        return "the native library was not built (it takes a C++ compiler when Preheat is installed)"
    for name in ("preheat_decode", "preheat_prefill", "preheat_linear"):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(found, name)), platform="cpu")
    return None


def obstacle(head_dim: int) -> str | None:
    """Why a model of this ``head_dim`` cannot be served, or None."""
    if reason := load():
        return reason
    return f"head_dim = {head_dim} is no multiple of {VECTOR}" if head_dim % VECTOR else None


def decode(
    pools: tuple[Pool, Pool],  # [n, k, pages, page_size, head_dim] each
    layer: jax.Array | int,  # which of the n
    q: jax.Array,  # [b, k, g, head_dim]
    stored: tuple[Pool, Pool],  # [b, k, head_dim]: the key and value of each row's token, as the pools store them
    page_table: jax.Array,  # int32 [b, width]
    pages: jax.Array,  # int32 [b]: where the token is stored
    offsets: jax.Array,  # int32 [b]: within the page
    lengths: jax.Array,  # int32 [b]: live tokens of each row, this one included; 0 for padded rows, which store nothing
    *,
    scoring: Scoring,
    window: Window,
    sinks: jax.Array | None,  # [k, g]
) -> tuple[tuple[Pool, Pool], jax.Array]:
    """Stores each row's token, then attends like `engine.attention.attend_pages`: the new pools, and [b, k, g, head_dim].

    The pools are changed in place: XLA copies them first unless nobody needs the old ones.
    """
    arrays = jax.tree.leaves((stored, pools))
    of_pools = arrays[len(arrays) // 2 :]
    fixed = (
        q.astype(jnp.float32), jnp.asarray(layer, jnp.int32), page_table, lengths, pages, offsets, _window(window),
        _sinks(sinks, q.shape[1:3]),
    )  # fmt: skip
    outputs = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (fixed[0], *of_pools)]
    first = len(fixed) + len(arrays) // 2
    aliases = {first + i: 1 + i for i in range(len(of_pools))}
    run = jax.ffi.ffi_call("preheat_decode", outputs, input_output_aliases=aliases)
    out, *new = run(*fixed, *arrays, **_attributes(scoring, q))
    return jax.tree.unflatten(jax.tree.structure(pools), new), out.astype(q.dtype)


def prefill(
    pools: tuple[Pool, Pool],  # [n, k, capacity, head_dim] each
    layer: jax.Array | int,  # which of the n
    q: jax.Array,  # [t, k, g, head_dim]
    start: jax.Array,  # int32: position of the first query; the others follow
    length: jax.Array,  # int32: live tokens of the prefix, this chunk's included
    *,
    scoring: Scoring,
    window: Window,
    sinks: jax.Array | None,  # [k, g]
) -> jax.Array:  # [t, k, g, head_dim]
    """`engine.attention.attend_prefix`."""
    fixed = (
        q.astype(jnp.float32), jnp.asarray(layer, jnp.int32), start, length, _window(window), _sinks(sinks, q.shape[1:3])
    )  # fmt: skip
    run = jax.ffi.ffi_call("preheat_prefill", jax.ShapeDtypeStruct(q.shape, jnp.float32))
    return run(*fixed, *jax.tree.leaves(pools), **_attributes(scoring, q)).astype(q.dtype)


def takes(weight: Pool, rows: int) -> bool:
    """Whether `linear` is there for ``rows`` rows and this weight, and on CPU faster than XLA."""
    values = weight.values if isinstance(weight, Quantized) else weight
    few = FEW_ROWS.get(values.dtype.name, ())
    return rows in few and weight.shape[1] % VECTOR == 0 and load() is None


def linear(weight: Pool, x: jax.Array) -> jax.Array:
    """x [rows, in] times weight [out, in]: [rows, out], summed up in float32. On CPU only."""
    out = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32)
    return jax.ffi.ffi_call("preheat_linear", out)(x.astype(jnp.float32), *jax.tree.leaves(weight)).astype(x.dtype)


def _attributes(scoring: Scoring, q: jax.Array) -> dict[str, np.float32]:
    scale = q.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    return {"scale": np.float32(scale), "softcap": np.float32(scoring.softcap or 0)}


def _window(window: Window) -> jax.Array:
    return jnp.asarray(_UNLIMITED if window is None else window, jnp.int32)


def _sinks(sinks: jax.Array | None, shape: tuple[int, ...]) -> jax.Array:
    return jnp.full(shape, _NO_SINK, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
