"""Keras's `fit` compares its steps with float32."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gainstage as gs

keras = pytest.importorskip("keras")

import gainstage.interop.keras as ours

RNG = np.random.default_rng(0)
X = RNG.normal(size=(96, 48)).astype(np.float32)
Y = np.sin(X[:, :2])


@jax.custom_vjp
def signed(x):
    """The identity; its backward pass, in float16, returns the sign of the cotangent, as no loss
    scale may."""
    return x


def sign_of(g):
    return jnp.sign(g.astype(jnp.float16)).astype(jnp.float32)


signed.defvjp(lambda x: (x, None), lambda _, g: (sign_of(g) * 1e-3,))


class Signed(keras.layers.Layer):
    """A layer whose gradient does not grow with the loss scale."""

    def call(self, x):
        return signed(x)

    def compute_output_shape(self, shape):
        return shape


def model_of(*more, dtype="float16", **options):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    net = keras.Sequential(
        [
            layers.Dense(16, "tanh", kernel_regularizer=keras.regularizers.L2(1e-3), name="first"),
            layers.BatchNormalization(),
            layers.Dropout(0.2, seed=1),
            *more,
            layers.Dense(2, name="last"),
        ]
    )
    return ours.compile(net, keras.optimizers.SGD(0.05), "mse", dtype=dtype, **options)


def fitted(net, *callbacks, epochs=3, **options):
    """The warnings of audits in a fit of six steps each epoch."""
    given = {"batch_size": 16, "shuffle": False, "verbose": 0, "epochs": epochs} | options
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        net.fit(X, Y, callbacks=list(callbacks), **given)
    return [str(w.message) for w in told if "Audit" in str(w.message)]


@pytest.mark.as_users
def test_a_fit_is_the_same_with_audits():
    """A healthy fit is silent, and its weights, statistics and seeds are the same bits."""
    plain, audited, audit = model_of(), model_of(), ours.Audit(every=5)
    fitted(plain)
    assert fitted(audited, audit) == []
    for a, b in zip(plain.variables, audited.variables, strict=True):
        assert np.asarray(a.value).tobytes() == np.asarray(b.value).tobytes(), a.path
    assert audit.audits.count == 5
    assert audit.audits.last.ok
    assert abs(audit.audits.bias) < 1e-3
    assert int(audit.audits.last.step) == 15
    assert not hasattr(audited.train_function, "plain")


def test_a_fault_is_told_with_its_weight():
    """A wrong gradient is a warning in `fit`, with the path of the weight."""
    told = fitted(model_of(Signed()), ours.Audit(every=1000))
    assert len(told) == 1
    found = re.search(r"Audit of step \d: .* the worst tensor '(\S+)' by", told[0])
    assert re.search(r"first|batch_normalization", found[1])


def test_the_loss_is_that_of_keras():
    """The float32 loss has the regularisation and the weights of samples, as Keras reports it."""
    net, weights = model_of(), RNG.uniform(size=96).astype(np.float32)
    audit = ours.Audit(every=1, batch=(X, Y, weights))
    fitted(net, audit, epochs=1)
    net.optimizer.learning_rate = 0.0
    last = net.evaluate(X[:1], Y[:1], verbose=0)
    assert np.isfinite(last)
    found = audit.audits.last
    np.testing.assert_allclose(found.loss, found.float32_loss, rtol=1e-3)
    rest = sum(float(loss) for loss in net.losses)
    assert found.float32_loss > rest > 0


@pytest.mark.parametrize(
    ("more", "count"), [({"steps_per_execution": 3}, 3), ({"run_eagerly": True}, 4)]
)
def test_other_ways_of_keras_to_step(more, count):
    """Several steps in a call, and uncompiled steps, are audited too."""
    audit = ours.Audit(every=6)
    assert fitted(model_of(**more), audit) == []
    assert audit.audits.count == count


def test_bfloat16_has_no_scale():
    """A model without loss scaling is audited at a scale of 1."""
    audit = ours.Audit(every=6)
    assert fitted(model_of(dtype="bfloat16"), audit) == []
    assert audit.audits.last.measured.scale == 1
    assert 0 < audit.audits.last.gradient_error < 0.1


def test_a_second_fit_goes_on_also_after_an_interrupted_one():
    """Audits count over fits; one that was interrupted leaves nothing that takes steps twice."""

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    net, audit = model_of(), ours.Audit(every=4)
    with pytest.raises(KeyboardInterrupt):
        fitted(net, audit, Stop())
    fitted(net, audit, epochs=2)
    assert not hasattr(net.train_function, "plain")
    assert audit.audits.count == 5  # of 13 steps


def test_other_models_are_refused():
    """A model in one precision, with Keras's policies, or with a step of its own, is refused."""

    class Own(keras.Sequential):
        def train_step(self, state, data):
            return super().train_step(state, data)

    float32 = keras.Sequential([keras.layers.Dense(2)])
    float32.compile("sgd", "mse")
    mixed = keras.Sequential([keras.layers.Dense(2, dtype="mixed_float16")])
    ours.compile(mixed, "sgd", "mse", dtype=None)
    own = ours.compile(Own([keras.layers.Dense(2)]), "sgd", "mse")
    for net, words in (
        (float32, "under autocast"),
        (mixed, "under autocast"),
        (own, "Own has its"),
    ):
        with pytest.raises(ValueError, match=words):
            net.fit(X, Y, verbose=0, callbacks=[ours.Audit()])


@pytest.mark.parametrize(
    ("options", "error"),
    [({"every": 0}, ValueError), ({"every": "5"}, TypeError), ({"bounds": (1, 1)}, TypeError)],
)
def test_bad_arguments_are_refused(options, error):
    """What is no such number is refused when the callback is made."""
    with pytest.raises(error):
        ours.Audit(**options)
    assert gs.audit is not ours.Audit


# ── mending ──────────────────────────────────────────────────────────────────────────────────────

OFFSET = 2.0**11


class Shifted(keras.layers.Layer):
    """A product with an offset, which is subtracted again."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 16), name="kernel")

    def call(self, x):
        h = keras.ops.matmul(x + OFFSET, self.kernel)
        return keras.ops.tanh(h - OFFSET * keras.ops.sum(self.kernel, axis=0))


def shifted(**more):
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.Input(X.shape[1:]), Shifted(), keras.layers.Dense(16)])
    optimizer = ours.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**8)
    return ours.compile(net, optimizer, "mse", **more)


def test_a_fit_mends_itself():
    """One warning names the line of the layer; the loss is that of float32, and the plan is kept
    with the model and for the next one."""
    net, audit = shifted(), ours.Audit(every=6, mend=True)
    y = np.tanh(X)[:, :1].repeat(16, 1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        history = net.fit(X, y, batch_size=16, epochs=3, verbose=0, callbacks=[audit])
    said = [str(w.message) for w in told if "half precision made" in str(w.message)]
    assert len(said) == 1
    assert "test_keras_audit.py:" in said[0]
    assert "h = keras.ops.matmul(x + OFFSET, self.kernel)" in said[0]
    assert audit.plan.entries
    assert audit.audits.last.ok
    exact = shifted(dtype=None)
    wanted = exact.fit(X, y, batch_size=16, epochs=3, verbose=0)
    np.testing.assert_allclose(history.history["loss"], wanted.history["loss"], rtol=0.01)
    again = shifted(dtype=audit.plan)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        again.fit(X, y, batch_size=16, verbose=0, callbacks=[ours.Audit(every=6, mend=True)])
    assert not [w for w in told if "half precision made" in str(w.message)]
    assert not hasattr(net.train_function, "plain")


def overflowing(**more):
    """A model whose hidden layer overflows in float16, and its data."""
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    layers = [keras.Input(X.shape[1:]), dense(64, "relu", name="first"), dense(16)]
    net = ours.compile(keras.Sequential(layers), "adam", "mse", **more)
    return net, 1e5 * X, 1e5 * np.tanh(X)[:, :1].repeat(16, 1)


def told_by_fit(net, x, y, **options):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        history = net.fit(x, y, epochs=3, verbose=0, **options)
    return history.history["loss"], [str(w.message) for w in told]


@pytest.mark.parametrize("callbacks", [None, [], [keras.callbacks.TerminateOnNaN()]])
def test_a_loss_that_is_finite_in_float32_alone_is_said_in_the_first_epoch(callbacks):
    """Both losses are named, with the callback that mends the run and the line by hand."""
    _, told = told_by_fit(*overflowing(), callbacks=callbacks)
    said = [message for message in told if "in half precision and" in message]
    assert len(said) == 1
    assert "Audit(mend=True)" in said[0]
    assert "layer.call = gainstage.keep_float32()(layer.call)" in said[0]


def test_what_that_warning_says_to_write_helps():
    """With either line the loss is finite, and nothing is said of it."""
    net, x, y = overflowing()
    losses, told = told_by_fit(net, x, y, callbacks=[ours.Audit(mend=True)])
    assert np.isfinite(losses).all()
    assert not any("in half precision and" in message for message in told)
    net, x, y = overflowing()
    for layer in net.layers:
        layer.call = gs.keep_float32()(layer.call)
    losses, told = told_by_fit(net, x, y)
    assert np.isfinite(losses).all()
    assert told == []


def test_a_loss_that_is_finite_nowhere_is_no_fault_of_half_precision():
    """A NaN in the data, and a healthy fit, are not accused."""
    net, x, y = overflowing()
    _, told = told_by_fit(net, x * np.nan, y)
    assert not any("in half precision and" in message for message in told)
    _, told = told_by_fit(net, X, y / 1e5)
    assert not any("in half precision and" in message for message in told)
