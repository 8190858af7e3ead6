"""How much work a step is for JAX: counts, which are the same on every machine, not seconds."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.extend.core import jaxprs_in_params

import gainstage as gs

PARAMS, X = {"w": jnp.ones((16, 16)), "b": jnp.ones(16)}, jnp.ones((16, 16))
FOLDER = str(Path(gs.__file__).parent)


def loss_fn(params, x):
    return jnp.tanh(x @ params["w"] + params["b"]).sum()


def update():
    """`update` of a scaled Adam."""
    tx = gs.with_loss_scale(optax.adam(0.1))
    return tx.update, (PARAMS, tx.init(PARAMS), PARAMS)


def loop():
    """An optax loop: loss, gradients, update and new parameters."""
    tx = gs.with_loss_scale(optax.adam(0.1))

    def step(params, state, x):
        loss, grads = gs.value_and_grad(loss_fn, state)(params, x)
        updates, state = tx.update(grads, state, params)
        return gs.transforms.apply_updates(params, updates, state), state, loss

    return step, (PARAMS, tx.init(PARAMS), X)


def train_step():
    """`gs.train_step` with a scaled Adam."""
    return gs.train_step(loss_fn), (gs.TrainState.create(PARAMS, optax.adam(0.1)), X)


def minimize():
    """`LossScaleOptimizer.minimize` with Adam."""
    variables = {name: gs.optimizers.Variable(value) for name, value in PARAMS.items()}
    opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.Adam(0.1))
    opt.build(weights := list(variables.values()))
    state = [*weights, *opt.variables]

    def step(x):
        return opt.minimize(
            lambda: loss_fn({n: v.value() for n, v in variables.items()}, x), weights
        )

    return gs.optimizers.functionalize(step, state), ([v.value() for v in state], X)


def autocast():
    """The gradient of a function in half precision."""
    return jax.grad(gs.autocast(loss_fn)), (PARAMS, X)


def equations(jaxpr):
    """The equations of a program, with those inside of them."""
    return sum(1 + sum(map(equations, jaxprs_in_params(e.params))) for e in jaxpr.eqns)


def calls(run):
    """How often functions of the package are called, and what comes of it. What the versions of
    Python count differently is left out."""
    found = 0

    def note(frame, event, arg):
        nonlocal found
        code = frame.f_code
        named = not code.co_name.startswith(("<", "__annotate__"))
        found += event == "call" and named and code.co_filename.startswith(FOLDER)

    sys.setprofile(note)
    try:
        result = run()
    finally:
        sys.setprofile(None)
    return found, result


WAYS = {way.__name__: way for way in (update, loop, train_step, minimize, autocast)}


def measured(name):
    """The equations of a step, and the calls to trace it."""
    step, given = WAYS[name]()
    found, program = calls(lambda: jax.make_jaxpr(step)(*given))
    return equations(program.jaxpr), found


@pytest.fixture(scope="module")
def counts():
    """Those of all ways, in a process that has imported no other library: each adds calls that ask
    whether a model is one of it."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# 5 % above the counts of jax 0.10.2 and 0.12.0. The loop without Gainstage has 57 equations.
@pytest.mark.parametrize(
    ("way", "most_equations", "most_calls"),
    [("update", 142, 172), ("loop", 167, 208), ("train_step", 172, 291), ("minimize", 162, 742),
     ("autocast", 38, 352)],
)  # fmt: skip
def test_a_step_is_little_work(way, most_equations, most_calls, counts):
    """A step of a small model has few equations, and to trace it few calls of ours are needed."""
    found_equations, found_calls = counts[way]
    assert 0 < found_equations <= most_equations
    assert 0 < found_calls <= most_calls


if __name__ == "__main__":
    print(json.dumps({name: measured(name) for name in WAYS}))
