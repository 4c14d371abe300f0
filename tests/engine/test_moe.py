"""The mixture of experts against its definition, token by token; and how much it computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine import native
from engine.config import ModelConfig, MoeConfig
from engine.moe import mixture
from engine.sharding import Ways
from engine.weights import LayerWeights

pytestmark = pytest.mark.slow

EXPERTS, HIDDEN, FFN = 8, 16, 12


def model_of(per_token, normalize=True):
    return ModelConfig(
        "test", 32, HIDDEN, FFN, 1, 2, 1, 8, 64, moe=MoeConfig(EXPERTS, per_token, normalize, bias=True), mlp_bias=True
    )


def weights_of(rng):
    """The experts of two layers; the second is computed."""

    def array(*shape):
        return rng.normal(size=shape).astype(np.float32)

    return LayerWeights(
        qkv=None,
        o=None,
        gate_up=array(2, EXPERTS, 2, FFN, HIDDEN),
        gate_up_bias=array(2, EXPERTS, 2, FFN),
        down=array(2, EXPERTS, HIDDEN, FFN),
        down_bias=array(2, EXPERTS, HIDDEN),
        router=array(EXPERTS, HIDDEN),
        router_bias=array(EXPERTS),
    )


def plain(model, weights, row):
    """One token."""
    scores = weights.router @ row + weights.router_bias
    probabilities = np.exp(scores - scores.max())
    probabilities /= probabilities.sum()
    chosen = np.argsort(-probabilities)[: model.moe.per_token]
    total = probabilities[chosen].sum() if model.moe.normalize else 1.0
    out = np.zeros(HIDDEN)
    for expert in chosen:
        gate, up = weights.gate_up[1, expert] @ row + weights.gate_up_bias[1, expert]
        down = weights.down[1, expert] @ (gate / (1 + np.exp(-gate)) * up) + weights.down_bias[1, expert]
        out += probabilities[expert] / total * down
    return out


@pytest.mark.parametrize("rows", [1, 2, 5, 64])
@pytest.mark.parametrize(("per_token", "normalize"), [(1, True), (2, True), (3, False), (8, False)])
def test_each_token(rows, per_token, normalize):
    rng = np.random.default_rng(rows)
    model, weights = model_of(per_token, normalize), weights_of(rng)
    x = rng.normal(size=(rows, HIDDEN)).astype(np.float32)
    out = jax.jit(lambda weights, x: mixture(model, Ways(), weights, 1, x))(weights, x)
    np.testing.assert_allclose(out, [plain(model, weights, row.astype(np.float64)) for row in x], atol=2e-4, rtol=1e-4)


def test_all_tokens_to_one_expert():
    rng = np.random.default_rng(0)
    model, weights = model_of(1), weights_of(rng)
    weights = weights.replace(router_bias=np.eye(EXPERTS, dtype=np.float32)[3] * 1000)
    x = rng.normal(size=(64, HIDDEN)).astype(np.float32)
    out = jax.jit(lambda weights, x: mixture(model, Ways(), weights, 1, x))(weights, x)
    np.testing.assert_allclose(out, [plain(model, weights, row.astype(np.float64)) for row in x], atol=2e-4, rtol=1e-4)


def test_experts_that_no_token_chose_are_not_computed(monkeypatch):
    """The largest product in the program has one expert's rows and one block's columns."""
    monkeypatch.setattr(native, "takes", lambda weight, rows: False)  # its calls are no products to read
    model, x = model_of(2), jax.ShapeDtypeStruct((16, HIDDEN), jnp.float32)
    weights = weights_of(np.random.default_rng(0))
    text = jax.jit(lambda weights, x: mixture(model, Ways(), weights, 0, x)).trace(weights, x).lower().as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    shapes = {line.rsplit("-> ", 1)[1].strip() for line in products}
    assert shapes == {f"tensor<{EXPERTS}x16xf32>", f"tensor<{2 * FFN}x4xf32>", f"tensor<{HIDDEN}x4xf32>"}
