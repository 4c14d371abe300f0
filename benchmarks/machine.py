"""What the machine can do: bytes read per second and floating-point operations per second, all cores or one
accelerator.

A roofline says how fast a step could be if nothing but these counted (Williams et al., CACM 52/4, 2009). Both are
measured, never taken from a data sheet, and measured again and again between the runs they are compared with, for a
shared machine changes.
"""

from __future__ import annotations

import concurrent.futures
import os
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

CPU_BYTES, ACCELERATOR_BYTES = 512 * 2**20, 4 * 2**30  # read at once: far more than any cache holds
CPU_EXTENT, ACCELERATOR_EXTENT = 2048, 8192  # of the square matrices multiplied


class Machine:
    """Arrays to read and to multiply, on the first device of this process, in ``dtype``."""

    def __init__(self, dtype: str = "float32", *, quick: bool = False):
        on_cpu = jax.devices()[0].platform == "cpu"
        size = CPU_BYTES if on_cpu else ACCELERATOR_BYTES
        extent = CPU_EXTENT if on_cpu else ACCELERATOR_EXTENT
        if quick:
            size, extent = 2**20, 128
        columns = 4096 if not quick else 256
        rows = size // columns // jnp.dtype(dtype).itemsize
        self._bytes = rows * columns * jnp.dtype(dtype).itemsize
        self._matrix = jax.block_until_ready(jax.jit(lambda: jnp.ones((rows, columns), dtype))())
        self._vector = jnp.ones((columns,), dtype)
        self._square = jax.block_until_ready(jax.jit(lambda: jnp.ones((extent, extent), dtype))())
        self._operations = 2 * extent**3
        self._product = jax.jit(jnp.dot)
        self._maximum = jax.jit(jnp.max)
        self._threads = concurrent.futures.ThreadPoolExecutor(os.cpu_count()) if on_cpu else None
        self._parts = np.array_split(np.asarray(self._matrix).reshape(-1), os.cpu_count() or 1) if on_cpu else []
        self.read_bandwidth(), self.product_bandwidth(), self.matmul_peak()  # compiles and warms up

    def read_bandwidth(self) -> float:
        """Bytes per second that all cores read: the maximum of a large array."""
        if self._threads is None:
            return self._bytes / _seconds(lambda: self._maximum(self._matrix).block_until_ready())
        threads = self._threads
        return self._bytes / _seconds(lambda: list(threads.map(np.max, self._parts)))

    def product_bandwidth(self) -> float:
        """Bytes of the matrix per second in a matrix-vector product."""
        return self._bytes / _seconds(lambda: self._product(self._matrix, self._vector).block_until_ready())

    def bandwidth(self) -> float:
        """The better of the two."""
        return max(self.read_bandwidth(), self.product_bandwidth())

    def matmul_peak(self) -> float:
        """Operations per second in a product of large square matrices; a multiplication and an addition are two."""
        return self._operations / _seconds(lambda: self._product(self._square, self._square).block_until_ready())


def _seconds(call: Callable[[], object]) -> float:
    """The faster of two."""
    times = []
    for _ in range(2):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)
