"""The dtype is the only switch: each way to train, in three dtypes, with one word changed."""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs

X = jax.random.normal(jax.random.key(0), (64, 32))
Y = X[:, :16] - X[:, 16:]
BAD = X.at[3, 5].set(jnp.nan)
BATCHES = [X, X, BAD, X]
DTYPES = ["float16", "bfloat16", "float32"]


class Run(NamedTuple):
    """What a way to train has: a step of a batch, and what a skipped step keeps, as numbers."""

    step: Any
    kept: Any
    scale: Any = None  # the loss scale that was used last; None where there is none to read


def squares(w, x):
    return jnp.mean((jnp.tanh(x @ w) - Y) ** 2)


def of_state(state, loss_fn, own=False):
    """Steps of a train state, by `train_step` or by its two halves."""

    @jax.jit
    def halves(state, x):
        loss, extra, grads = state.value_and_grad(loss_fn)(x)
        return state.apply_gradients(grads, extra), loss

    take, now = halves if own else gs.train_step(loss_fn), state

    def step(x):
        nonlocal now
        now, loss = take(now, x)
        return loss

    def kept():
        opt_state = now.opt_state
        return now.params, getattr(opt_state, "inner", opt_state), now.extra, now.step

    return Run(step, kept, lambda: now.loss_scale)


def arrays(dtype, own=False):
    state = gs.TrainState.create(jnp.zeros((32, 16)), optax.adam(0.01))
    return of_state(state, gs.autocast(squares, dtype), own)


def own_step(dtype):
    return arrays(dtype, own=True)


def nnx_model(dtype):
    nnx = pytest.importorskip("flax.nnx")
    rngs = nnx.Rngs(0)
    layers = (
        nnx.Linear(32, 64, rngs=rngs),
        nnx.BatchNorm(64, rngs=rngs),
        nnx.Dropout(0.1, rngs=rngs),
    )
    model = nnx.Sequential(*layers, nnx.Linear(64, 16, rngs=rngs))
    loss_fn = gs.autocast(lambda model, x: jnp.mean((model(x) - Y) ** 2), dtype)
    return of_state(gs.TrainState.create(model, optax.adam(0.01)), loss_fn)


def equinox_model(dtype):
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        first: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        last: eqx.nn.Linear

        def __init__(self, key):
            first, last = jax.random.split(key)
            self.first = eqx.nn.Linear(32, 64, key=first)
            self.norm = eqx.nn.BatchNorm(64, "batch", mode="batch")
            self.last = eqx.nn.Linear(64, 16, key=last)

        def __call__(self, x, state):
            x, state = self.norm(self.first(x), state)
            return self.last(x), state

    model, statistics = eqx.nn.make_with_state(Net)(jax.random.key(0))

    def loss_fn(model, statistics, x):
        each = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        found, statistics = each(x, statistics)
        return jnp.mean((found - Y) ** 2), statistics

    state = gs.TrainState.create(model, optax.adam(0.01), extra=statistics)
    return of_state(state, gs.autocast(loss_fn, dtype))


def of_loop(tx, differentiate):
    """An optax loop, of a function that differentiates by the state of the optimizer."""
    w = jnp.zeros((32, 16))
    now = w, tx.init(w)

    @jax.jit
    def take(w, opt_state, x):
        loss, grads = differentiate(opt_state)(w, x)
        updates, opt_state = tx.update(grads, opt_state, w)
        return (gs.transforms.apply_updates(w, updates, opt_state), opt_state), loss

    def step(x):
        nonlocal now
        now, loss = take(*now, x)
        return loss

    return Run(step, lambda: (now[0], now[1].inner))


def optax_loop(dtype):
    loss_fn = gs.autocast(squares, dtype)
    return of_loop(gs.with_loss_scale(optax.adam(0.01)), lambda s: gs.value_and_grad(loss_fn, s))


def trainer(dtype):
    """A trainer that differentiates by itself, with both lines of the page."""
    loss_fn = gs.autocast(squares, dtype, loss_scale=2.0**15)
    return of_loop(
        gs.with_loss_scale(optax.adam(0.01), None), lambda _: jax.value_and_grad(loss_fn)
    )


def keras_fit(dtype):
    keras = pytest.importorskip("keras")
    from gainstage.interop.keras import LogLossScale, compile

    keras.utils.set_random_seed(0)
    layers = keras.layers
    net = keras.Sequential(
        [layers.Dense(64), layers.BatchNormalization(), layers.Dropout(0.1), layers.Dense(16)]
    )
    net = compile(net, keras.optimizers.Adam(0.01), "mse", dtype=dtype)
    net.build(X.shape)
    net.optimizer.build(net.trainable_variables)

    def step(x):
        history = net.fit(np.asarray(x), np.asarray(Y), 64, verbose=0, callbacks=[LogLossScale()])
        return history.history["loss"][0]

    def kept():
        return [v.value for v in (*net.variables, *net.optimizer.inner_optimizer.variables)]

    return Run(step, kept, lambda: net.optimizer.loss_scale)


def minimize(dtype):
    w, mean = gs.optimizers.Variable(jnp.zeros((32, 16))), gs.optimizers.Variable(0.0)
    opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.Adam(0.01))
    loss_fn = gs.autocast(squares, dtype)

    def loss(x):
        mean.assign(0.9 * mean.value() + 0.1 * x.mean())
        return loss_fn(w.value(), x)

    opt.build([w])
    inner = opt.inner_optimizer.variables
    return Run(lambda x: opt.minimize(lambda: loss(x), [w]), lambda: [
        v.value() for v in (w, mean, *inner)
    ])  # fmt: skip


WAYS = [
    arrays, nnx_model, equinox_model, own_step, optax_loop, trainer, keras_fit, minimize,
]  # fmt: skip


def bits(tree):
    """All numbers of a pytree, bit for bit."""
    leaves = [jax.random.key_data(x) if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
              else x for x in jax.tree.leaves(tree) if hasattr(x, "dtype")]  # fmt: skip
    return [(x.shape, np.asarray(x).tobytes()) for x in leaves]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS, ids=[way.__name__ for way in WAYS])
def test_a_batch_with_a_nan_changes_nothing_in_any_dtype(way, dtype):
    """Weights, state and statistics stay as they were, the other batches train, and nothing is
    said: a warning is an error here. Only float16 lowers a loss scale, others have that of 1."""
    run, losses = way(dtype), []
    for x in BATCHES:
        before = bits(run.kept())
        losses.append(float(run.step(x)))
        assert (bits(run.kept()) == before) == (x is BAD)
    assert np.isfinite(losses).tolist() == [True, True, False, True]
    assert losses[3] < losses[0]
    if run.scale is not None:
        assert float(run.scale()) == (2.0**14 if dtype == "float16" else 1.0)


def test_one_state_goes_through_all_dtypes():
    """After bfloat16 the loss scale of float16 is the first one, and it goes on where it was."""
    state, seen = gs.TrainState.create(jnp.zeros((32, 16)), optax.adam(0.01)), []
    steps = {dtype: gs.train_step(gs.autocast(squares, dtype)) for dtype in DTYPES}
    runs = ["bfloat16", "float16", "float16", "float32", "float16"]
    for dtype, x in zip(runs, [BAD, X, BAD, BAD, X], strict=True):
        state, _ = steps[dtype](state, x)
        seen.append(float(state.loss_scale))
    assert seen == [1.0, 2.0**15, 2.0**14, 1.0, 2.0**14]
    assert int(state.step) == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nothing_is_multiplied_without_float16(dtype):
    """The program of a step in bfloat16 reads the loss scale nowhere: it returns it as it got
    it."""
    state = gs.TrainState.create(jnp.zeros((32, 16)), optax.sgd(0.01))
    step = gs.train_step(gs.autocast(squares, dtype), donate=False)
    huge = state.replace(loss_scale=2.0**126)
    for x in (X, BAD):
        taken, (other, _) = step(state, x)[0], step(huge, x)
        assert bits(taken.params) == bits(other.params)
        assert float(other.opt_state.rule_state.scale) == 2.0**126


def small_in_backward(dtype):
    """A loss in float32 whose own backward pass alone computes in another dtype."""

    @jax.custom_vjp
    def part(x):
        return x

    part.defvjp(lambda x: (x, None), lambda _, g: (g.astype(dtype).astype(jnp.float32),))
    return lambda w, x: squares(part(w), x)


def in_a_loop(dtype):
    """A loss with one operation in a dtype, inside of a scan."""

    def loss_fn(w, x):
        def body(w, _):
            return (w.astype(dtype) * 1).astype(jnp.float32), None

        return squares(jax.lax.scan(body, w, None, 2)[0], x)

    return loss_fn


def small_in_derivative(dtype):
    """A loss in float32 whose own derivative alone computes in another dtype."""

    @jax.custom_jvp
    def part(x):
        return x

    part.defjvp(lambda xs, ts: (xs[0], ts[0].astype(dtype).astype(jnp.float32)))
    return lambda w, x: squares(part(w), x)


def computed_again(dtype):
    """A loss whose own backward pass is inside of a checkpoint that is compiled."""
    return jax.jit(jax.checkpoint(small_in_backward(dtype)))


@pytest.mark.parametrize(
    "make", [small_in_backward, small_in_derivative, computed_again, in_a_loop]
)
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(jnp.float16, 2.0**15), (jnp.float8_e5m2, 2.0**15), (jnp.bfloat16, 1.0), (jnp.float32, 1.0)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_one_operation_in_float16_or_float8_is_enough(make, dtype, scale):
    """Inside of a loop, or in a derivative that is written by hand, it is found too."""
    state = gs.TrainState.create(jnp.full((32, 16), 0.1), optax.sgd(0.01))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, _ = gs.train_step(make(dtype))(state, X)
    assert float(state.loss_scale) == scale


def test_a_part_of_the_batch_in_float16_is_enough():
    """With microbatches too, and an array in float16 that the loss does not use is no reason."""
    state = gs.TrainState.create(jnp.full((32, 16), 0.1), optax.sgd(0.01))
    step = gs.train_step(lambda w, x, y: jnp.mean((x @ w) ** 2), microbatches=2, donate=False)
    assert float(step(state, X, X.astype(jnp.float16))[0].loss_scale) == 1.0
    assert float(step(state, X.astype(jnp.float16), X)[0].loss_scale) == 2.0**15


@pytest.mark.parametrize("inner", ["float16", "bfloat16"])
@pytest.mark.parametrize("compiles", [jax.jit, lambda f: f], ids=["jit inside", "plain"])
def test_autocast_inside_of_a_loss_is_found(inner, compiles):
    """The loss itself is in float32, and what it prints is printed once in a step."""
    printed = []
    model = compiles(gs.autocast(lambda w, x: jnp.tanh(x @ w) @ w.T, inner))

    def loss_fn(w, x):
        loss = jnp.mean((model(w, x) - x) ** 2)
        jax.debug.callback(printed.append, loss)
        return loss

    state = gs.TrainState.create(jnp.full((32, 16), 0.1), optax.sgd(0.01))
    state, _ = gs.train_step(loss_fn)(state, X)
    jax.effects_barrier()
    assert float(state.loss_scale) == (2.0**15 if inner == "float16" else 1.0)
    assert len(printed) == 1


def own_step(state, loss_fn):
    """A step of halves that the user compiles."""

    def step(state, x):
        loss, extra, grads = state.value_and_grad(loss_fn)(x)
        return state.apply_gradients(grads, extra, loss=loss)

    return jax.jit(step)


def optax_loop(state, loss_fn):
    """The gradients of an optax loop."""
    return jax.jit(lambda state, x: gs.value_and_grad(loss_fn, state.opt_state)(state.params, x))


@pytest.mark.parametrize(
    "make", [lambda _, loss_fn: gs.train_step(loss_fn), own_step, optax_loop],
    ids=["train_step", "own step", "optax loop"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_loss_is_traced_once(make, dtype):
    """Whether it needs a scale is read from the trace that its gradient takes anyway."""
    traces = []

    def loss_fn(w, x):
        traces.append(1)
        return squares(w, x)

    cast = loss_fn if dtype == "float32" else gs.autocast(loss_fn, dtype)
    state = gs.TrainState.create(jnp.zeros((32, 16)), optax.sgd(0.01))
    make(state, cast).lower(state, X)
    assert len(traces) == 1


@pytest.mark.parametrize("loss_scale", ["dynamic", 2.0**10, gs.AdaptiveLossScale(2.0**10), None])
def test_each_loss_scale_skips_the_same_steps(loss_scale):
    """The scale is that of the argument in float16, and 1 in bfloat16, where it is not used."""
    first = {"dynamic": 2.0**15, None: 1.0}.get(loss_scale, 2.0**10)
    for dtype in ("float16", "bfloat16"):
        state = gs.TrainState.create(jnp.zeros((32, 16)), optax.sgd(0.01), loss_scale=loss_scale)
        assert float(state.loss_scale) == first
        step = gs.train_step(gs.autocast(squares, dtype))
        for x in BATCHES:
            state, _ = step(state, x)
        assert int(state.step) == 3
        if dtype == "bfloat16":
            assert float(state.loss_scale) == 1.0


@pytest.mark.parametrize("wrong", ["fixed", True, [1.0], gs.DynamicLossScale, jnp.ones(2)])
def test_another_loss_scale_is_refused_with_what_there_is(wrong):
    """The error lists what `loss_scale` may be."""
    with pytest.raises(TypeError, match=r"for loss_scale"):
        gs.TrainState.create(jnp.zeros(2), optax.sgd(0.1), loss_scale=wrong)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("way", ["a state", "a loop"])
def test_a_batch_of_the_shape_of_the_weights_hides_nothing(way, dtype):
    """An array that might be a gradient is in the program; that no scale was used is seen still."""
    w = x = jnp.eye(16) + 0.1
    loss_fn = gs.autocast(lambda w, x: jnp.mean((x @ w) ** 2), dtype)
    tx = gs.with_loss_scale(optax.sgd(0.1))

    @jax.jit
    def loop(opt_state, w, x):
        _, grads = gs.value_and_grad(loss_fn, opt_state)(w, x)
        return tx.update(grads, opt_state, w)[1]

    @jax.jit
    def step(state, x):
        _, extra, grads = state.value_and_grad(loss_fn)(x)
        return state.apply_gradients(grads, extra)

    if way == "a loop":
        after = loop(tx.init(w), w, x * jnp.nan)
        assert not after.is_scaled
        assert float(gs.transforms.current_scale(after)) == 2.0**15
    else:
        state = step(gs.TrainState.create(w, tx), x * jnp.nan)
        assert float(state.loss_scale) == 1.0
        assert float(state.opt_state.rule_state.scale) == 2.0**15


def test_a_loss_for_a_trainer_is_left_alone_in_bfloat16():
    """Its program is that of the loss without a scale: no second try, no reading of gradients."""
    w = jnp.zeros((32, 16))
    programs = [
        jax.jit(jax.grad(gs.autocast(squares, "bfloat16", **how))).lower(w, X).as_text()
        for how in ({}, {"loss_scale": 2.0**15})
    ]
    assert "while" not in programs[1]
    assert "is_finite" not in programs[1]
    assert programs[0].count("dot_general") == programs[1].count("dot_general")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_of_keras_has_the_true_gradient_in_each_dtype(dtype):
    """One step of SGD, whose length is that of the gradient, is that of plain Keras in float32."""
    keras = pytest.importorskip("keras")
    from gainstage.interop.keras import compile

    weights = []
    for wrap in (compile, keras.Model.compile):
        keras.utils.set_random_seed(0)
        net = keras.Sequential([keras.Input((32,)), keras.layers.Dense(16)])
        how = {"dtype": dtype} if wrap is compile else {}
        wrap(net, optimizer=keras.optimizers.SGD(0.5), loss="mse", **how)
        before = np.array(net.layers[0].kernel.value)
        net.fit(np.asarray(X), np.asarray(Y), 64, verbose=0)
        weights.append(np.array(net.layers[0].kernel.value) - before)
    assert np.linalg.norm(weights[0] - weights[1]) < 0.01 * np.linalg.norm(weights[1])
