"""A loss that scales its own gradients trains inside of Tunix's step."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs

nnx = pytest.importorskip("flax.nnx")
EXAMPLES = Path(__file__).parents[2] / "examples"
# The example, and then the trainer of RL with LoRA.
REAL = """
import functools, optax, qwix
import gainstage as gs, tunix_float16 as example
from tunix.rl.trainer import Trainer
from tunix.sft.peft_trainer import TrainingConfig, _default_loss_fn
example.main()
model = example.make_model()
provider = qwix.LoraProvider(module_path=".*q_proj", rank=4, alpha=2.0)
model = qwix.apply_lora_to_model(model, provider, **model.get_model_input())
trainer = Trainer(model, optax.adam(1e-2), TrainingConfig(eval_every_n_steps=9), lambda: {})
trainer.with_gen_model_input_fn(example.model_input)
@functools.wraps(_default_loss_fn)
def loss_fn(*args, **names):
    return _default_loss_fn(*args, **names), {}
trainer.with_loss_fn(gs.autocast(loss_fn, loss_scale=2.0**40), has_aux=True)
trainer.is_managed_externally = True
trainer.train(example.make_batches(20))
losses = trainer.metrics_logger.get_metric_history("", "loss", "train")
assert trainer._lora_enabled and losses[-1] < losses[0], losses
"""


class StandIn:
    """What `PeftTrainer` of google-tunix 0.1.7 does with a loss."""

    def __init__(self, model, optimizer, gradient_accumulation_steps=None):
        self.model = model
        if gradient_accumulation_steps is not None:
            optimizer = optax.MultiSteps(optimizer, gradient_accumulation_steps)
        self.optimizer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
        self.gen_model_input_fn = lambda x: x
        self.loss_fn, self._has_aux, self._step = loss_fn, False, None

    def _train_step(self, model, optimizer, inputs):
        grad_fn = nnx.value_and_grad(self.loss_fn, argnums=0, has_aux=self._has_aux)
        out, grads = grad_fn(model, **self.gen_model_input_fn(inputs))
        optimizer.update(model, grads)
        loss, aux = out if self._has_aux else (out, None)
        return loss, aux, optax.tree.norm(grads)

    def train(self, batches):
        if self._step is None:
            step = nnx.jit(self._train_step, donate_argnames=("optimizer",))
            self._step = nnx.cached_partial(step, self.model, self.optimizer)
        return [self._step(batch) for batch in batches]


def loss_fn(model, x, factor):
    """A loss whose gradient is `x * factor` times the mean of ones, computed in float16."""
    return (model(x).astype(jnp.float32) * factor).mean()


SMALL = {"x": np.full((4, 3), 2.0**-13, np.float32), "factor": np.float32(2.0**-13)}
LARGE = {**SMALL, "factor": np.float32(2.0**10)}  # overflows


def make(wrapped=True, scale=2.0**14, **more):
    """A trainer of a layer without bias, each of whose gradients is `2**-26` for `SMALL`."""
    model = nnx.Linear(3, 1, use_bias=False, dtype=jnp.float16, rngs=nnx.Rngs(0))
    trainer = StandIn(model, optax.sgd(2.0**20), **more)
    if wrapped:
        trainer.loss_fn = gs.autocast(trainer.loss_fn, loss_scale=scale)
    return trainer


def kernel(trainer):
    """A copy of the weights."""
    return np.array(trainer.model.kernel[...])


@pytest.mark.parametrize("wrapped", [False, True])
def test_small_gradients_survive_in_a_tunix_trainer(wrapped):
    """Gradients that vanish in Tunix's own step are exact with a loss that has its own scale."""
    trainer = make(wrapped)
    before = kernel(trainer)
    [(loss, aux, norm)] = trainer.train([SMALL])
    assert float(norm) == pytest.approx(np.sqrt(3) * 2.0**-26 if wrapped else 0.0)
    np.testing.assert_allclose(before - kernel(trainer), 2.0**-6 if wrapped else 0.0, rtol=1e-5)
    assert aux is None
    assert np.isfinite(float(loss))


def test_an_overflow_loses_no_window_of_a_tunix_trainer():
    """With `gradient_accumulation_steps` a window with an overflow is the mean of its gradients."""
    trainer = make(gradient_accumulation_steps=2)
    before = kernel(trainer)
    trainer.train([SMALL, LARGE])
    mean = (2.0**-26 + 2.0**-3) / 2
    np.testing.assert_allclose(before - kernel(trainer), mean * 2.0**20, rtol=1e-3)


def test_a_tunix_trainer_returns_what_its_loss_does():
    """A loss that returns (loss, aux) gives both to the trainer."""
    trainer = make(wrapped=False)
    trainer.loss_fn = gs.autocast(
        lambda model, x, factor: (loss_fn(model, x, factor), {"rows": len(x)}), loss_scale=2.0**15
    )
    trainer._has_aux = True
    [(loss, aux, _)] = trainer.train([SMALL])
    assert aux == {"rows": 4}
    assert float(loss) < 1.0


@pytest.mark.slow
def test_tunix_itself_trains_in_float16():
    """Tunix's Qwen3 learns in float16; so does RL's trainer with LoRA, from a scale that is too
    high."""
    if find_spec("tunix") is None:
        pytest.skip("needs google-tunix, 1.3 GB with what it depends on")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
    done = subprocess.run(
        [sys.executable, "-c", REAL],
        cwd=EXAMPLES, env={**environment, "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, last = map(float, re.search(r"loss ([\d.]+) at first, ([\d.]+)", done.stdout).groups())
    assert last < 1.0 < 3.0 < first
