"""Writes one file of each kind that Gainstage writes: `python make.py FOLDER`, at a release.

Keras needs KERAS_BACKEND=jax. The folder has the name of the version. What it holds stays as that
version wrote it, and `test_files.py` reads it with every later one.
"""

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax

import gainstage as gs
from gainstage.diagnostics import JsonLines, StepRecorder
from gainstage.optimizers import SGD
from gainstage.precision import find_plan

SLOPE = np.array([1.0, -1.0], np.float32)
TWO_STEPS = [0.375, 2.625]  # of [1, 2] - 0.25 * SLOPE with a momentum of 0.5


def optimizer():
    """A variable and its optimizer, before the first step."""
    w = gs.optimizers.Variable([1.0, 2.0], name="w")
    opt = gs.optimizers.LossScaleOptimizer(SGD(0.25, 0.5), 2.0**10, dynamic_growth_steps=2)
    opt.build([w])
    return w, opt


def step(w, opt):
    """A step whose gradient is `SLOPE`."""
    opt.minimize(lambda: (w.value() * SLOPE).sum(), [w])


def loss_fn(params, x):
    """A loss that overflows in float16 for a large x."""
    return ((x.astype(jnp.float16) @ params["w"].astype(jnp.float16)) ** 2).sum()


def recorded(folder):
    """A run of three steps, the last one skipped: its record and its step file."""
    rule = gs.DynamicLossScale(2.0**4)
    params = {"w": jnp.ones(3)}
    state = gs.TrainState.create(params, optax.sgd(0.01), loss_scale=rule, telemetry=True)
    take, recorder = gs.train_step(loss_fn), StepRecorder(folder / "step.safetensors")
    with JsonLines(folder / "run.jsonl") as record:
        for n, size in enumerate([0.5, 0.25, 40.0]):
            x = jnp.full((2, 3), size)
            state, loss = take(state, x)
            record.write(n, state.info, loss=loss)
            recorder.write(n, state.info, state.params, x)


def model():
    """A Keras model with a scaled optimizer, before the first step."""
    import keras

    from gainstage.interop.keras import LossScaleOptimizer

    keras.utils.set_random_seed(0)
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    made.compile(LossScaleOptimizer(keras.optimizers.SGD(0.25), 2.0**10, 2), "mse")
    return made


def planned(params, x):
    """A loss of one product, for a plan."""
    return ((x @ params) ** 2).mean()


def main(folder):
    """Writes all files."""
    folder.mkdir()
    w, opt = optimizer()
    step(w, opt)
    step(w, opt)
    store = {}
    opt.save_own_variables(store)
    np.savez(folder / "optimizer.npz", w=w.numpy(), **store)
    recorded(folder)
    find_plan(planned, jnp.ones((16, 16)), [(jnp.ones((32, 16)),)], max_error=0.005).save(
        folder / "plan.json"
    )
    fitted = model()
    fitted.fit(np.ones((4, 2), np.float32), np.ones((4, 1), np.float32), 2, 1, verbose=0)
    fitted.save(folder / "model.keras")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
