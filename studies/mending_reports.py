"""What users have reported of mixed precision, as runs that train wrongly under autocast."""

import math
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .autocast_models import year_numbers

Loss = Callable[..., jax.Array]


class Run(NamedTuple):
    """What is trained, and how."""

    loss: Loss  # `(params, *batch)`
    params: Any  # float32
    batch: Callable[[int], tuple[Any, ...]]  # of a seed
    optimizer: optax.GradientTransformation
    steps: int
    dtype: str = "float16"
    count: int = 1  # of different batches


def arrays(seed: int, *shapes: tuple[int, ...]) -> list[jax.Array]:
    """Normal numbers in these shapes."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def prefix_sums() -> Run:
    """Means of windows, as differences of sums that grow to thousands."""
    w, c = arrays(1, (16, 64), (64, 1))

    def found(w: jax.Array, x: jax.Array) -> jax.Array:
        sums = jax.lax.associative_scan(jnp.add, x @ w + 0.5, axis=1)
        means = (sums[:, 16:] - sums[:, :-16]) / 16
        return jnp.tanh(means) @ c / 4

    def batch(seed: int) -> tuple[jax.Array, jax.Array]:
        x, noise = arrays(seed, (4, 8192, 16), (4, 8176, 1))
        return x, found(w / 4, x) + 0.05 * noise

    def loss(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((found(w, x) - y) ** 2)

    return Run(loss, 1.2 * w / 4, batch, optax.adam(1e-3), 200)


def finite_differences() -> Run:
    """Burgers' equation for a network, whose derivatives are differences on a grid."""
    xs, ts = jnp.linspace(0, 1, 64), jnp.linspace(0, 0.5, 32)
    dx, dt = xs[1] - xs[0], ts[1] - ts[0]

    def network(p: Any, x: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ p["w0"] + p["b0"])
        h = jnp.tanh(h @ p["w1"] + p["b1"])
        return (h @ p["w2"] + p["b2"])[..., 0]

    def loss(p: Any, start: jax.Array) -> jax.Array:
        x, t = jnp.meshgrid(xs, ts)
        waves = [wave(n * np.pi * x) for n in (2, 4) for wave in (jnp.sin, jnp.cos)]
        grid = jnp.broadcast_to(jnp.stack([*waves, t, t**2], -1), (len(start), *x.shape, 6))
        starts = jnp.broadcast_to(start[:, None, None], (len(start), *x.shape, 2))
        u = network(p, jnp.concatenate([grid, starts], -1))
        u_t = (u[:, 2:] - u[:, :-2]) / (2 * dt)
        u_x = (u[..., 2:] - u[..., :-2]) / (2 * dx)
        u_xx = (u[..., 2:] - 2 * u[..., 1:-1] + u[..., :-2]) / dx**2
        residual = u_t[..., 1:-1] + u[:, 1:-1, 1:-1] * u_x[:, 1:-1] - 0.05 * u_xx[:, 1:-1]
        first = start @ jnp.stack([jnp.sin(2 * np.pi * xs), jnp.cos(2 * np.pi * xs)])
        edge = u[..., 0] - u[..., -1]
        return jnp.mean(residual**2) + 50 * (jnp.mean((u[:, 0] - first) ** 2) + jnp.mean(edge**2))

    sizes = (8, 64), (64, 64), (64, 1)
    weights = [w / math.sqrt(len(w)) for w in arrays(1, *sizes)]
    params = {f"w{i}": w for i, w in enumerate(weights)}
    params |= {f"b{i}": jnp.zeros(w.shape[1]) for i, w in enumerate(weights)}

    def batch(seed: int) -> tuple[jax.Array]:
        (start,) = arrays(seed, (8, 2))
        return (start / 2,)

    rate = optax.cosine_decay_schedule(5e-3, 700)
    return Run(loss, params, batch, optax.adam(rate), 700)


def quiet_audio() -> Run:
    """The logarithm of the mel spectrum of a recording at -114 decibels, which is corrected."""
    distances = np.abs(np.arange(257)[:, None] - np.arange(8, 250, 8))
    filters = jnp.asarray(np.maximum(0, 1 - distances / 8), jnp.float32)

    def loss(correction: jax.Array, sound: jax.Array) -> jax.Array:
        power = jnp.abs(jnp.fft.rfft(sound + correction)) ** 2
        return jnp.abs(jnp.log(power @ filters + 1e-10) + 15).mean()

    def batch(seed: int) -> tuple[jax.Array]:
        (sound,) = arrays(seed, (64, 512))
        return (2e-6 * sound,)

    return Run(loss, jnp.zeros((64, 512)), batch, optax.adam(1e-7), 200)


def years(seed: int) -> Run:
    """A regression on years as they are, in bfloat16, on the batches of a seed."""
    model = year_numbers()

    def batch(number: int) -> tuple[Any, ...]:
        return (model.batch(10_000 * seed + number),)

    return Run(model.loss, model.params, batch, optax.adam(1e-3), 300, "bfloat16", 30)


def prices_in_keras(seed: int, epochs: int = 20) -> dict[str, Any]:
    """Prices as they are, in `fit` of Keras.

    Args:
        seed: of the data and of the weights.
        epochs: their number.

    Returns:
        What `a_run_mends_itself.compared` returns.
    """
    import keras

    import gainstage.interop.keras as half

    x = np.random.default_rng(seed).standard_normal((2048, 12))
    y = 2e5 + 5e4 * np.tanh(x[:, :1])

    def built() -> Any:
        keras.utils.set_random_seed(seed)
        dense = keras.layers.Dense
        layers = [keras.Input((12,)), dense(128, "relu"), dense(128, "relu"), dense(1)]
        return keras.Sequential(layers)

    def fitted(model: Any, *callbacks: Any) -> dict[str, Any]:
        begin = time.perf_counter()
        fit = model.fit(x, y, epochs=epochs, batch_size=64, verbose=0, callbacks=list(callbacks))
        seconds, exact = round(time.perf_counter() - begin, 1), built()
        exact.compile(loss="mse")
        exact.set_weights(model.get_weights())
        true = exact.evaluate(x, y, batch_size=2048, verbose=0)
        applied = int(model.optimizer.iterations.value)
        reported = fit.history["loss"][-1]
        return {"true": true, "reported": reported, "applied": applied, "seconds": seconds}

    def cast() -> Any:
        return half.compile(built(), keras.optimizers.Adam(1e-2), "mse")

    plain, audit, seen = built(), half.Audit(every=20, mend=True), list[int]()
    plain.compile(keras.optimizers.Adam(1e-2), "mse")
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(len(audit.plan.entries))
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        row = {"float32": fitted(plain), "autocast": fitted(cast())}
        told.clear()
        row["mended"] = fitted(cast(), audit, look)
    plan, last = audit.plan, audit.audits.last
    return row | {
        "dtype": "float16",
        "steps": len(seen),
        "when": [i for i, (a, b) in enumerate(pairwise([0, *seen])) if a != b],
        "rows": [[o.name, o.dtype, o.line or o.layer] for o in plan.entries],
        "left": plan.left if plan.entries else 1.0,
        "told": [str(each.message) for each in told if issubclass(each.category, UserWarning)],
        "errors": [] if last is None else [[len(seen), last.loss_error, last.gradient_error]],
        "plan": plan.to_json() if plan.entries else None,
    }


REPORTS: dict[str, Callable[[], Run]] = {
    "prefix sums": prefix_sums,
    "finite differences": finite_differences,
    "quiet audio": quiet_audio,
    "years, seed 0": lambda: years(0),
    "years, seed 1": lambda: years(1),
    "years, seed 2": lambda: years(2),
}
