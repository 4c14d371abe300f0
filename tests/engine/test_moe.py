"""The mixture of experts against its definition, token by token; and how much it computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.config import ModelConfig, MoeConfig
from engine.moe import _ragged, mixture
from engine.weights import LayerWeights

EXPERTS, HIDDEN, FFN = 8, 16, 12


def model_of(per_token, normalize=True):
    return ModelConfig(
        "test", 32, HIDDEN, FFN, 1, 2, 1, 8, 64, moe=MoeConfig(EXPERTS, per_token, normalize, bias=True), mlp_bias=True
    )


def weights_of(rng):
    def array(*shape):
        return rng.normal(size=shape).astype(np.float32)

    return LayerWeights(
        qkv=None,
        o=None,
        gate_up=array(EXPERTS, 2, FFN, HIDDEN),
        gate_up_bias=array(EXPERTS, 2, FFN),
        down=array(EXPERTS, HIDDEN, FFN),
        down_bias=array(EXPERTS, HIDDEN),
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
        gate, up = weights.gate_up[expert] @ row + weights.gate_up_bias[expert]
        out += probabilities[expert] / total * (weights.down[expert] @ (gate / (1 + np.exp(-gate)) * up) + weights.down_bias[expert])
    return out


@pytest.mark.parametrize("rows", [1, 2, 5, 64])
@pytest.mark.parametrize(("per_token", "normalize"), [(1, True), (2, True), (3, False), (8, False)])
def test_each_token(rows, per_token, normalize):
    rng = np.random.default_rng(rows)
    model, weights = model_of(per_token, normalize), weights_of(rng)
    x = rng.normal(size=(rows, HIDDEN)).astype(np.float32)
    out = jax.jit(lambda weights, x: mixture(model, weights, x))(weights, x)
    np.testing.assert_allclose(out, [plain(model, weights, row.astype(np.float64)) for row in x], atol=2e-4, rtol=1e-4)


def test_all_tokens_to_one_expert():
    rng = np.random.default_rng(0)
    model, weights = model_of(1), weights_of(rng)
    weights = weights.replace(router_bias=np.eye(EXPERTS, dtype=np.float32)[3] * 1000)
    x = rng.normal(size=(64, HIDDEN)).astype(np.float32)
    out = jax.jit(lambda weights, x: mixture(model, weights, x))(weights, x)
    np.testing.assert_allclose(out, [plain(model, weights, row.astype(np.float64)) for row in x], atol=2e-4, rtol=1e-4)


def test_the_form_for_tpus_says_the_same():
    """It runs on CPU too, only at the cost of all experts."""
    rng = np.random.default_rng(4)
    model, weights = model_of(2), weights_of(rng)
    sizes = np.array([3, 0, 5, 1, 0, 0, 2, 5], np.int32)
    x = rng.normal(size=(16, HIDDEN)).astype(np.float32)
    out = jax.jit(_ragged(model))(x, sizes, weights)
    for row, expert in enumerate(np.repeat(np.arange(EXPERTS), sizes)):
        gate, up = weights.gate_up[expert] @ x[row] + weights.gate_up_bias[expert]
        want = weights.down[expert] @ (gate / (1 + np.exp(-gate)) * up) + weights.down_bias[expert]
        np.testing.assert_allclose(out[row], want, atol=1e-4, rtol=1e-4)


def test_a_program_holds_the_form_of_its_platform_only():
    model, x = model_of(2), jax.ShapeDtypeStruct((16, HIDDEN), jnp.float32)
    lowered = {
        platform: jax.jit(lambda weights, x: mixture(model, weights, x))
        .trace(weights_of(np.random.default_rng(0)), x)
        .lower(lowering_platforms=(platform,))
        .as_text()
        for platform in ("cpu", "tpu")
    }
    assert "ragged_dot" in lowered["tpu"] and "stablehlo.while" not in lowered["tpu"]
    assert "ragged_dot" not in lowered["cpu"] and "stablehlo.while" in lowered["cpu"]
