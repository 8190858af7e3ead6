"""A step that overflows under autocast leads to a plan that mends it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs
from gainstage.__main__ import main
from gainstage.diagnostics import StepRecorder, xray

MODULE = """
import jax
import jax.numpy as jnp
import gainstage as gs

def written(params, x):
    with jax.named_scope("trunk"):
        h = jnp.tanh(x @ params["trunk"])
    with jax.named_scope("head"):
        y = h @ params["head"]
    return jnp.mean((y / 1000) ** 2)

loss_fn = gs.autocast(written)
"""
RNG = np.random.default_rng(0)
PARAMS = {
    "trunk": jnp.asarray(RNG.normal(size=(16, 32)) / 4, jnp.float32),
    "head": jnp.asarray(RNG.normal(size=(32, 8)) * 3e4, jnp.float32),  # some exceed float16
}
X = jnp.asarray(RNG.normal(size=(64, 16)), jnp.float32)


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "overflows.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    namespace = {}
    exec(
        compile(MODULE, str(tmp_path / "overflows.py"), "exec"), namespace
    )  # the lines of the file
    return namespace


def of_products(plan):
    return {o.layer: o.dtype for o in plan.operations if o.name == "dot_general"}


def true_gradients(module, plan, scale):
    """The gradients with a plan, and those of the float32 function."""
    cast = gs.autocast(module["written"], plan)
    found = jax.jit(jax.grad(lambda p: cast(p, X) * scale))(PARAMS)
    exact = jax.jit(jax.grad(module["written"]))(PARAMS, X)
    return [np.concatenate([np.asarray(g[n]).ravel() for n in g]) for g in (found, exact)]


def test_the_x_ray_of_a_loss_under_autocast_has_a_plan(module):
    """Only the product that overflows is in float32; with the plan the gradient is right."""
    seen = xray(module["loss_fn"], PARAMS, X, scale=4.0)
    assert not seen.finite
    assert of_products(seen.plan) == {"trunk": "float16", "head": "float32"}
    remedy = seen.remedies[-1]
    assert (remedy.kind, remedy.is_finite) == ("plan", True)
    assert remedy.error < 0.005
    assert "autocast with this X-ray's plan: " in str(seen)
    found, expected = true_gradients(module, seen.plan, remedy.scale)
    off = np.linalg.norm(found / remedy.scale - expected)
    assert off / np.linalg.norm(expected) < 0.005


@pytest.mark.filterwarnings("ignore:autocast has computed no product in float8")
def test_the_x_ray_of_a_loss_in_float8_has_a_plan_in_float16(module):
    """What overflows there is in float16: float8 products have factors of their own."""
    seen = xray(gs.autocast(module["written"], "float8"), PARAMS, X, scale=4.0)
    assert of_products(seen.plan) == {"trunk": "float16", "head": "float32"}
    assert seen.remedies[-1].is_finite


def test_code_without_a_file_has_no_lines_to_name():
    """The remedy of a plan ends with the number of operations, where none has a line."""
    namespace = {}
    exec(MODULE, namespace)
    remedy = xray(namespace["loss_fn"], PARAMS, X, scale=4.0).remedies[-1]
    assert remedy.kind == "plan"
    assert remedy.change.endswith("operations in float32")


def test_a_plan_that_needs_a_lower_scale_says_so(module):
    """The backward pass overflows at the step's scale, whatever the plan: the remedy names one."""
    seen = xray(module["loss_fn"], PARAMS, X, scale=2.0**10)
    remedy = seen.remedies[-1]
    assert (remedy.kind, remedy.is_finite) == ("plan", True)
    assert remedy.scale < 2.0**10
    assert "under a loss scale of 2^" in remedy.change


def test_what_an_earlier_plan_keeps_stays_in_float32(module):
    """The plan of a bad step forgets nothing that the plan before knew."""
    plan = xray(module["loss_fn"], PARAMS, X, scale=4.0).plan
    again = xray(gs.autocast(module["written"], plan), PARAMS, 100 * X, scale=2.0**10).plan
    wide = {o.path for o in plan.operations if o.dtype == "float32"}
    assert wide <= {o.path for o in again.operations if o.dtype == "float32"}


def test_a_loss_without_autocast_has_no_plan(module):
    """A step that the user cast by hand has no plan, and neither has a finite one."""

    def by_hand(params, x):
        return module["written"](jax.tree.map(lambda p: p.astype(jnp.float16), params), x)

    assert xray(by_hand, PARAMS, X, compiled=False).plan is None
    fine = {**PARAMS, "head": PARAMS["head"] / 1e3}
    assert xray(module["loss_fn"], fine, X, scale=2.0**15, compiled=False).plan is None


def test_an_xray_of_a_file_writes_the_plan(module, capsys):
    """From the step file of a skipped step to a file that autocast takes."""
    tx = gs.loss_scaled(optax.sgd(0.1), telemetry=True)
    step, state = gs.train_step(module["loss_fn"], tx, donate=False), tx.init(PARAMS)
    _, state, _ = step(PARAMS, state, X)
    assert StepRecorder("bad.npz").write(0, gs.telemetry(state), PARAMS, X)
    words = ["xray", "bad.npz", "--loss", "overflows:loss_fn", "--plan", "plan.json"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "See plan.json. Write gainstage.autocast(fun, " in said
    assert "where fun is the function without autocast: loss_fn.__wrapped__." in said
    (load,) = re.findall(r"gainstage\.(precision\.Plan\.load\('plan\.json'\))\)", said)
    plan = eval(f"gs.{load}")
    assert of_products(plan) == {"trunk": "float16", "head": "float32"}
    step = gs.train_step(gs.autocast(module["written"], plan), tx, donate=False, retries=16)
    assert gs.telemetry(step(PARAMS, tx.init(PARAMS), X)[1]).applied


def test_an_xray_of_a_file_without_a_plan_says_so(module, capsys, tmp_path):
    """A step file whose loss is not under autocast: one line, and no file."""
    tx = gs.loss_scaled(optax.sgd(0.1), telemetry=True)
    step, state = gs.train_step(module["loss_fn"], tx, donate=False), tx.init(PARAMS)
    _, state, _ = step(PARAMS, state, X)
    assert StepRecorder("bad.npz").write(0, gs.telemetry(state), PARAMS, X)
    assert main(["xray", "bad.npz", "--loss", "overflows:written", "--plan", "plan.json"]) == 0
    assert "There is no plan for plan.json" in capsys.readouterr().out
    assert not (tmp_path / "plan.json").exists()
