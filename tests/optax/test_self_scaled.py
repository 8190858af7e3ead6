"""A loss that scales its own gradients trains in float16 wherever a loss is differentiated."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from small_floats import SMALL

import gainstage as gs
from gainstage.transforms.self_scaled import self_scaled

P = PartitionSpec
KEYS = jax.random.split(jax.random.key(0), 3)
X = jax.random.normal(KEYS[0], (2**12, 16))
TRUE = jax.random.normal(KEYS[1], (16, 16))
Y = X @ TRUE
W = jnp.zeros((16, 16))


def loss_fn(w, x, y, dtype=jnp.float16, factor=1.0):
    out = (x.astype(dtype) @ w.astype(dtype)).astype(jnp.float32)
    return jnp.mean((out - y) ** 2) * factor


single = functools.partial(loss_fn, dtype=jnp.float32)
EXACT = np.asarray(jax.grad(single)(W, X, Y))


def error(grads, exact=EXACT):
    grads = np.asarray(grads, np.float64)
    return np.linalg.norm(grads - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("power", [15, 40])
def test_gradients_are_true_at_any_scale(power):
    """Small gradients survive; from 2**40, where each step overflows, retries find a scale."""
    small = functools.partial(loss_fn, factor=2.0**-12)
    loss, grads = jax.jit(jax.value_and_grad(self_scaled(small, 2.0**power)))(W, X, Y)
    assert error(jax.grad(small)(W, X, Y) * 2.0**12) > 0.02
    assert error(grads * 2.0**12) < 0.002
    assert loss == pytest.approx(float(small(W, X, Y)), rel=1e-6)


def test_the_number_of_retries_is_bounded():
    """Each retry divides the scale by 16; the last one's gradients are returned."""
    for retries, finite in ((0, False), (3, False), (8, True)):
        wrapped = self_scaled(loss_fn, 2.0**40, retries=retries)
        assert np.isfinite(jax.grad(wrapped)(W, X, Y)).all() == finite
    bad = jax.value_and_grad(self_scaled(loss_fn))(W, X.at[0].set(jnp.nan), Y)
    assert np.isnan(bad[0])
    assert np.isnan(bad[1]).any()


def test_a_trainers_loop_loses_no_batch():
    """`optax.MultiSteps` keeps an overflow for ever; a loss that retries never gives it one."""
    tx = optax.MultiSteps(optax.adam(0.1), 2)
    wrapped = self_scaled(loss_fn, 2.0**40)

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(wrapped)(params, X, Y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params, state = W, tx.init(W)
    for _ in range(300):
        params, state, _ = step(params, state)
    assert np.abs(params - TRUE).mean() < 5e-3


def test_names_aux_and_other_arguments():
    """Arguments by name, (loss, aux), integers and keys pass; any argument has gradients."""

    def with_aux(w, x, *, y, key, count):
        return loss_fn(w, x, y), {"count": count + 1, "key": jax.random.split(key)}

    wrapped = self_scaled(with_aux, 2.0**40)
    by_name = {"y": Y, "key": KEYS[2], "count": jnp.int32(3)}
    for argnums in (0, 1):
        differentiate = jax.value_and_grad(wrapped, argnums, has_aux=True)
        (_, aux), grads = jax.jit(differentiate)(W + 0.1, X, **by_name)
        exact = np.asarray(jax.grad(single, argnums)(W + 0.1, X, Y))
        assert error(grads, exact) < 0.01
        assert aux["count"] == 4
        assert (aux["key"] == jax.random.split(KEYS[2])).all()
    assert wrapped(W, X, **by_name)[0] == loss_fn(W, X, Y)


def test_a_closed_over_parameter_has_its_gradient():
    """So it has when the loss is nested in a function that is differentiated."""
    grads = jax.grad(lambda w: 3.0 * self_scaled(lambda x: loss_fn(w, x, Y))(X))(W)
    assert error(grads / 3) < 0.01


def test_under_transformations():
    """`vmap`, `scan` and `checkpoint` of the gradient are those of the float32 loss."""
    wrapped = self_scaled(loss_fn, 2.0**40)
    both = jax.vmap(jax.grad(wrapped), (0, None, None))(jnp.stack([W, W + 1]), X, Y)
    assert error(both[0]) < 0.01
    assert error(both[1], np.asarray(jax.grad(single)(W + 1, X, Y))) < 0.01
    _, grads = lax.scan(lambda c, xy: (c, jax.grad(wrapped)(W, *xy)), 0, (X[None], Y[None]))
    assert error(grads[0]) < 0.01
    assert error(jax.grad(jax.checkpoint(wrapped))(W, X, Y)) < 0.01
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda w: wrapped(w, X, Y), (W,), (W,))


@pytest.mark.filterwarnings("ignore:The gradient of a float16 parameter")
def test_half_precision_parameters_keep_their_dtype():
    """The gradient of a float16 parameter is float16."""
    grads = jax.grad(self_scaled(loss_fn))(W.astype(jnp.float16), X, Y)
    assert grads.dtype == jnp.float16
    assert error(grads) < 0.01


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh(kind):
    """Eight devices share the batch; the gradient is that of one device."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    x, y = (jax.device_put(v, NamedSharding(mesh, P("data"))) for v in (X, Y))
    w = jax.device_put(W, NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        grads = jax.jit(jax.grad(self_scaled(loss_fn, 2.0**40)))(w, x, y)
    assert error(grads) < 0.01


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("reduces", [True, False])
def test_devices_of_shard_map_retry_together(check_vma, reduces):
    """One device overflows: all retry, also if the loss itself has a collective."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def local(w, x, y):
        loss = loss_fn(w, x, y)
        return lax.pmean(loss, "data") if reduces else loss

    def grads_of(w, x, y, *, fun):
        grads = jax.grad(fun)(w, x, y)
        return grads if check_vma else lax.pmean(grads, "data")

    y = Y.at[:512].multiply(2.0**6)  # on the first device
    of = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P(),
        check_vma=check_vma,
    )  # fmt: skip
    plain = jax.jit(of(functools.partial(grads_of, fun=local)))(W, X, y)
    wrapped = self_scaled(local, 2.0**22)
    grads = jax.jit(of(functools.partial(grads_of, fun=wrapped)))(W, X, y)
    assert error(grads, np.asarray(plain)) < 0.01


def test_devices_of_pmap_retry_together():
    """The mean of the devices' gradients is that of one device, though one overflows."""
    x, y = (v.reshape(8, -1, 16) for v in (X, Y.at[:512].multiply(2.0**6)))

    def grads_of(fun, w, x, y):
        return lax.pmean(jax.grad(fun)(w, x, y), "data")

    plain, own = (
        jax.pmap(functools.partial(grads_of, fun), "data", in_axes=(None, 0, 0))(W, x, y)[0]
        for fun in (loss_fn, self_scaled(loss_fn, 2.0**22))
    )
    assert error(own, np.asarray(plain)) < 0.01


def test_models_change_in_the_try_that_counts():
    """Running means of an NNX model move once, whatever the number of retries."""
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.norm = nnx.BatchNorm(16, rngs=rngs)
            self.out = nnx.Linear(16, 16, dtype=jnp.float16, rngs=rngs)

        def __call__(self, x):
            return self.out(self.norm(x)).astype(jnp.float32)

    def of_model(model, x, y):
        return jnp.mean((model(x) - y) ** 2)

    means = []
    for fun in (of_model, self_scaled(of_model, 2.0**40)):
        model = Net()
        loss, grads = nnx.jit(nnx.value_and_grad(fun))(model, X + 1, Y)
        means.append(np.asarray(model.norm.mean[...]))
        assert np.isfinite(loss)
        assert np.isfinite(grads["out"]["kernel"][...]).all()
    np.testing.assert_allclose(means[0], means[1], rtol=1e-6)
    assert abs(means[0]).max() > 0


def test_an_equinox_model():
    """A model with leaves that are no arrays is differentiated by Equinox."""
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(16, 16, 32, 1, key=KEYS[2])

    def of_model(model, x, y, dtype=jnp.float16):
        halved = jax.tree.map(lambda a: a.astype(dtype) if eqx.is_inexact_array(a) else a, model)
        return jnp.mean((jax.vmap(halved)(x.astype(dtype)).astype(jnp.float32) - y) ** 2)

    grads = eqx.filter_jit(eqx.filter_grad(self_scaled(of_model, 2.0**40)))(model, X, Y)
    exact = eqx.filter_grad(functools.partial(of_model, dtype=jnp.float32))(model, X, Y)
    for own, other in zip(jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True):
        assert error(own, np.asarray(other)) < 0.02


def test_with_autocast_a_float32_loss_trains_in_float16():
    """The two wrappers are all that a trainer's user writes."""
    wrapped = self_scaled(gs.autocast(single), 2.0**40)
    assert error(jax.jit(jax.grad(wrapped))(W, X, Y)) < 0.01


def test_bad_input_is_refused():
    """Functions, scales, retries and losses that are none."""
    with pytest.raises(TypeError, match="loss_fn; got 3"):
        self_scaled(3)
    for scale in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="scale"):
            self_scaled(loss_fn, scale)
    for retries in (-1, 1.5):
        with pytest.raises(ValueError, match=r"integer .* for retries"):
            self_scaled(loss_fn, retries=retries)
    with pytest.raises(TypeError, match="retries; got True"):
        self_scaled(loss_fn, retries=True)
    with pytest.raises(TypeError, match="scalar loss from loss_fn"):
        self_scaled(lambda w: SMALL * w)(W)
