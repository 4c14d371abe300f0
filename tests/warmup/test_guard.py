"""The guard counts what JAX makes. Expected counts follow from what each test asks JAX to do."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from warmup.errors import CompiledWhileServing
from warmup.guard import Guard
from warmup.xla_cache import use_xla_cache

pytestmark = pytest.mark.slow


@pytest.fixture
def guard():
    with Guard() as guard:
        yield guard


def double(x):
    return x * 2


def test_a_jitted_function_is_counted_once_per_shape(guard):
    function = jax.jit(double)
    for shape in ((3,), (3,), (4,), (4,), (3,)):
        function(np.zeros(shape, np.float32))
    counts = guard.counts("startup")
    assert (counts.traces, counts.lowerings, counts.compiles, counts.cache_hits) == (2, 2, 2, 0)
    assert guard.counts("serving").total == 0


def test_ready_switches_the_phase_and_logs_the_program_and_the_caller(guard, caplog):
    function = jax.jit(double)
    function(np.zeros(5, np.float32))
    guard.ready()
    function(np.zeros(5, np.float32))
    assert guard.counts("serving").total == 0 and not caplog.records
    function(np.zeros(6, np.float32))
    counts = guard.counts("serving")
    assert (counts.traces, counts.lowerings, counts.compiles) == (1, 1, 1)
    assert guard.counts("startup").compiles == 1
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("compile of")]
    assert "double" in line and "test_guard.py" in line and "test_ready_switches" in line


def test_small_eager_operations_are_seen(guard):
    guard.ready()
    jnp.full((7, 3), 2.5) + 1
    assert guard.counts("serving").compiles > 0


def test_a_weak_type_misses_the_program(guard):
    function = jax.jit(double)
    function(np.float32(1))
    guard.ready()
    function(1.0)
    assert guard.counts("serving").traces == 1


def test_events_reach_the_hook_with_their_phase():
    seen = []
    with Guard(on_event=lambda kind, phase: seen.append((kind, phase))) as guard:
        jax.jit(double)(np.zeros(8, np.float32))
        guard.ready()
        jax.jit(double)(np.zeros(9, np.float32))
    kinds = ["trace", "lowering", "compile"]
    assert seen == [(kind, "startup") for kind in kinds] + [(kind, "serving") for kind in kinds]


def test_a_closed_guard_counts_no_more():
    guard = Guard()
    guard.close()
    jax.jit(double)(np.zeros(10, np.float32))
    assert guard.counts("startup").total == 0


def test_watch_counts_its_own_thread_only(guard):
    started, go = threading.Event(), threading.Event()

    def other():
        started.set()
        assert go.wait(30)
        jax.jit(double)(np.zeros(11, np.float32))

    thread = threading.Thread(target=other)
    thread.start()
    assert started.wait(30)
    with guard.watch() as outer:
        jax.jit(double)(np.zeros(12, np.float32))
        with guard.watch() as inner:
            go.set()
            thread.join(30)
    assert (outer.compiles, inner.compiles) == (1, 0)
    assert guard.counts("startup").compiles == 2


def test_strict_refuses_in_the_calling_thread_and_before_the_compile(guard):
    with Guard(strict=True) as strict:
        function = jax.jit(double)
        function(np.zeros(13, np.float32))
        strict.ready()
        with pytest.raises(CompiledWhileServing, match=r"double.*test_guard\.py"):
            function(np.zeros(14, np.float32))
        assert strict.counts("serving").compiles == 1
        np.testing.assert_array_equal(function(np.ones(13, np.float32)), np.full(13, 2.0))  # what is warm goes on
        assert strict.counts("serving").compiles == 1
    np.testing.assert_array_equal(function(np.ones(14, np.float32)), np.full(14, 2.0))


def test_a_hit_of_the_persistent_cache_is_no_compile(tmp_path):
    tmp_path.chmod(0o700)
    assert use_xla_cache(tmp_path, "here")
    try:
        with Guard() as guard:
            jax.jit(double)(np.zeros(15, np.float32))
            first = guard.counts("startup")
            assert (first.compiles, first.cache_hits) == (1, 0)
            jax.clear_caches()
            jax.jit(double)(np.zeros(15, np.float32))
            second = guard.counts("startup")
            assert (second.traces, second.compiles, second.cache_hits) == (2, 1, 1)
    finally:
        use_xla_cache(None, "")
        jax.config.update("jax_enable_compilation_cache", True)
