"""Keras's attention under autocast takes the kernel that `mixed_float16` takes on a GPU."""

import cudnn_on_a_cpu as cudnn
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import gainstage as gs
from gainstage.interop.keras import advise, autocast, find_plan

X = np.random.default_rng(0).normal(size=(2, 128, 64)).astype("float32")
BATCHES = [(X + i, np.ones((2, 128, 1), "float32")) for i in range(2)]


def attention(dropout=0.0):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((128, 64), batch_size=2)
    layer = keras.layers.MultiHeadAttention(2, 32, dropout=dropout)
    mixed = layer(inputs, inputs, use_causal_mask=True)
    model = keras.Model(inputs, keras.layers.Dense(1)(mixed))
    model.compile("sgd", "mse")
    return model


def gradients(model):
    """A function of the weights, and the weights."""
    weights = [v.value for v in model.trainable_variables]
    others = [v.value for v in model.non_trainable_variables]

    def loss(own):
        return jnp.mean(model.stateless_call(own, others, X)[0] ** 2)

    return jax.grad(loss), weights


def error(found, exact):
    squares = [
        (np.sum((np.float64(a) - np.float64(b)) ** 2), np.sum(np.float64(b) ** 2))
        for a, b in zip(found, exact, strict=True)
    ]
    return float(np.sqrt(sum(s[0] for s in squares) / sum(s[1] for s in squares)))


@pytest.fixture
def gpu(monkeypatch):
    """The checks of a GPU hold, and cuDNN's calls are computed on this CPU."""
    cudnn.use(monkeypatch)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("dtype", "short"), [("float16", "f16"), ("bfloat16", "bf16")])
def test_a_gpu_gets_the_kernel(dtype, short):
    """Forward and backward calls of cuDNN get half precision under autocast, and none is made in
    float32, nor after `disable_flash_attention`."""
    assert cudnn.dtypes_of_calls(*gradients(attention())) == []
    model = autocast(attention(), dtype)
    assert cudnn.dtypes_of_calls(*gradients(model)) == [[short] * 3] * 2
    keras.config.disable_flash_attention()
    try:
        assert cudnn.dtypes_of_calls(*gradients(autocast(attention(), dtype))) == []
    finally:
        keras.config.enable_flash_attention()


@pytest.mark.usefixtures("gpu")
def test_gradients_are_those_of_float32():
    """Within 0.2 %, with the kernel."""
    (plain, weights), (half, _) = gradients(attention()), gradients(autocast(attention()))
    assert error(half(weights), plain(weights)) < 2e-3


@pytest.mark.usefixtures("gpu")
def test_the_calls_are_those_of_the_policy():
    """A float32 model under autocast calls cuDNN as often as one under `mixed_float16`."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        by_policy = cudnn.dtypes_of_calls(*gradients(attention()))
    finally:
        keras.config.set_dtype_policy("float32")
    assert cudnn.dtypes_of_calls(*gradients(autocast(attention()))) == by_policy != []


@pytest.mark.usefixtures("gpu")
def test_a_plan_and_advice_know_the_kernel(monkeypatch):
    """`find_plan` before `autocast` has a line for it, `fit` uses that plan, and `advise` counts
    less memory for float16 than for attention that is written out, as on a CPU."""
    model = attention()
    plan = find_plan(model, BATCHES, progress=False)
    assert [o.dtype for o in plan.entries if o.name == "half_only"] == ["float16"]
    model = autocast(model, plan)
    model.compile("sgd", "mse")
    assert cudnn.dtypes_of_calls(*gradients(model)) == [["f16"] * 3] * 2
    losses = model.fit(*BATCHES[0], verbose=0, epochs=3).history["loss"]
    assert losses[-1] < losses[0]

    def kept(model):
        costs = advise(model, BATCHES, progress=False).candidates
        return next(cost.kept for cost in costs if cost.name == "float16")

    with_kernel = kept(attention())
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert with_kernel < kept(attention())


@pytest.mark.usefixtures("gpu")
def test_fit_learns():
    """With the kernel in forward and backward pass, and a scaled loss."""
    model = autocast(attention())
    model.compile("adam", "mse")
    losses = model.fit(*BATCHES[0], verbose=0, epochs=20).history["loss"]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.usefixtures("gpu")
def test_dropout_has_no_kernel():
    """Keras writes attention with dropout out, under autocast as without."""
    assert cudnn.dtypes_of_calls(*gradients(autocast(attention(dropout=0.1)))) == []


def test_a_cpu_computes_as_before():
    """There is no kernel, and float16 is near float32."""
    (plain, weights), (half, _) = gradients(attention()), gradients(autocast(attention()))
    assert "cond" not in str(jax.make_jaxpr(half)(weights))
    assert error(half(weights), plain(weights)) < 2e-3


def test_a_layer_with_a_kernel_of_its_own(monkeypatch):
    """A layer that calls an `half_only` function trains in `fit`, with a plan."""
    cudnn.use(monkeypatch)

    def plain(q, k, v):
        return jax.nn.dot_product_attention(q, k, v)

    def fused(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")

    attend = gs.half_only(fused, float32=plain)

    class Attention(keras.layers.Layer):
        def build(self, shape):
            self.up = keras.layers.Dense(3 * shape[-1])
            self.up.build(shape)

        def call(self, x):
            parts = jnp.split(self.up(x).reshape(*x.shape[:2], 2, -1), 3, axis=-1)
            return attend(*parts).reshape(x.shape)

    keras.utils.set_random_seed(0)
    inputs = keras.Input((128, 64), batch_size=2)
    model = keras.Model(inputs, keras.layers.Dense(1)(Attention()(inputs)))
    model.compile("sgd", "mse")
    exact, weights = gradients(model)
    expected = exact(weights)
    plan = find_plan(model, BATCHES, progress=False)
    assert [o.dtype for o in plan.entries if o.name == "half_only"] == ["float16"]
    half, _ = gradients(autocast(model, "float16"))
    assert cudnn.dtypes_of_calls(half, weights) == [["f16"] * 3] * 2
    assert error(half(weights), expected) < 2e-3
    model = autocast(model, plan)
    model.compile("sgd", "mse")
    losses = model.fit(*BATCHES[0], verbose=0, epochs=3).history["loss"]
    assert losses[-1] < losses[0]
