import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs
from gainstage.diagnostics import telemetry
from gainstage.optimizers import SGD, LossScaleOptimizer, Variable

from peers import fails, live

SIZES = (1, 1024, 4096, 210_000)
DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)
BAD = (np.nan, np.inf, -np.inf)


@functools.cache
def planted(size, dtype):
    """Whether a tensor is finite after one element was replaced: one program for all of them."""
    optimizer = LossScaleOptimizer(SGD())

    def check(position, value):
        tensor = jnp.ones(size, dtype).at[position].set(value.astype(dtype))
        return optimizer.check_finite([jnp.zeros(3), tensor]), optimizer.check_finite({"a": tensor})

    return jax.jit(check)


def tensors(often):
    """Tensors of every size and dtype; those that are not among the first are thorough."""
    for size, dtype in itertools.product(SIZES, DTYPES):
        seldom = (size, dtype) not in often
        yield pytest.param(size, dtype, marks=[pytest.mark.thorough] * seldom)


FOUND = [*itertools.product(SIZES, [jnp.float32]), (1024, jnp.float16), (210_000, jnp.float16),
         (4096, jnp.bfloat16)]  # fmt: skip
SKIPPED = [(1, jnp.float32), (4096, jnp.bfloat16), (210_000, jnp.float16)]


@pytest.mark.as_users
@pytest.mark.parametrize(("size", "dtype"), list(tensors(FOUND)))
def test_one_bad_element_anywhere_is_found(size, dtype, rng):
    """NaN, inf and -inf in any single element of tensors of any size and precision are found."""
    check = planted(size, dtype)
    for position in {0, size // 2, size - 1, *rng.integers(0, size, 20).tolist()}:
        for value in BAD:
            assert not any(check(position, jnp.float32(value))), (position, value)
    assert all(check(0, jnp.float32(1)))


@pytest.mark.as_users
@pytest.mark.parametrize(("size", "dtype"), list(tensors(SKIPPED)))
def test_one_bad_element_skips_the_step(size, dtype, rng):
    """The same elements make a whole step of the optimizer a skipped one."""
    var = Variable(jnp.ones(size, dtype))
    opt = LossScaleOptimizer(SGD(1.0), initial_scale=2.0**20)
    before = var.numpy().tobytes()
    for value in BAD:
        gradient = np.ones(size, np.float32)
        gradient[rng.integers(size)] = value
        opt.apply([jnp.asarray(gradient, dtype)], [var])
    assert var.numpy().tobytes() == before
    assert (int(opt.iterations), float(opt.loss_scale)) == (0, 2.0**17)


@pytest.mark.as_users
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_finite_values_are_finite(dtype):
    """Tensors full of the largest value are finite: their sum and norm are not asked."""
    tensor = jnp.full(5000, jnp.finfo(dtype).max, dtype)
    check = LossScaleOptimizer(SGD()).check_finite
    assert check([tensor, -tensor, None, jnp.zeros((0, 3))])
    assert check([])


def test_a_float64_gradient_beside_float16_ones():
    """Dtypes may be mixed in any order: the sums are those of float64."""
    with jax.enable_x64(True):
        grads = [jnp.ones(1, jnp.float64), jnp.ones(2**15, jnp.float16), jnp.ones(3, jnp.float32)]
        tx = gs.with_loss_scale(optax.sgd(0.1), gs.FixedLossScale(1.0), telemetry=True)
        state = jax.jit(tx.update)(grads, tx.init(grads), grads)[1]
        assert float(telemetry(state).grad_norm) == pytest.approx((2**15 + 4) ** 0.5, rel=1e-6)
        grads += [jnp.array([jnp.inf], jnp.float16)]
        assert not tx.update(grads, tx.init(grads), grads)[1].applied


# Asked for in pytorch#74739 (float16 gradients).
@pytest.mark.as_users
def test_unscaling_is_never_done_in_half():
    """A float16 gradient divided by 2**15 is not flushed; float64 stays float64."""

    def unscaled(gradient, scale):
        tx = gs.with_loss_scale(optax.identity(), gs.FixedLossScale(scale))
        return tx.update(gradient, tx.init(gradient), gradient, loss_scale=scale)[0]

    assert float(unscaled(jnp.float16(2.0**-14), 2.0**15)) == 2.0**-29
    with jax.enable_x64(True):
        wide = unscaled(jnp.float64(1) / 3, 2.0)
        assert (wide.dtype, float(wide)) == (jnp.float64, 1 / 6)
        assert float(unscaled(jnp.float64(1), 3.0)) == 1 / 3


@pytest.mark.parametrize("name", ["clipvalue", "clipnorm", "global_clipnorm"])
@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_clipping_is_that_of_numpy(name, limit, rng):
    """Each clip agrees with float64 numpy, leaves small gradients alone, and keeps zeros."""
    grads = [rng.normal(size=(4, 3)), np.zeros(5), rng.normal(size=7) * 3]
    variables = [Variable(np.zeros(g.shape, np.float32)) for g in (np.ones(2), *grads)]
    with pytest.warns(UserWarning, match="No gradient for"):
        SGD(1.0, **{name: limit}).apply([None, *map(np.float32, grads)], variables)
    assert variables[0].tolist() == [0.0, 0.0]
    norm = np.sqrt(sum((g**2).sum() for g in grads))
    for variable, g in zip(variables[1:], grads, strict=True):
        expected = {
            "clipvalue": np.clip(g, -limit, limit),
            "clipnorm": g * limit / max(np.linalg.norm(g), limit),
            "global_clipnorm": g * limit / max(norm, limit),
        }[name]
        np.testing.assert_allclose(variable.numpy(), -expected, rtol=1e-6)


@pytest.mark.as_users
@pytest.mark.parametrize("name", ["clipnorm", "global_clipnorm"])
def test_an_infinite_norm_is_not_finite(name):
    """Finite gradients with an infinite norm skip a scaled step, and never silently vanish."""
    huge = [np.full(16, 3e38, np.float32)]
    var = Variable(np.ones(16))
    opt = LossScaleOptimizer(SGD(1.0), 2.0, **{name: 1.0})
    opt.apply(huge, [var])
    assert var.numpy().tolist() == [1] * 16
    assert float(opt.loss_scale) == 1.0
    SGD(1.0, **{name: 1.0}).apply(huge, [var])
    assert np.isnan(var.numpy()).all()


@pytest.mark.parametrize(
    ("name", "element", "limit", "size"),
    [
        ("clipnorm", 1e-20, 1e-21, 3),
        ("clipnorm", 1e20, 1.0, 70_000),
        ("global_clipnorm", 1e-33, 1e-34, 70_000),
        ("global_clipnorm", 1e35, 1e-3, 3),
        pytest.param("clipnorm", 1e-33, 1e-34, 70_000, marks=pytest.mark.thorough),
        pytest.param("clipnorm", 1e35, 1e-3, 3, marks=pytest.mark.thorough),
        pytest.param("global_clipnorm", 1e-20, 1e-21, 3, marks=pytest.mark.thorough),
        pytest.param("global_clipnorm", 1e20, 1.0, 70_000, marks=pytest.mark.thorough),
    ],
)
def test_clipping_knows_norms_of_all_sizes(name, element, limit, size):
    """Finite gradients are clipped to the limit, and the step is taken, though the sum of their
    squares is 0 or infinite in float32."""
    gradient = np.float32(element * np.random.default_rng(0).uniform(0.5, 1, size))
    exact = gradient.astype(float)
    expected = -exact * (limit / np.linalg.norm(exact))
    for wrapped in (False, True):
        w, opt = Variable(np.zeros(size, np.float32)), SGD(1.0, **{name: limit})
        opt = LossScaleOptimizer(opt, 2.0, telemetry=True) if wrapped else opt
        opt.apply([gradient * np.float32(2 if wrapped else 1)], [w])
        np.testing.assert_allclose(w.numpy().astype(float), expected, rtol=2e-6)
    assert int(telemetry(opt).applied_steps) == 1
    np.testing.assert_allclose(telemetry(opt).grad_norm, np.linalg.norm(exact), rtol=1e-5)


@pytest.mark.as_users
def test_a_plain_factor_divides_in_float32():
    """Keras divides a float16 gradient by 2**15 in float16 and gets 0; ours keeps it."""
    var = Variable(jnp.zeros((), jnp.float16))
    opt = SGD(2.0**15, loss_scale_factor=2.0**15)
    opt.apply([jnp.float16(2.0**-10)], [var])
    assert float(var) == -(2.0**-10)

    with live("keras") as keras:
        theirs = keras.Variable(np.float16(0), dtype="float16")
        peer = keras.optimizers.SGD(2.0**15, loss_scale_factor=2.0**15)
        peer.apply([jnp.float16(2.0**-10)], [theirs])
        fails(keras, float(theirs.value) == 0)


def test_gradients_are_divided_by_the_scale_they_were_made_with():
    """mpx halves loss and gradient on every growth step; ours unscales with the old scale."""
    rule = gs.DynamicLossScale(8.0, increment_period=1)
    tx = gs.with_loss_scale(optax.sgd(1.0), rule)
    params = jnp.float32(1.0)
    state = tx.init(params)
    for _ in range(3):
        loss, grads = gs.value_and_grad(lambda w: 2 * w, state)(params)
        assert (float(loss), float(grads)) == (2 * float(params), 2.0)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert (float(params), float(state.rule_state.scale)) == (-5.0, 64.0)

    var = Variable(1.0)
    opt = LossScaleOptimizer(SGD(1.0), 8.0, dynamic_growth_steps=1)
    assert [float(opt.minimize(lambda: 2 * var, [var])) for _ in range(3)] == [2.0, -2.0, -6.0]
    assert float(var) == -5.0

    with live("mpx") as mpx:
        scaling = mpx.DynamicLossScaling(jnp.float32(8.0), jnp.float32(1.0), period=1)
        loss, _, _, grads = mpx.filter_value_and_grad(lambda w: 2 * w, scaling)(jnp.float32(1.0))
        fails(mpx, (float(loss), float(grads)) != (2.0, 2.0))


def test_float64_gradients_keep_their_digits():
    """flax hands out float64 gradients cut to float32; ours keep all their digits."""
    with jax.enable_x64(True):
        params = jnp.float64(1 / 3)
        state = gs.with_loss_scale(optax.sgd(0.1)).init(params)
        loss, grads = gs.value_and_grad(lambda w: w * w, state)(params)
        assert (float(loss), float(grads)) == (float(params * params), float(2 * params))

        with live("flax.training.dynamic_scale") as flax:
            scale = flax.DynamicScale(scale=1024.0)
            _, _, _, grads = scale.value_and_grad(lambda w: w * w)(params)
            fails(flax, float(grads) != float(2 * params))


@pytest.mark.as_users
def test_large_gradients_are_not_taken_for_inf():
    """They look at the sum or norm of the gradients, which overflows; ours at the gradients."""
    var = Variable(np.zeros(4, np.float32))
    opt = LossScaleOptimizer(SGD(2.0**-100), initial_scale=1.0)
    opt.apply([jnp.full(4, 2.0**127)], [var])
    assert var.numpy().tolist() == [-(2.0**27)] * 4


@pytest.mark.parametrize(("element", "scale"), [(60, -60), (-54, 60), (100, 126), (-20, -126)])
def test_norms_at_any_scale(element, scale):
    """The norm of true gradients is right if it is a float32 number, at any scale."""
    gradient = np.float32(2.0**element * np.random.default_rng(0).uniform(0.5, 1, 9000))
    rule, w = gs.FixedLossScale(2.0**scale), Variable(np.zeros(9000))
    opt = LossScaleOptimizer(SGD(1.0, clipnorm=2.0**-100), loss_scale=rule, telemetry=True)
    opt.apply([gradient], [w])
    expected = np.linalg.norm(gradient.astype(float)) / 2.0**scale
    assert bool(telemetry(opt).finite)
    np.testing.assert_allclose(np.float64(telemetry(opt).grad_norm), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_changes_no_other_norm(dtype):
    """With `clipnorm` the norm of each gradient is its own, whatever the others hold."""
    variables = [Variable(np.zeros(9000, np.float32)) for _ in range(5)]
    grads = [jnp.full(9000, value, dtype) for value in (2.0, np.nan, 0.5, np.inf, 1.0)]
    SGD(1.0, clipnorm=1.0).apply(grads, variables)
    expected = [-(9000**-0.5), np.nan, -(9000**-0.5), np.nan, -(9000**-0.5)]
    for variable, each in zip(variables, expected, strict=True):
        np.testing.assert_allclose(variable.numpy(), np.full(9000, each), rtol=1e-6)


@pytest.mark.as_users
@pytest.mark.parametrize("options", [{}, {"global_clipnorm": 1.0}, {"clipnorm": 1.0}], ids=str)
def test_only_a_cpu_takes_a_conditional(options):
    """A scaled step has one conditional lowered for a CPU, and none for a GPU or TPU."""
    w = Variable(jnp.ones((100, 100)))
    opt = LossScaleOptimizer(SGD(0.1, **options))
    opt.build([w])
    values = [[w.value()], [variable.value() for variable in opt.variables]]
    step = jax.jit(lambda weights, state, grads: opt.stateless_apply(state, grads, weights))
    traced = step.trace(*values, values[0])
    for platform, count in {"cpu": 1, "cuda": 0, "tpu": 0}.items():
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        main = text[text.index("@main") :].split("func.func")[0]
        # What the choice of the platform depends on is no bool, but a constant.
        operands = re.findall(r"stablehlo.(?:case|if)\"\((%\w+)\)", main)
        bools = [x for x in operands if re.search(rf"\n +{x} = .*tensor<i1>", main)]
        assert len(bools) == count, platform


@pytest.mark.parametrize("scale", [2.0**-10, 1.0, 2.0**15])
@pytest.mark.parametrize("count", [1, 3])
def test_a_gpu_decides_as_a_cpu(monkeypatch, scale, count):
    """What is compiled for a GPU applies the same steps: its code runs here on a CPU. The true
    gradients decide, not the scaled ones."""
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **_: default(*args))
    variables = [Variable(np.zeros((n + 52, 80), np.float32)) for n in range(count)]
    opt = LossScaleOptimizer(SGD(1.0), loss_scale=gs.FixedLossScale(scale))
    for bad in (None, *range(count)):
        for value in (np.nan, -np.inf, 1e36, 3e38):
            for variable in variables:
                variable.assign(np.zeros(variable.shape, np.float32))
            grads = [np.full(v.shape, scale, np.float32) for v in variables]
            if bad is not None:
                grads[bad][-1, -1] = value
            with np.errstate(over="ignore"):
                true = [g / np.float32(scale) for g in grads]
            opt.apply(grads, variables)
            finite = all(np.isfinite(g).all() for g in true)
            moved = [-g if finite else np.zeros_like(g) for g in true]
            for variable, expected in zip(variables, moved, strict=True):
                np.testing.assert_array_equal(variable.numpy(), expected)


def test_a_large_gradient_beside_one_in_half_precision_is_seen():
    """Below a scale of 1 an element may overflow when it is unscaled, in the widest dtype too."""
    weights = [Variable(1.0), Variable(1.0)]
    opt = LossScaleOptimizer(SGD(1e-3), loss_scale=gs.FixedLossScale(2.0**-4))
    opt.apply([np.float16(1), np.float32(1e38)], weights)
    assert [float(w) for w in weights] == [1.0, 1.0]


def test_a_gradient_whose_squares_are_all_flushed_is_clipped():
    """A limit near the smallest numbers holds for many elements that are smaller than it."""
    w = Variable(np.zeros(2**14))
    SGD(1.0, clipnorm=2.0**-59).apply([np.full(2**14, 2.0**-63.5, np.float32)], [w])
    np.testing.assert_allclose(w.numpy(), np.full(2**14, -(2.0**-66)), rtol=1e-5)


def test_a_gpu_leaves_out_a_microbatch_whose_sum_overflows(monkeypatch):
    """Two microbatches of 3e38 are finite, and their sum is not: the second one is not added."""
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **_: default(*args))
    w = Variable(np.zeros((52, 80), np.float32))
    opt = LossScaleOptimizer(
        SGD(1.0, gradient_accumulation_steps=2), loss_scale=gs.FixedLossScale(1.0)
    )
    for value in (3e38, 3e38, -3e38):
        opt.apply([np.full(w.shape, value, np.float32)], [w])
    np.testing.assert_array_equal(w.numpy(), np.zeros(w.shape))
    assert int(opt.iterations) == 1
