"""`on_bad_microbatch`: what becomes of a window in which a microbatch overflowed."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs
from gainstage.optimizers import SGD, Adam

from oracles import window
from peers import fails, keras_step, live

STEPS, RATE, INITIAL, PERIOD = 4, 0.25, 2.0**10, 2
POLICIES = ("extend", "drop_window")


def test_no_average_is_given_before_there_is_one():
    """After bad microbatches alone `finalize_variable_values` leaves the variables as they are."""
    options = {"gradient_accumulation_steps": 2, "use_ema": True}
    options["on_bad_microbatch"] = "drop_window"
    w, opt = gs.Variable([3.0]), gs.LossScaleOptimizer(SGD(1.0, **options))
    opt.apply([[np.inf]], [w])
    opt.finalize_variable_values([w])
    assert float(w.value()[0]) == 3.0


@pytest.mark.as_users
@pytest.mark.parametrize("window", [0, 1], ids=["first window", "second window"])
@pytest.mark.parametrize("bad", [0, 1], ids=["first microbatch", "last microbatch"])
def test_a_dropped_window_sets_no_weight_to_an_average(window, bad):
    """The step that drops a window leaves weights and averages bit for bit, although the weights
    are set to their averages after every update."""
    options = {"gradient_accumulation_steps": 2, "use_ema": True, "ema_overwrite_frequency": 1}
    inner = SGD(0.5, **options, on_bad_microbatch="drop_window")
    w, opt = gs.Variable([3.0, 1e-45]), gs.LossScaleOptimizer(inner, 8.0)
    opt.build([w])
    averages = [v for v in opt.variables if "average" in v.name]
    assert len(averages) == 1
    for step in range(2 * window + 2):
        before = [v.numpy().tobytes() for v in (w, *averages)]
        opt.apply([np.array([np.inf if step == 2 * window + bad else 8.0, 0.0])], [w])
    assert [v.numpy().tobytes() for v in (w, *averages)] == before


def made(policy, on="inner", inner=SGD, steps=STEPS, **options):
    """A variable and its optimizer, with the option given to the inner one or to the wrapper."""
    accumulate = {"gradient_accumulation_steps": steps, "on_bad_microbatch": policy}
    w = gs.Variable(np.zeros(3, np.float32))
    given = (accumulate, {}) if on == "inner" else ({}, accumulate)
    rule = gs.DynamicLossScale(INITIAL, increment_period=PERIOD, min_scale=2.0**-24)
    opt = gs.LossScaleOptimizer(inner(RATE, **given[0], **options), rule=rule, **given[1])
    opt.build([w])
    return w, opt


def in_optimizer(policy, on, steps):
    """The step of an optimizer as a function of its state, and its first state."""
    w, opt = made(policy, on, steps=steps)

    def apply(true, accepted):
        opt.apply([jnp.full(3, true) * opt.loss_scale], apply_if=accepted)
        return w.value()[0], opt.iterations.value(), opt.dynamic_scale.value()

    pure = gs.functionalize(apply, variables := [w, *opt.variables])
    return lambda values, *each: pure(values, *each)[::-1], [v.value() for v in variables]


def in_optax(policy, on, steps):
    """The same of `optax.MultiSteps`, which extends its windows."""
    rule = gs.DynamicLossScale(INITIAL, increment_period=PERIOD, min_scale=2.0**-24)
    tx = gs.loss_scaled(optax.MultiSteps(optax.sgd(RATE), steps), rule)
    params = jnp.zeros(3)

    def step(state, true, accepted):
        params, before = state
        updates, after = tx.update(jnp.full(3, true), before, params, apply_if=accepted)
        params = gs.apply_updates(params, updates, after)
        return (params, after), (params[0], after.inner.gradient_step, gs.loss_scale(after))

    return step, (params, tx.init(params))


KINDS = [1.0, np.inf, np.nan, None]  # a finite microbatch, bad ones, and one that is turned down
WINDOWS = [
    *itertools.product([in_optimizer], POLICIES, ["inner", "wrapper"]),
    (in_optax, "extend", "MultiSteps"),
]


# Asked for in prime-rl#1961.
@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize(("make", "policy", "on"), WINDOWS)
def test_windows_are_those_of_the_description(make, policy, on, steps):
    """In all 4,096 runs of six microbatches, finite, inf, NaN or turned down by `apply_if`: weight,
    updates and scale after each are those of a plain state machine."""
    runs = list(itertools.product(KINDS, repeat=6))
    sizes = [1.0, -2.0, 4.0, 8.0, -16.0, 32.0]  # so that each sum says what is in it
    true = np.array(
        [[s * (kind or 1.0) for s, kind in zip(sizes, run, strict=True)] for run in runs]
    )
    accepted = np.array([[kind is not None for kind in run] for run in runs])
    step, first = make(policy, on, steps)

    def run(*microbatches):
        return jax.lax.scan(lambda state, each: step(state, *each), first, microbatches)[1]

    found = jax.jit(jax.vmap(run))(true.astype(np.float32), accepted)
    expected = [
        [*window(policy, steps, PERIOD, RATE, INITIAL, np.where(takes, grads, None))]
        for grads, takes in zip(true, accepted, strict=True)
    ]
    np.testing.assert_allclose(found, np.moveaxis(expected, -1, 0), rtol=1e-6)


def test_a_window_without_a_good_microbatch_changes_no_weight():
    """Weights, slots and updates stay, the scale is lowered once, and the next window is whole."""
    w, opt = made("drop_window", inner=Adam)
    before = [np.asarray(v) for v in (w, *opt.inner_optimizer.variables)]
    for _ in range(STEPS):
        opt.apply([jnp.full(3, jnp.inf)])
    after = [np.asarray(v) for v in (w, *opt.inner_optimizer.variables)]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    assert float(opt.loss_scale) == INITIAL / 2
    for _ in range(STEPS):
        opt.apply([jnp.full(3, opt.loss_scale)])
    assert int(opt.iterations) == 1
    np.testing.assert_allclose(w.value(), -RATE, rtol=1e-5)  # Adam's first step


def test_what_a_window_has_measured_reaches_the_rule():
    """A rule that measures is told of all microbatches of the window: the largest gradient of any
    of them, and of a loss that was not finite; without a fault of the scale it stays."""
    w = gs.Variable(np.zeros(3, np.float32))
    inner = SGD(RATE, gradient_accumulation_steps=STEPS, on_bad_microbatch="drop_window")
    opt = gs.LossScaleOptimizer(inner, rule=gs.AdaptiveLossScale(2.0**10))
    opt.build([w])

    def window(factors):
        for factor in factors:
            opt.minimize(lambda f=factor: (w.value() * f).sum(), [w])
        return float(opt.loss_scale)

    assert window([1.0, 64.0, 1.0, 2.0]) == 2.0**8  # 64 * 2**8 is one bit and more below 65504
    assert window([1.0, float("nan"), 1.0, 1.0]) == 2.0**8  # its loss was NaN: the data
    assert int(opt.iterations) == 1


@pytest.mark.as_users
@pytest.mark.parametrize("policy", POLICIES)
def test_a_window_goes_on_from_a_checkpoint(policy, rng):
    """State that is saved within a window continues to the same bits."""
    grads = rng.normal(size=(12, 3)).astype(np.float32)
    grads[5] = np.nan
    runs = []
    for split in (None, 6):
        w, opt = made(policy, inner=Adam)
        for i, gradient in enumerate(grads):
            if i == split:
                (value, state), (w, opt) = (w.numpy(), opt.state()), made(policy, inner=Adam)
                w.assign(value)
                opt.load_state(state)
            opt.apply([jnp.asarray(gradient) * opt.loss_scale])
        runs.append([np.asarray(v) for v in (w, *opt.variables)])
    for one, other in zip(*runs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_configurations_name_it_only_where_it_was_given():
    """The default is not in a configuration; another comes back from it."""
    assert "on_bad_microbatch" not in SGD(0.1).get_config()
    _, opt = made("drop_window", on="wrapper")
    config = opt.get_config()
    assert config["on_bad_microbatch"] == "drop_window"
    again = gs.LossScaleOptimizer.from_config(config)
    assert again.get_config() == config


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(0.1, on_bad_microbatch="skip"), "Expected one of extend"),
        (lambda: SGD(0.1, on_bad_microbatch=None), "Expected"),
        (
            lambda: gs.LossScaleOptimizer(SGD(0.1, on_bad_microbatch="drop_window")).build(
                [gs.Variable(1.0)]
            ),
            "Expected gradient_accumulation_steps and a loss scale",
        ),
        (
            lambda: SGD(0.1, gradient_accumulation_steps=2, on_bad_microbatch="drop_window").build(
                [gs.Variable(1.0)]
            ),
            "Expected gradient_accumulation_steps and a loss scale",
        ),
    ],
)
def test_misuse_is_an_error(make, message):
    """An unknown policy, or one without windows or without a check, is refused."""
    with pytest.raises((ValueError, TypeError), match=message):
        make()


@pytest.mark.filterwarnings("ignore:No gradient for")
def test_a_dropped_window_leaves_nothing():
    """`drop_window` drops the gradients of variables, too, that had none in the last microbatch."""
    a, b = gs.Variable(0.0), gs.Variable(0.0)
    inner = SGD(1.0, gradient_accumulation_steps=2, on_bad_microbatch="drop_window")
    opt = gs.LossScaleOptimizer(inner, rule=gs.FixedLossScale(1.0))
    opt.apply([1.0, 8.0], [a, b])
    opt.apply([np.float32("inf"), None], [a, b])
    opt.apply([1.0, 1.0], [a, b])
    opt.apply([1.0, 1.0], [a, b])
    assert (float(a), float(b)) == (-1.0, -1.0)


def test_accumulated_gradients_cannot_overflow_into_the_weights():
    """Two finite gradients whose sum is infinite: the second step is skipped."""
    w = gs.Variable(1.0)
    opt = gs.LossScaleOptimizer(SGD(2.0**-100, gradient_accumulation_steps=2), 1.0)
    opt.apply([np.float32(3e38)], [w])
    state = [v.numpy() for v in opt.inner_optimizer.variables]
    opt.apply([np.float32(3e38)])
    assert float(w) == 1.0
    assert float(opt.loss_scale) == 0.5
    for variable, before in zip(opt.inner_optimizer.variables, state, strict=True):
        np.testing.assert_array_equal(variable.numpy(), before)


@pytest.mark.parametrize("clip", ["global_clipnorm", "clipnorm"])
def test_a_mean_whose_norm_overflows_does_not_reach_the_weights(clip):
    """Accumulated elements may be finite and their norm not: the microbatch that makes it so is
    skipped like any that is not finite, and the window goes on."""
    w = gs.Variable([1.0] * 9)
    inner = SGD(1.5, momentum=0.9, gradient_accumulation_steps=2, **{clip: 1.0})
    opt = gs.LossScaleOptimizer(inner, initial_scale=1.0, telemetry=True)
    opt.apply([[1e38] * 9], [w])
    before = [v.numpy().tobytes() for v in inner.variables]
    opt.apply([[1e38] * 9])
    assert [v.numpy().tobytes() for v in inner.variables] == before
    assert (int(opt.iterations), float(opt.loss_scale)) == (0, 0.5)
    opt.apply([[3.0] * 9])
    np.testing.assert_allclose(w.numpy(), [0.5] * 9, rtol=1e-6)
    info = gs.telemetry(opt)
    assert (int(opt.iterations), int(info.applied_steps), int(info.skipped_steps)) == (1, 2, 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_shared_decision_does_not_hide_an_overflow_from_its_own_scale(policy):
    """Where `apply_if` is false because of these very gradients, the scale falls, as without it."""
    w = gs.Variable([0.0])
    inner = SGD(1.0, gradient_accumulation_steps=2, on_bad_microbatch=policy)
    opt = gs.LossScaleOptimizer(inner, 4.0)
    for _ in range(4):
        grads = [jnp.float32([np.inf])]
        opt.apply(grads, [w], apply_if=opt.check_finite(grads) & True)
    assert float(opt.loss_scale) == (0.25 if policy == "extend" else 1.0)
    assert (float(w.value()[0]), int(opt.iterations)) == (0.0, 0)


def test_a_window_learns_nothing_from_the_loss_of_a_rejected_microbatch():
    """A rejected loss of inf does not excuse the overflow of another microbatch."""
    w = gs.Variable([0.0])
    inner = SGD(1.0, gradient_accumulation_steps=2, on_bad_microbatch="drop_window")
    opt = gs.LossScaleOptimizer(inner, rule=gs.AdaptiveLossScale(2.0**10))
    opt.apply([[1.0]], [w], loss=np.inf, apply_if=False)
    opt.apply([[1.0]], loss=1.0)
    opt.apply([[np.inf]], loss=1.0)
    assert float(opt.loss_scale) < 2.0**10


# Asked for in keras#14829 (accumulation).
def test_float16_variables_accumulate_in_float32():
    """Keras crashes on accumulation with float16 variables; ours accumulates in float32."""
    var = gs.Variable(jnp.zeros(2, jnp.float16))
    opt = gs.LossScaleOptimizer(SGD(1.0, gradient_accumulation_steps=2), 2.0)
    grads = [jnp.array([2, 4], jnp.float16), jnp.array([6, 4], jnp.float16)]
    for gradient in grads:
        opt.apply([gradient], [var])
    assert var.numpy().tolist() == [-2, -2]

    with live("keras") as keras:
        theirs = keras.Variable(np.zeros(2), dtype="float16")
        inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
        step = keras_step(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0), [theirs])
        try:
            for gradient in grads:
                step(gradient)
            crashed = False
        except TypeError:
            crashed = True
        fails(keras, crashed)


@pytest.mark.parametrize("large", [1e30, -1e37])
def test_large_sums_are_clipped_not_skipped(large):
    """A window whose sum is finite, although its square is not, is an update of the norm that clips
    it; one whose sum overflows is skipped."""
    w = gs.Variable([1.0, 1.0])
    inner = SGD(1.0, gradient_accumulation_steps=2, global_clipnorm=1.0)
    opt = gs.LossScaleOptimizer(inner, rule=gs.FixedLossScale(1.0), telemetry=True)
    for _ in range(2):
        opt.apply([np.array([large, 0.0], np.float32)], [w])
        assert bool(gs.step_was_applied(opt))
    np.testing.assert_allclose(w.numpy(), [1 - np.sign(large), 1.0], rtol=1e-6)
    for _ in range(2):
        opt.apply([np.array([3e38, 0.0], np.float32)], [w])
    assert not bool(gs.step_was_applied(opt))


def test_what_a_rule_measures_is_kept_within_a_window_only():
    """A rule that measures has variables for it if it is updated between windows; else none."""
    for options, kept in (
        ({}, 0),
        ({"gradient_accumulation_steps": 2}, 0),
        ({"gradient_accumulation_steps": 2, "on_bad_microbatch": "drop_window"}, 3),
    ):
        w = gs.Variable([1.0])
        opt = gs.LossScaleOptimizer(SGD(0.1, **options), rule=gs.AdaptiveLossScale())
        opt.build([w])
        assert sum("/window_" in v.name for v in opt.variables) == kept
