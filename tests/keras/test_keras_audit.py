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
    assert audit.audits.count == 4
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


@pytest.mark.parametrize("more", [{"steps_per_execution": 3}, {"run_eagerly": True}])
def test_other_ways_of_keras_to_step(more):
    """Several steps in a call, and uncompiled steps, are audited too."""
    audit = ours.Audit(every=6)
    assert fitted(model_of(**more), audit) == []
    assert audit.audits.count == 3


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
    assert audit.audits.count == 4  # of 13 steps


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
