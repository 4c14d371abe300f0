"""Weights over several devices: each reads its part, and the host holds no more than it must. Nothing here compiles."""

import concurrent.futures
import dataclasses
import pathlib
import time
import tracemalloc

import jax
import numpy as np
import pytest
from random_llama import random_llama

from engine import loader
from engine import weights as weights_module
from engine.agreement import read_model
from engine.checkpoints import open_checkpoint
from engine.config import EngineConfig, ModelConfig
from engine.families import get_family
from engine.fills import Reader, weight_fills
from engine.loader import load_weights
from engine.sharding import make_mesh
from engine.weights import Weights, abstract_weights, one_layer, stacked_fields

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
TINY, MOE = GOLDEN / "tiny_llama", GOLDEN / "families" / "qwen3_moe"


def describe(path: pathlib.Path, **layout) -> tuple[ModelConfig, Weights]:
    """A model, and its abstract weights on as many devices as the layout has."""
    model = read_model(open_checkpoint(path))
    config = EngineConfig(slots=4, max_len=64, kv_pages=3, prefill_buckets=(16,), batch_sizes=(4,), **layout)
    mesh = make_mesh(jax.devices()[: config.devices], dp=config.dp, ep=config.ep)
    return model, abstract_weights(model, config, mesh)


EXPERT = "model.layers.1.mlp.experts.{}.gate_proj.weight".format
SPLIT = {  # model, layout, and how often what the first device reads of a tensor would go into it; none: it reads nothing
    "tp": (TINY, {"tp": 2}, {"model.embed_tokens.weight": 2, "model.layers.1.self_attn.k_proj.weight": 2, "model.norm.weight": 1}),
    "copies of KV heads": (TINY, {"tp": 4}, {"model.layers.1.self_attn.q_proj.weight": 4, "model.layers.1.self_attn.k_proj.weight": 2}),
    "experts": (MOE, {"ep": 2, "tp": 2}, {EXPERT(2): 2, EXPERT(3): None}),
}  # fmt: skip


@pytest.mark.parametrize("case", SPLIT)
@pytest.mark.parametrize("layers", ["unrolled", "scanned"])
def test_a_device_reads_only_its_part(case, layers):
    """As a host would that has the first device alone; bytes counted by tensor."""
    path, layout, expected = SPLIT[case]
    model, abstract = describe(path, layers=layers, **layout)
    checkpoint, read = open_checkpoint(path), {}

    class Counting(Reader):
        def tensor(self, name, *shape):
            count = lambda size: read.__setitem__(name, read.get(name, 0) + size)
            return dataclasses.replace(super().tensor(name, *shape), count=count)

    fills = weight_fills(Counting(checkpoint), get_family(model.family), model, abstract, ())
    for leaf, fill in zip(jax.tree.leaves(abstract), jax.tree.leaves(fills), strict=True):
        where = leaf.sharding.devices_indices_map(leaf.shape)[jax.devices()[0]]
        bounds = [part.indices(extent)[:2] for part, extent in zip(where, leaf.shape, strict=True)]
        fill([(tuple(slice(*bound) for bound in bounds), np.empty([end - begin for begin, end in bounds], leaf.dtype))])
    for name, parts in expected.items():
        assert read.get(name, 0) == (0 if parts is None else checkpoint.read(name).nbytes // parts), name


@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize(
    ("name", "layout"),
    [("olmo2", {"tp": 2}), ("qwen2", {"tp": 2}), ("gpt_oss", {"ep": 2, "tp": 2}), ("mixtral", {"ep": 3, "dp": 2})],
    ids=str,
)
def test_the_parts_are_those_of_the_whole(name, layout, quantize):
    """Whatever way a family's tensors have to be put together: norms over all heads, biases, experts apart and in one tensor."""
    path = GOLDEN / "families" / name
    parts, whole = (
        load_weights(open_checkpoint(path), *describe(path, quantize=quantize, **split)) for split in (layout, {})
    )
    jax.tree.map(np.testing.assert_array_equal, parts, whole)


def test_one_tensor_for_all_of_qkv_and_copies_of_its_only_kv_head():
    """Phi-3: two query heads, one KV head, on two devices."""
    path = GOLDEN / "families" / "phi3"
    weights = load_weights(open_checkpoint(path), *describe(path, tp=2))
    stored = open_checkpoint(path).read("model.layers.1.self_attn.qkv_proj.weight").astype(np.float32).reshape(4, 16, 32)
    np.testing.assert_array_equal(np.asarray(weights.layers[1].qkv)[0], [stored[[0, 2, 3]], stored[[1, 2, 3]]])


class HostStacker:
    """What the engine's programs do, by numpy."""

    def __init__(self, abstract: Weights):
        self.fields, self.placed = stacked_fields(abstract), []

    def empty_stacks(self):
        return jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), self.fields)

    def place_layer(self, field, stack, part, layer):
        def place(stack, part, described):
            assert part.sharding == described.sharding
            whole = np.array(stack)
            whole[layer] = part
            return jax.device_put(whole, stack.sharding)

        self.placed.append((field, layer))
        return jax.tree.map(place, stack, part, one_layer(self.fields[field]))


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_large_arrays_of_scanned_layers_are_put_together_on_the_devices(monkeypatch, quantize):
    layout = {"layers": "scanned", "tp": 2, "quantize": quantize}
    model, abstract = describe(TINY, **layout)
    # On each of two devices, in three layers: qkv has 3 x 4 x 32 x 64 numbers, gate and up 3 x 2 x 48 x 64, o 3 x 64 x 64.
    monkeypatch.setattr(weights_module, "STACKED_BYTES", 3 * 64 * 70 * (4 if quantize == "none" else 1))
    stacker = HostStacker(abstract)
    weights = load_weights(open_checkpoint(TINY), model, abstract, stacker=lambda: stacker)
    assert sorted(stacker.placed) == [(field, layer) for field in ("gate_up", "qkv") for layer in range(3)]
    jax.tree.map(np.testing.assert_array_equal, weights, load_weights(open_checkpoint(TINY), model, abstract))


def test_what_is_in_flight_is_bounded(monkeypatch):
    """Up to the limit together; what is larger than the limit waits until it is alone."""
    monkeypatch.setattr(loader, "IN_FLIGHT", 100)
    flight, order = loader._Flight(), []

    def large():
        with flight.of(1000):
            order.append("large")

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        with flight.of(60):
            with flight.of(40):
                waiting = thread.submit(large)
            order.append("small")
            time.sleep(0.05)  # room for 60, which is not enough
            order.append("small")
        waiting.result(10)
    assert order == ["small", "small", "large"] and flight.most == 1000


@pytest.mark.parametrize("layers", ["unrolled", "scanned"])
def test_the_host_holds_nothing_twice(tmp_path, layers):
    """16 MiB of weights, whose largest tensor has 1 MiB: on CPU the devices keep what the host has made."""
    path = random_llama(tmp_path / "model", 8, 8, hidden=512, ffn=512, vocab=512, layers=4, head_dim=64)
    model, abstract = describe(path, layers=layers, tp=2)
    checkpoint = open_checkpoint(path)
    tracemalloc.start()
    try:
        weights = load_weights(checkpoint, model, abstract)
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    assert size > 15 * 2**20 and kept > size  # so numpy's buffers are the devices'
    assert most - kept < 2**20
