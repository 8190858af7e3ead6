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
# Sampler, reference and trainer in one run. The loss is so small that float16 loses all gradients.
GRPO = """
import sys; sys.path.insert(0, "examples")
import jax, jax.numpy as jnp, numpy as np, optax, tunix_float16 as example
import gainstage as gs
from tunix.rl import function_registry, rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig
class Tokenizer:
    def encode(self, text, **names): return [int(word) for word in text.split()]
    def decode(self, ids, **names): return " ".join(map(str, ids))
    def bos_id(self): return 1
    def eos_id(self): return 2
    def pad_id(self): return 0
found = []
def reward(prompts, completions, **names):
    rewards = [np.mean([word == "7" for word in text.split()] or [0.0]) for text in completions]
    found.append(np.mean(rewards))
    return rewards
loss_of = function_registry.get_policy_loss_fn
def small(name):
    def loss_fn(*args, **names):
        loss, aux = loss_of(name)(*args, **names)
        return loss * 2.0**-24, aux
    return loss_fn
function_registry.get_policy_loss_fn = small
def learned(lines):
    actor, tx = example.make_model(), optax.adam(3e-3, eps=1e-30)
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    role = rl_cluster.Role
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys((role.ACTOR, role.REFERENCE, role.ROLLOUT), mesh),
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=tx, eval_every_n_steps=99, max_steps=12
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=8, max_prompt_length=4, kv_cache_size=32, temperature=1.0
        ),
    )
    cluster = rl_cluster.RLCluster(
        actor=actor, reference=example.make_model(), tokenizer=Tokenizer(), cluster_config=config
    )
    names = {"gs": gs, "GRPOLearner": GRPOLearner, "GRPOConfig": GRPOConfig, "cluster": cluster}
    exec(lines, names | {"reward": reward}, names)
    prompts = [{"prompts": np.array(["3 4 5", "9 8", "6", "5 5 5"])} for _ in range(12)]
    found.clear()
    names["learner"].train(prompts)
    return np.mean(found[-3:])
code = '''{code}'''
plain, scaled = learned(code.splitlines()[0]), learned(code)
print(plain, scaled)
assert plain < 0.2 < 0.8 < scaled
"""
BRAX = """
import jax, jax.numpy as jnp
import gainstage as gs
from brax import envs
from brax.training import gradients
from brax.training.agents.ppo import train as ppo
jax.device_put_replicated = lambda tree, devices: jax.tree.map(lambda x: jnp.stack([x]), tree)
{code}
found = []
ppo.train(
    environment=envs.get_environment("inverted_pendulum", backend="generalized"),
    num_timesteps=60_000, episode_length=200, num_envs=64, batch_size=64, num_minibatches=4,
    unroll_length=10, num_updates_per_batch=4, learning_rate=1e-3, entropy_cost=1e-3,
    discounting=0.97, reward_scaling=0.1, normalize_observations=True, num_evals=2,
    num_eval_envs=32, seed=1,
    progress_fn=lambda step, metrics: found.append(float(metrics["eval/episode_reward"])),
)
print(found)
assert found[0] < 20 < 150 < found[-1]
"""


@pytest.mark.parametrize(
    ("title", "package", "script"),
    [
        ("Tunix, GRPO", "tunix", GRPO),
        ("NumPyro", "numpyro", NUMPYRO),
        ("GPJax", "gpjax", GPJAX),
        ("Brax", "brax", BRAX),
    ],
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
