"""`minimize` takes a step with an overflow again, so that it costs no batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gainstage as gs
from gainstage.diagnostics import telemetry
from gainstage.optimizers import SGD, Adam, LossScaleOptimizer, Variable, from_optax
from gainstage.transforms import step_was_applied

KEYS = jax.random.split(jax.random.key(0), 2)
X = jax.random.normal(KEYS[0], (256, 16))
Y = X @ jax.random.normal(KEYS[1], (16, 16))


class Run:
    """A model with a running mean, its optimizer, and its step: eager or compiled."""

    def __init__(self, retries, start=2.0**40, compiled=True, inner=None, **options):
        self.w = Variable(jnp.zeros((16, 16)), name="w")
        self.mean = Variable(0.0, trainable=False, name="mean")
        inner = Adam(0.1, **options) if inner is None else inner
        self.opt = LossScaleOptimizer(inner, start, telemetry=True)
        self.opt.build([self.w])

        def step(x, y):
            def loss():
                self.mean.assign(self.mean + x.mean())
                out = (x.astype(jnp.float16) @ self.w.value().astype(jnp.float16)).astype("float32")
                return jnp.mean((out - y) ** 2), {"seen": x.sum()}

            return self.opt.minimize(loss, [self.w], has_aux=True, retries=retries)

        state = [self.w, self.mean, *self.opt.variables]
        self.step = gs.optimizers.jit(step, state, donate=True) if compiled else step

    @property
    def values(self):
        """All but the counts of skipped and retried steps."""
        info = telemetry(self.opt)._replace(skipped_steps=0, retried_steps=0)
        kept = self.w, self.mean, *self.opt.inner_optimizer.variables, self.opt.dynamic_scale
        return [*(v.numpy() for v in kept), self.opt.dynamic_counter.numpy(), *info]


def counts(run):
    """How many steps were skipped, and how many retried."""
    info = telemetry(run.opt)
    return int(info.skipped_steps), int(info.retried_steps)


@pytest.mark.parametrize("compiled", [True, False])
def test_from_a_scale_far_too_large_every_step_is_taken(compiled):
    """Every step from 2**40 is applied, and its loss, aux and running mean are its own."""
    run, usual = Run(40, compiled=compiled), Run(0, 2.0**10)
    for i in range(5):
        (loss, aux), (expected, _) = run.step(X + i, Y), usual.step(X + i, Y)
        assert aux["seen"] == (X + i).sum()
        assert loss == pytest.approx(float(expected), rel=1e-2)
    assert run.opt.iterations == 5
    np.testing.assert_allclose(run.w.numpy(), usual.w.numpy(), rtol=1e-2, atol=1e-3)
    assert run.mean == pytest.approx(float(usual.mean), rel=1e-6)


@pytest.mark.as_users
@pytest.mark.parametrize("compiled", [True, False])
def test_a_retry_is_a_skipped_step_with_the_same_batch(compiled):
    """Weights, slots, scale and norms are those of as many skipped steps, bit for bit."""
    run, other = Run(40, compiled=compiled), Run(0, compiled=compiled)
    run.step(X, Y)
    while not step_was_applied(other.opt) or other.opt.iterations == 0:
        other.step(X, Y)
    lost = telemetry(other.opt).skipped_steps
    assert lost > 10
    assert counts(run) == (0, lost)
    for one, expected in zip(run.values, other.values, strict=True):
        np.testing.assert_array_equal(one, expected)


@pytest.mark.as_users
def test_without_retries_nothing_changes():
    """The program of a step without retries has no loop; one with retries has one."""
    for retries, count in ((0, 0), (3, 1)):
        assert Run(retries).step.lower(X, Y).as_text().count("stablehlo.while") == count


@pytest.mark.parametrize("retries", [0, 8, 30])
@pytest.mark.parametrize("compiled", [True, False])
def test_bad_data_costs_the_scale_one_step(compiled, retries):
    """NaN in the data is one skipped step, however many retries are allowed."""
    run = Run(retries, 2.0**15, compiled=compiled)
    loss, _ = run.step(X.at[0].set(jnp.nan), Y)
    assert np.isnan(loss)
    assert not run.w.numpy().any()
    assert run.mean == 0
    assert run.opt.loss_scale == 2.0**14
    assert counts(run) == (1, 0)


@pytest.mark.parametrize("compiled", [True, False])
def test_if_no_retry_is_applied_the_scale_is_lowered_once(compiled):
    """Three retries from 2**40 all overflow; the next step starts from half of the scale."""
    run = Run(3, compiled=compiled)
    run.step(X, Y)
    assert not step_was_applied(run.opt)
    assert not run.w.numpy().any()
    assert run.opt.loss_scale == 2.0**39
    assert counts(run) == (1, 3)


@pytest.mark.filterwarnings("ignore:Retries have no effect")
@pytest.mark.parametrize(
    "rule", [gs.FixedLossScale(2.0**40), gs.DynamicLossScale(2.0**40, min_scale=2.0**40)]
)
def test_nothing_is_tried_again_at_the_same_scale(rule):
    """A rule that keeps its scale has no retry: the loss is called once."""
    w, calls = Variable(jnp.zeros((16, 16))), []
    opt = LossScaleOptimizer(SGD(0.1), loss_scale=rule, telemetry=True)

    def loss():
        calls.append(1)
        out = (X.astype(jnp.float16) @ w.value().astype(jnp.float16)).astype(jnp.float32)
        return jnp.mean((out - Y) ** 2)

    opt.minimize(loss, [w], retries=8)
    assert not step_was_applied(opt)
    assert len(calls) == 1


def test_a_microbatch_is_taken_again():
    """In a window of two, an overflow costs no microbatch."""
    run, usual = Run(40, gradient_accumulation_steps=2), Run(0, 2.0**10)
    for _ in range(2):
        run.step(X, Y)
    usual.step(X, Y)
    assert run.opt.iterations == 1
    np.testing.assert_allclose(run.w.numpy(), usual.w.numpy(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("make", [lambda: from_optax(optax.adam(0.1)), lambda: SGD(0.1)])
def test_around_other_optimizers(make):
    """The inner optimizer takes one step."""
    run = Run(40, inner=make())
    run.step(X, Y)
    assert run.opt.iterations == 1
    assert np.isfinite(run.w.numpy()).all()
    assert run.w.numpy().any()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_eight_devices_retry_together(kind):
    """On a mesh the weights are those of one device."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    everywhere = NamedSharding(mesh, PartitionSpec())
    w = Variable(jax.device_put(jnp.zeros((16, 16)), everywhere))
    opt = LossScaleOptimizer(Adam(0.1), 2.0**40)
    opt.build([w])

    def step(x, y):
        def loss():
            out = (x.astype(jnp.float16) @ w.value().astype(jnp.float16)).astype(jnp.float32)
            return jnp.mean((out - y) ** 2)

        return opt.minimize(loss, [w], retries=40)

    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, PartitionSpec("data"))
        gs.optimizers.jit(step, [w, *opt.variables])(*(jax.device_put(v, rows) for v in (X, Y)))
    one = Run(40)
    one.step(X, Y)
    np.testing.assert_allclose(w.numpy(), one.w.numpy(), rtol=1e-2, atol=1e-3)
    assert opt.loss_scale == one.opt.loss_scale


@pytest.mark.parametrize("compiled", [True, False])
def test_retries_without_a_number_go_on_until_the_step_fits(compiled):
    """`retries=True` takes as many tries as the step needs, and False takes none."""
    run = Run(True, 2.0**60, compiled=compiled)
    run.step(X, Y)
    skipped, retried = counts(run)
    assert skipped == 0
    assert retried > 40
    run = Run(False, 2.0**60, compiled=compiled)
    run.step(X, Y)
    assert counts(run) == (1, 0)


def test_bad_retries_are_refused():
    """The error names the argument and the value, and nothing has changed."""
    w = Variable(1.0)
    opt = LossScaleOptimizer(SGD(0.1))
    for retries in (-1, 0.5):
        with pytest.raises(ValueError, match="for retries; got"):
            opt.minimize(lambda: w**2, [w], retries=retries)
    with pytest.raises(TypeError, match="retries; got 'all'"):
        opt.minimize(lambda: w**2, [w], retries="all")
    assert w.value() == 1


def test_retries_in_vain_leave_the_counts_of_one_skipped_step():
    """The scales of later steps are those of a run without retries, whatever the rule counts."""
    scales = []
    for retries in (0, 3):
        w = Variable(1.0)
        opt = LossScaleOptimizer(SGD(0.0), loss_scale=gs.AdaptiveLossScale(2.0**10))
        for is_bad in (False, True, False, False, False):

            def loss(w=w, is_bad=is_bad):
                # The gradient of the square root at 0 is infinite, at any scale; its value is not.
                return jnp.sqrt(w - 1.0) if is_bad else w * 1.0

            opt.minimize(loss, [w], retries=retries)
            scales.append(float(opt.loss_scale))
    assert scales[:5] == scales[5:]
