"""What half precision is compared with is float32 indeed, on a device that rounds its products."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import gainstage as gs

HERE = Path(__file__).parent
SCRIPT = """
import json
import tf32_on_a_cpu
tf32_on_a_cpu.use()
import test_exact_references as own
print(json.dumps(own.measured()))
"""


def loss_fn(params, x, y):
    """A small network, which ends in a logarithm of a product of angles."""
    h = jnp.tanh(x @ params["in"])
    h = h + jnp.tanh(h @ params["up"]) @ params["down"]
    return jnp.mean((h @ params["out"] - y) ** 2)


def angles(params, x):
    """Coordinates times frequencies, as in a neural field."""
    return jnp.mean(jnp.sin(x @ params["frequencies"]) @ params["out"])


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def measured():
    """Prices of precisions, shares of a plan, and the error of angles on this device."""
    names = ("in", "up", "down", "out")
    shapes = ((16, 64), (64, 256), (256, 64), (64, 4))
    params = {
        n: normal(i, *s) / s[0] ** 0.5 for i, (n, s) in enumerate(zip(names, shapes, strict=True))
    }
    batches = [(normal(10 + i, 64, 16), normal(20 + i, 64, 4)) for i in range(4)]
    advice = gs.advise(loss_fn, params, batches, progress=False)
    plan = gs.precision.find_plan(loss_fn, params, batches, progress=False)
    field = {"frequencies": 30 * normal(0, 3, 64), "out": normal(1, 64) / 8}
    x = normal(2, 256, 3)
    with jax.default_matmul_precision("highest"):
        exact = jax.grad(angles)(field, x)["out"]
    found = {
        name: float(jnp.linalg.norm(jax.grad(fun)(field, x)["out"] - exact))
        for name, fun in (("float32", angles), ("autocast", gs.autocast(angles)))
    }
    size = float(jnp.linalg.norm(exact))
    seen = gs.xray(gs.autocast(loss_fn), params, *batches[0], scale=1.0)
    return {
        "costs": {cost.name: cost.accuracy for cost in advice.candidates},
        "table": str(advice),
        "shares": [operation.error for operation in plan.entries if "dot" in operation.name],
        "angles": {name: value / size for name, value in found.items()},
        "recommended": advice.recommended.name,
        "xray": max(seen.gradient_errors.values()),
    }


@pytest.fixture(scope="module")
def both():
    folders = [HERE, HERE.parent, *filter(None, [os.environ.get("PYTHONPATH")])]
    path = os.pathsep.join(map(str, folders))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rounded = json.loads(done.stdout.splitlines()[-1])
    return json.loads(json.dumps(measured())), rounded


def test_advise_says_what_a_cpu_says(both):
    """The bias of half precision is not hidden by a reference that is rounded alike."""
    cpu, rounded = both
    for name in ("float16", "bfloat16"):
        bias, other = cpu["costs"][name][1], rounded["costs"][name][1]
        assert abs(other - bias) <= 0.25 * bias


def test_float32_as_the_device_computes_it_is_a_row(both):
    """Its error is measured as that of the others; a CPU, which rounds nothing, has one row."""
    cpu, rounded = both
    assert "float32, highest" not in cpu["costs"]
    assert cpu["costs"]["float32"][:2] == rounded["costs"]["float32, highest"][:2] == [0.0, 0.0]
    noise, bias = rounded["costs"]["float32"][:2]
    assert noise > 0
    assert 1e-5 < bias < 1e-2
    assert "at the highest precision" in rounded["table"]
    assert "at the highest precision" not in cpu["table"]


def test_shares_of_a_plan_are_those_of_a_cpu(both):
    """What each product costs is measured beside exact products."""
    cpu, rounded = both
    assert len(cpu["shares"]) == len(rounded["shares"]) > 0
    for share, other in zip(cpu["shares"], rounded["shares"], strict=True):
        assert abs(other - share) <= 0.25 * share


def test_what_must_be_exact_is_exact(both):
    """Angles under autocast have all digits of float32, also where float32 code has not."""
    cpu, rounded = both
    assert rounded["angles"]["float32"] > 1e-3
    assert rounded["angles"]["autocast"] == pytest.approx(cpu["angles"]["autocast"], rel=0.25)


def test_the_xray_compares_with_exact_products(both):
    """The error of the gradients is the one that a CPU sees."""
    cpu, rounded = both
    assert abs(rounded["xray"] - cpu["xray"]) <= 0.25 * cpu["xray"]
