"""Three runs with a planted fault, recorded: `python tests/telemetry/planted_runs.py` writes the
golden files that `test_planted_runs.py` reads."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gainstage as gs
from gainstage.diagnostics import JsonLines

GOLDENS = Path(__file__).parents[1] / "goldens"


@jax.custom_vjp
def amplified(x, gain):
    """`x`, whose cotangent is multiplied by `gain` in its own dtype, and divided again."""
    return x


def _amplified_backward(gain, g):
    gain = gain.astype(g.dtype)
    return g * gain / gain, None


amplified.defvjp(lambda x, gain: (x, gain), _amplified_backward)


def network(params, x, y, gain):
    """The loss of three layers in float16, the second of which amplifies its cotangent."""
    x = x.astype("float16")
    half = jax.tree.map(lambda w: w.astype("float16"), params)
    for name in sorted(half):
        x = jnp.tanh(x @ half[name])
        x = amplified(x, gain) if name == "layer1" else x
    return ((x.astype("float32") - y) ** 2).sum(axis=1).mean()


def parameters():
    """Three square matrices."""
    rng = np.random.default_rng(0)
    return {f"layer{n}": jnp.asarray(rng.normal(size=(16, 16)) / 4, jnp.float32) for n in range(3)}


def batch(n, bad=False):
    """A batch of inputs and of what is to be learned, of which one element may be NaN."""
    rng = np.random.default_rng(n)
    x = rng.normal(size=(32, 16)).astype(np.float32)
    x[3, 2] = np.nan if bad else x[3, 2]
    return x, np.tanh(x[:, ::-1])


def train(path, rule, params, loss_of, steps, telling, **recording):
    """Trains with Adam, as an optax loop does, and records telemetry.

    `loss_of(n)` is the loss function of a step and its arguments; `telling` what is told of the
    loss: "value" to the rule, "loss" to the recording.
    """
    tx = gs.with_loss_scale(optax.adam(1e-3), rule, telemetry=True, underflow_every=10)
    state = tx.init(params)

    @jax.jit
    def step(params, state, *args):
        loss, grads = gs.value_and_grad(loss_of, state)(params, *args)
        extra = {"value": loss} if "value" in telling else {}
        updates, state = tx.update(grads, state, params, **extra)
        return gs.transforms.apply_updates(params, updates, state), state, loss

    path.unlink(missing_ok=True)
    with JsonLines(path, rule=rule, params=params, **recording) as run:
        for n in range(len(steps)):
            params, state, loss = step(params, state, *steps[n])
            extra = {"loss": loss} if "loss" in telling else {}
            run.write(n, gs.diagnostics.telemetry(state), **extra)
        run.write_report(n, gs.diagnostics.report(state, params))
    return gs.diagnostics.report(state, params)


def backward_overflow(path, **recording):
    """From step 50 the second layer's backward pass overflows unless the scale is small."""
    gains = [jnp.float32(2.0**14 if n >= 50 else 1.0) for n in range(120)]
    steps = [(*batch(n), gain) for n, gain in enumerate(gains)]
    return train(path, gs.DynamicLossScale(), parameters(), network, steps, ("loss",), **recording)


def loss_not_passed(path, **recording):
    """Twice 34 batches in a row hold a NaN, and `AdaptiveLossScale` is not given the loss."""
    steps = [(*batch(n, bad=n % 50 >= 16), jnp.float32(1)) for n in range(116)]
    return train(path, gs.AdaptiveLossScale(), parameters(), network, steps, (), **recording)


def overflow_inside(path, **recording):
    """One bare array, whose gradient is small where that of a value inside is not."""

    def loss_of(w, x, gain):
        inside = amplified((w * x).astype("float16"), gain)
        return (inside.astype("float32") ** 2).mean()

    steps = [(jnp.full(16, 2.0**-4, jnp.float32), jnp.float32(2.0**14)) for _ in range(40)]
    rule = gs.DynamicLossScale()
    return train(path, rule, jnp.ones(16), loss_of, steps, ("loss",), **recording)


PLANTED = {
    "backward_overflow": backward_overflow,
    "loss_not_passed": loss_not_passed,
    "overflow_inside": overflow_inside,
}


if __name__ == "__main__":
    for name, planted in PLANTED.items():
        print(planted(GOLDENS / f"run_{name}.jsonl"))
