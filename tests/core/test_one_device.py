"""A process with one device, as most users have: these tests run in one of eight."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs
from gainstage.diagnostics import telemetry
from gainstage.optimizers import SGD

import quick

RATE = 0.25


def batches():
    """Five batches; the gradient of the fourth overflows."""
    x = np.random.default_rng(0).normal(size=(5, 8, 4)).astype(np.float32)
    x[3, 0] = 2e4
    return list(map(jnp.asarray, x))


def loss_fn(params, x):
    return ((x.astype(jnp.float16) @ params["w"].astype(jnp.float16)) ** 2).mean() + params["b"]


def start():
    return {"w": np.eye(4, dtype=np.float32), "b": np.float32(0.5)}


def told(seen):
    """Scales with decisions, and norms, of the telemetry of each step."""
    decisions = [[float(info.loss_scale), bool(info.applied)] for info in seen]
    return decisions, [float(info.grad_norm) for info in seen]


def values(params):
    return {name: np.asarray(value).tolist() for name, value in params.items()}


def train_step():
    """Decisions, norms and the last parameters of a loop of one call."""
    params = jax.tree.map(jnp.asarray, start())
    state = gs.TrainState.create(params, optax.sgd(RATE, 0.5), telemetry=True)
    step, seen = gs.train_step(loss_fn), []
    for x in batches():
        state, _ = step(state, x)
        seen.append(state.info)
    return [*told(seen), values(state.params)]


def three_calls():
    """The same loop of bricks."""
    tx = gs.with_loss_scale(optax.sgd(RATE, 0.5), telemetry=True)

    @jax.jit
    def step(params, opt_state, x):
        loss, grads = gs.value_and_grad(loss_fn, opt_state)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return gs.transforms.apply_updates(params, updates, opt_state), opt_state, loss

    params = jax.tree.map(jnp.asarray, start())
    opt_state, seen = tx.init(params), []
    for x in batches():
        params, opt_state, _ = step(params, opt_state, x)
        seen.append(telemetry(opt_state))
    return [*told(seen), values(params)]


def variables():
    """The same loop in the way of Keras."""
    params = {name: gs.optimizers.Variable(value, name=name) for name, value in start().items()}
    opt = gs.optimizers.LossScaleOptimizer(SGD(RATE, 0.5), telemetry=True)
    seen = []
    for x in batches():
        now = lambda: {name: v.value() for name, v in params.items()}  # noqa: E731
        opt.minimize(lambda x=x, now=now: loss_fn(now(), x), list(params.values()))
        seen.append(telemetry(opt))
    return [*told(seen), values(params)]


WAYS = {"train_step": train_step, "three calls": three_calls, "minimize": variables}


@pytest.fixture(scope="module")
def alone():
    """What a process of one device computes, in each way."""
    code = (
        "import json, jax; from core import test_one_device as t; assert jax.device_count() == 1; "
        "print(json.dumps({name: way() for name, way in t.WAYS.items()}))"
    )
    environment = quick.environment(PYTHONPATH=":".join(sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("way", WAYS)
def test_one_device_takes_the_steps_of_eight(alone, way):
    """Decisions, scales and weights have the same bits, in each way to take a step. Norms may be
    added up in another order."""
    (decisions, norms, params), (decided, normed, weights) = alone[way], WAYS[way]()
    assert [applied for _, applied in decided] == [True, True, True, False, True]
    assert (decisions, params) == (decided, weights)
    np.testing.assert_allclose(norms, normed, rtol=1e-6)
