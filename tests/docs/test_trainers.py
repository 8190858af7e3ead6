"""The lines of the page on trainers, in the trainers themselves."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"
NUMPYRO = """
import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
import gainstage as gs
from numpyro.infer import SVI, Trace_ELBO, init_to_value
from numpyro.infer.autoguide import AutoDelta
from numpyro.optim import optax_to_numpyro
kx, kw = jax.random.split(jax.random.key(0))
X, w = jax.random.normal(kx, (500, 8)), jax.random.normal(kw, (8,))
def make(dtype):
    def model(y):
        b = numpyro.sample("b", dist.Normal(0, 2.0**13).expand([8]).to_event(1))
        mean = X.astype(dtype) @ b.astype(dtype)
        numpyro.sample("y", dist.Normal(mean.astype("float32"), 2.0**13), obs=y)
    return model
zeros = init_to_value(values={"b": jnp.zeros(8)})
def error(svi):
    found = svi.run(jax.random.key(0), 500, X @ w, progress_bar=False)
    return float(jnp.abs(found.params["b_auto_loc"] - w).mean())
model = make("float16")
guide = AutoDelta(model, init_loc_fn=zeros)
{code}
plain = error(SVI(model, guide, optax.adam(0.05), Trace_ELBO()))
single = make("float32")
exact = error(SVI(single, AutoDelta(single, init_loc_fn=zeros), optax.adam(0.05), Trace_ELBO()))
scaled = error(svi)
print(plain, exact, scaled)
assert scaled < 0.01 + 2 * exact < 0.1 < plain
"""
GPJAX = """
import warnings; warnings.simplefilter("ignore")
import gpjax as gpx, jax, jax.numpy as jnp, optax
import gainstage as gs
x = jnp.linspace(0, 1, 200).reshape(-1, 1)
y = jnp.sin(6 * x) + 0.1 * jax.random.normal(jax.random.key(0), x.shape)
data = gpx.Dataset(X=x, y=y)
prior = gpx.gps.Prior(mean_function=gpx.mean_functions.Constant(), kernel=gpx.kernels.RBF())
posterior = prior * gpx.likelihoods.Gaussian()
def objective(p, d): return -gpx.objectives.conjugate_mll(p, d)
{code}
_, single = gpx.fit(
    model=posterior, objective=objective, train_data=data, optim=optax.adam(0.02), verbose=False
)
print(history[-1], single[-1])
assert abs(history[-1] - single[-1]) < 0.001 * abs(single[-1])
"""


@pytest.mark.parametrize(
    ("title", "package", "script"), [("NumPyro", "numpyro", NUMPYRO), ("GPJax", "gpjax", GPJAX)]
)
def test_the_lines_of_the_page_train(title, package, script):
    """In float16 a trainer reaches what it reaches in float32, with these lines alone."""
    if find_spec(package) is None:
        pytest.skip(f"needs {package}")
    section = PAGE.read_text().split(f"### {title}\n")[1]
    code = re.search(r"```py\n(.*?)```", section, re.DOTALL)[1]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
    done = subprocess.run(
        [sys.executable, "-c", script.replace("{code}", code)],
        env={**environment, "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
