"""The X-ray of a step with a fused kernel, which takes half precision only."""

import functools

import cudnn_on_a_cpu as cudnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gainstage as gs

attention = functools.partial(jax.nn.dot_product_attention, is_causal=True)
fused = functools.partial(attention, implementation="cudnn")


def by_hand(*xs):
    return fused(*(x.astype(jnp.float16) for x in xs)).astype(jnp.float32)


def model(attend, params, x):
    q, k, v = ((x @ params[name]).reshape(*x.shape[:2], 4, 16) for name in "qkv")
    return jnp.mean((attend(q, k, v).reshape(x.shape) @ params["o"] - 1) ** 2)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


PARAMS = {name: normal(i, 64, 64) / 8 for i, name in enumerate("qkvo")}
X = normal(9, 2, 32, 64)
LOSSES = {
    "cast by hand": functools.partial(model, by_hand),
    "half_only": gs.autocast(functools.partial(model, gs.half_only(fused, float32=attention))),
}


@pytest.fixture(autouse=True)
def _has_cudnn(monkeypatch):
    cudnn.use(monkeypatch)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_finite_step(loss):
    """It has the loss of the step; a kernel that refuses float32 is its own reference."""
    seen = gs.xray(loss, PARAMS, X, scale=2.0**10, progress=False)
    assert seen.finite
    assert not seen.causes
    exact = float(model(attention, PARAMS, X))
    assert f"{seen.loss:.3g}" == f"{exact:.3g}"
    assert seen.compiled_finite
    assert max(seen.gradient_errors.values()) < 2e-3


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_an_overflow_before_a_kernel(loss):
    """The cause is the operation in front of the kernel, not the kernel."""
    large = {**PARAMS, "v": 3e5 * PARAMS["v"]}
    seen = gs.xray(loss, large, X, scale=2.0**10, progress=False)
    assert not seen.finite
    assert seen.causes[0].layer == "v"
    assert "dot_product_attention" not in seen.causes[0].operation
