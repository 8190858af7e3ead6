"""Mistakes with a train state and its step: each is told once, with the words that help."""

import functools
import importlib
import re
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import gainstage as gs

X, Y = jnp.ones((64, 32)), jnp.ones((64, 16))


def loss_fn(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


HALF = gs.autocast(loss_fn)


def made(**options):
    return gs.TrainState.create(jnp.ones((32, 16)), optax.adam(0.1), **options)


def of_equinox():
    """A model with a BatchNorm, its statistics, and a loss that returns them."""
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        last: eqx.nn.Linear
        norm: eqx.nn.BatchNorm

        def __init__(self, key):
            self.last = eqx.nn.Linear(32, 16, key=key)
            self.norm = eqx.nn.BatchNorm(16, "batch", mode="batch")

        def __call__(self, x, state):
            return self.norm(self.last(x), state)

    def loss(model, state, x, y):
        each = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        found, state = each(x, state)
        return jnp.mean((found - y) ** 2), state

    return *eqx.nn.make_with_state(Net)(jax.random.key(0)), loss


def statistics_as_a_loss():
    model, statistics, loss = of_equinox()
    gs.train_step(loss)(gs.TrainState.create(model, optax.adam(0.1)), statistics, X, Y)


def filtered_model():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(32, 16, 8, 1, key=jax.random.key(0))
    state = gs.TrainState.create(eqx.filter(model, eqx.is_array), optax.adam(0.1))
    gs.train_step(lambda model, x: jnp.mean(jax.vmap(model)(x)))(state, X)


def of_keras():
    keras = pytest.importorskip("keras")
    return keras.Sequential([keras.layers.Dense(16)])


def a_loss_as_the_extra():
    state = made()
    loss, _, grads = state.value_and_grad(HALF)(X, Y)
    state.apply_gradients(grads, loss)


def of_keras_compile(*args):
    return importlib.import_module("gainstage.interop.keras").compile(*args)


def on_cudnn(x):
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    return gs.half_only(attend, float32=jax.nn.dot_product_attention)(x, x, x).sum()


def enter(context):
    with context:
        pass


def chosen(w, x, y, flag):
    return loss_fn(w, x, y) if flag else jnp.float32(0)


MISTAKES = {
    "a loss where the extra stands": (a_loss_as_the_extra, "None for a state without one.*loss="),
    "the statistics of Equinox beside the loss": (
        statistics_as_a_loss, r"create\(model, tx, extra=state\)",
    ),
    "the parameters in the batch": (
        lambda: gs.train_step(HALF)(made(), made().params, X, Y), "Leave the parameters out",
    ),
    "the parameters for value_and_grad": (
        lambda: made().value_and_grad(HALF)(made().params, X, Y), "Leave the parameters out",
    ),
    "a dtype before its function": (
        lambda: gs.autocast("bfloat16", loss_fn), r"Write autocast\(loss_fn, 'bfloat16'\)",
    ),
    "an optimizer with variables": (
        lambda: gs.TrainState.create(X, gs.optimizers.Adam()), r"Write optax\.adam\(1e-3\)",
    ),
    "autocast twice": (lambda: gs.autocast(HALF, "bfloat16"), "Pass what it was given"),
    "keep_float32 without its call": (
        lambda: enter(gs.keep_float32), r"with gainstage\.keep_float32\(\):",
    ),
    "a Keras model without its batches": (
        lambda: gs.advise(of_keras(), [(X, Y)]), r"interop\.keras\.advise\(model, batches\)",
    ),
    "a Keras model as a loss": (
        lambda: gs.train_step(of_keras()), r"interop\.keras\.compile\(model, optimizer, loss\)",
    ),
    "a Keras model as parameters": (
        lambda: gs.TrainState.create(of_keras(), optax.adam(0.1)), r"interop\.keras\.compile",
    ),
    "a loss for lint": (lambda: gs.lint(HALF, made(), X, Y), r"lint\(step, state, \*batch\)"),
    "a batch that is a tuple, in an X-ray": (
        lambda: gs.xray(HALF, made(), (X, Y)), r"gainstage\.xray\(loss_fn, state, \*batch\)",
    ),
    "a batch that is a tuple, in an audit": (
        lambda: gs.audit(HALF, made(), (X, Y)), r"gainstage\.audit\(fun, state, \*batch\)",
    ),
    "no scale for a mending": (
        lambda: gs.mend(HALF, made().params, X, Y), r"Write gainstage\.mend\(fun, state, \*batch\)",
    ),
    "a dtype as the scale": (
        lambda: gs.with_loss_scale(optax.adam(0.1), "bfloat16"),
        r"gainstage\.autocast\(loss_fn, dtype\)",
    ),
    "autocast around a step": (
        lambda: gs.autocast(gs.train_step(loss_fn), "bfloat16"),
        r"gainstage\.train_step\(gainstage\.autocast\(loss_fn, 'bfloat16'\)\)",
    ),
    "parameters in the place of a loss": (
        lambda: gs.autocast({"w": X}), r"got \{'w': float32\[64, 32\]\}",
    ),
    "a dtype by position for Keras": (
        lambda: of_keras_compile(of_keras(), "adam", "mse", "bfloat16"), 'dtype="bfloat16"',
    ),
    "a kernel of cuDNN on a CPU": (
        lambda: gs.autocast(on_cudnn)(jnp.ones((1, 8, 1, 64))), "take the kernel only where",
    ),
    "an option that is spelt in another way": (
        lambda: gs.train_step(loss_fn, micro_batches=4), r"Did you mean microbatches=\?",
    ),
    "an Equinox model without its functions": (
        lambda: filtered_model(), r"Pass the model itself to gainstage\.TrainState\.create",
    ),
    "a flag in the batch": (
        lambda: gs.train_step(gs.autocast(chosen))(made(), X, Y, True),
        r"`batch\[2\]` is True.*functools\.partial",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_an_error_that_says_what_to_write(case):
    """The words that help stand in the error, or in a note under that of JAX."""
    run, words = MISTAKES[case]
    with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
        run()
    said = "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])
    assert re.search(words, said, re.S), said


def test_what_the_advice_for_a_flag_says_works():
    """Bound to the loss, the flag chooses a program."""
    step = gs.train_step(functools.partial(gs.autocast(chosen), flag=True))
    assert float(step(made(), X, Y)[1]) == pytest.approx(31.0**2)


def test_bfloat16_needs_no_scale_to_be_looked_at():
    """`audit`, `mend` and `xray` take parameters alone; the scale is 1."""
    half = gs.autocast(loss_fn, "bfloat16")
    w = jnp.ones((32, 16))
    assert gs.audit(half, w, X, Y).ok
    assert gs.mend(half, w, X, Y) is half
    assert gs.xray(half, w, X, Y, progress=False).finite


def test_a_state_prints_in_a_line():
    """Of a large state the sizes, and of one whose arrays were donated that they were."""
    state = made()
    gs.train_step(loss_fn)(state, X, Y)
    assert re.fullmatch(r"TrainState\(params=<1 array, 512 numbers>, .*\)", repr(made()))
    assert "params=donated" in repr(state)


def told(run, times=3):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(times):
            run()
    return [str(warning.message) for warning in found]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_loss_that_uses_other_weights_is_told_once(dtype):
    """All gradients are then 0 for ever: the first step says so, whatever the dtype."""
    weights = jnp.ones((32, 16))
    state, step = made(), gs.train_step(gs.autocast(lambda _, x, y: loss_fn(weights, x, y), dtype))

    def run():
        nonlocal state
        state, _ = step(state, X, Y)

    (said,) = told(run)
    assert "uses none of the parameters" in said


def test_a_loss_that_uses_some_parameters_is_not_told():
    """Frozen parts, and a part whose gradient happens to be 0, are as they should be."""
    params = {"used": jnp.zeros((32, 16)), "frozen": jnp.ones(3)}
    step = gs.train_step(gs.autocast(lambda p, x, y: loss_fn(p["used"], x, y)))
    state = gs.TrainState.create(params, optax.adam(0.1))
    assert told(lambda: step(state, jnp.zeros_like(X), jnp.zeros_like(Y)), 1) == []


def test_statistics_of_equinox_as_aux_are_told():
    """A skipped step does not keep them, so one NaN ruins them: it says how they are kept, and what
    it says keeps them."""
    model, statistics, loss = of_equinox()
    state = gs.TrainState.create(model, optax.adam(0.1))
    step = gs.train_step(loss, has_aux=True, donate=False)
    (said,) = told(lambda: step(state, statistics, X, Y))
    assert "extra=state" in said
    kept = gs.TrainState.create(model, optax.adam(0.1), extra=statistics)
    kept, _ = gs.train_step(loss, donate=False)(kept, X * jnp.nan, Y)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(kept.extra))
