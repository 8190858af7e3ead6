"""Several losses, optimizers or parts of a network: a scale for each, one verdict or several."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs
from gainstage.diagnostics.findings import headline
from gainstage.diagnostics.runs import Run, why_skipped


def pair():
    """Two weights with an optimizer each: a generator and its critic."""
    made = []
    for name, scale in (("generator", 2.0**8), ("critic", 2.0**12)):
        w = gs.Variable(np.ones(3, np.float32), name=name)
        opt = gs.LossScaleOptimizer(gs.Adam(0.1), scale, telemetry=True)
        opt.build([w])
        made.append((w, opt))
    return made


def bits(w, opt):
    return [np.asarray(v) for v in (w, *opt.inner_optimizer.variables)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("which", [None, 0, 1])
def test_two_optimizers_skip_together_or_apart(which, shared, compiled):
    """Each loss has its own scale, which only its own gradients move. With a shared verdict both
    skip where one overflowed, else only that one."""
    made = pair()

    def step(grads):
        fine = None
        if shared:
            checks = [opt.check_finite([g]) for (_, opt), g in zip(made, grads, strict=True)]
            fine = checks[0] & checks[1]
        for (_, opt), gradient in zip(made, grads, strict=True):
            opt.apply([gradient], only_if=fine)

    variables = [[w, *opt.variables] for w, opt in made]
    program = gs.jit(step, variables, donate=True) if compiled else step
    program([jnp.ones(3), jnp.ones(3)])
    before = [bits(*each) for each in made]
    program([jnp.full(3, jnp.inf if i == which else 1.0) for i in range(2)])
    for i, ((w, opt), old) in enumerate(zip(made, before, strict=True)):
        skips = i == which or (shared and which is not None)
        assert int(opt.iterations) == (1 if skips else 2)
        assert int(gs.telemetry(opt).skipped_steps) == skips
        if skips:
            for one, other in zip(old, bits(w, opt), strict=True):
                np.testing.assert_array_equal(one, other)
        assert float(opt.loss_scale) == (2.0**8, 2.0**12)[i] / (2 if i == which else 1)


def test_optax_loops_share_a_verdict_too():
    """`only_if=False` skips a finite step: updates of -0.0, the state as it was, the scale not
    lowered, and the ledger says so."""
    params = jnp.ones(3)
    tx = gs.loss_scaled(optax.adam(0.1), telemetry=True)
    state = tx.init(params)
    _, state = tx.update(params, state, params)
    updates, new = tx.update(params, state, params, only_if=jnp.array(False))
    assert np.signbit(updates).all()
    np.testing.assert_array_equal(updates, 0)
    for one, other in zip(jax.tree.leaves(new.inner), jax.tree.leaves(state.inner), strict=True):
        np.testing.assert_array_equal(one, other)
    assert int(new.loss_scale.good_steps) == 2
    info = gs.telemetry(new)
    assert (int(info.applied_steps), int(info.skipped_steps)) == (1, 1)
    assert not gs.step_was_applied(new)


@pytest.mark.parametrize("make", [lambda: gs.SGD(0.1), lambda: gs.SGD(0.1, loss_scale_factor=4.0)])
def test_any_optimizer_can_be_told_to_skip(make):
    """`only_if` works on optimizers without a scale, and with a fixed one."""
    w, opt = gs.Variable(1.0), make()
    opt.apply([1.0], [w], only_if=False)
    assert (float(w), int(opt.iterations)) == (1.0, 0)
    opt.apply([4.0], only_if=True)
    assert int(opt.iterations) == 1
    assert float(w) < 1.0


def test_a_loss_that_is_given_reaches_the_rule():
    """In a loop of one's own `apply(..., loss=loss)` tells the rule what `minimize` would have."""
    w = gs.Variable([1.0])
    opt = gs.LossScaleOptimizer(gs.SGD(0.1), rule=gs.AdaptiveLossScale(2.0**10))
    opt.apply([[1.0]], [w], loss=1.0)
    scale = float(opt.loss_scale)
    opt.apply([[float("inf")]], loss=float("nan"))
    assert float(opt.loss_scale) == scale
    opt.apply([[float("inf")]], loss=1.0)
    assert float(opt.loss_scale) < scale


def test_a_schedule_moves_with_applied_steps():
    """After k skips of n steps the rate is that of step n - k, and the ledger tells both."""
    schedule = gs.schedules.ExponentialDecay(1.0, 1, 0.5)
    w = gs.Variable([0.0])
    opt = gs.LossScaleOptimizer(gs.SGD(schedule), telemetry=True)
    for n in range(9):
        opt.apply([[float("nan") if n % 3 == 0 else 0.0]], [w])
    info = gs.telemetry(opt)
    assert (int(info.applied_steps), int(info.skipped_steps)) == (6, 3)
    assert float(opt.learning_rate) == 0.5**6


SCALE = 2.0**10  # the largest that the first branch bears


def branches(params, x, first=lambda f: f, second=lambda f: f):
    """Two branches in float16 whose gradients are 2**30 apart."""

    def branch(w, x):
        w, x = w.astype(jnp.float16), x.astype(jnp.float16)
        return (w * x).astype(jnp.float32)

    large = first(branch)(params["large"], x) * 2.0**5
    small = second(branch)(params["small"], x) * 2.0**-36
    return (large + small).sum()


def test_parts_of_a_network_have_scales_of_their_own():
    """Where no single scale keeps both branches, one of them with its own equals float32."""
    params = {"large": jnp.linspace(0.5, 1.0, 8), "small": jnp.linspace(0.5, 1.0, 8)}
    x = jnp.linspace(0.25, 1.0, 8).astype(jnp.float16)
    exact = {"large": x.astype(jnp.float32) * 2.0**5, "small": x.astype(jnp.float32) * 2.0**-36}

    def gradient(scale, **how):
        grads = jax.grad(lambda p: branches(p, x, **how) * scale)(params)
        return jax.tree.map(lambda g: g / scale, grads)

    def right(grads):
        return all(bool((grads[k] == exact[k]).all()) for k in exact)

    assert not any(right(gradient(2.0**bits)) for bits in range(-24, 100))
    own = {"second": lambda f: gs.locally_scaled(f, 2.0**25)}
    assert right(gradient(SCALE, **own))
    assert right(jax.jit(lambda: gradient(SCALE, **own))())


def test_what_a_part_closes_over_is_scaled_back_too():
    """A variable that a part of the network reads by itself gets its true gradient."""
    w, x = gs.Variable(np.float32([1.0, 2.0])), jnp.float32([3.0, 4.0])
    opt = gs.SGD(1.0)
    part = gs.locally_scaled(lambda x: w.value() * x, 2.0**20)
    (pair,) = opt.compute_gradients(lambda: part(x).sum(), [w])
    np.testing.assert_array_equal(pair[0], x)
    with pytest.raises(ValueError, match="scale"):
        gs.locally_scaled(lambda x: x, 0.0)


@pytest.mark.parametrize("policy", ["extend", "renormalise", "drop_window", "fail"])
def test_a_rejected_microbatch_leaves_its_window_alone(policy):
    """A microbatch that is finite, but that `only_if` turns down, neither fails a window nor counts
    in it."""
    w = gs.Variable([0.0])
    inner = gs.SGD(1.0, gradient_accumulation_steps=2, on_bad_microbatch=policy)
    opt = gs.LossScaleOptimizer(inner, rule=gs.DynamicLossScale(4.0, increment_period=100))
    for gradient, accepted in ((1.0, True), (5.0, False), (3.0, True), (2.0, True), (4.0, True)):
        opt.apply([[gradient * 4.0]], [w], only_if=accepted)
    assert (float(w.value()[0]), int(opt.iterations)) == (-2.0 - 3.0, 2)
    assert float(opt.loss_scale) == 4.0


@pytest.mark.parametrize("policy", ["extend", "renormalise", "drop_window"])
def test_a_shared_verdict_does_not_hide_an_overflow_from_its_own_scale(policy):
    """Where `only_if` is false because of these very gradients, the scale falls, as without it."""
    w = gs.Variable([0.0])
    inner = gs.SGD(1.0, gradient_accumulation_steps=2, on_bad_microbatch=policy)
    opt = gs.LossScaleOptimizer(inner, 4.0)
    for _ in range(4):
        grads = [jnp.float32([np.inf])]
        opt.apply(grads, [w], only_if=opt.check_finite(grads) & True)
    assert float(opt.loss_scale) == (0.25 if policy == "extend" else 1.0)
    assert (float(w.value()[0]), int(opt.iterations)) == (0.0, 0)


def test_a_shared_verdict_does_not_hide_a_failure():
    """With "fail" an overflow is an error at the next step, whatever `only_if` said of it."""
    w = gs.Variable([0.0])
    inner = gs.SGD(1.0, gradient_accumulation_steps=2, on_bad_microbatch="fail")
    opt = gs.LossScaleOptimizer(inner, 4.0)
    opt.apply([[np.inf]], [w], only_if=False)
    with pytest.raises(FloatingPointError):
        opt.apply([[1.0]])


def test_a_window_learns_nothing_from_the_loss_of_a_rejected_microbatch():
    """A rejected loss of inf does not excuse the overflow of another microbatch."""
    w = gs.Variable([0.0])
    inner = gs.SGD(1.0, gradient_accumulation_steps=2, on_bad_microbatch="drop_window")
    opt = gs.LossScaleOptimizer(inner, rule=gs.AdaptiveLossScale(2.0**10))
    opt.apply([[1.0]], [w], loss=np.inf, only_if=False)
    opt.apply([[1.0]], loss=1.0)
    opt.apply([[np.inf]], loss=1.0)
    assert float(opt.loss_scale) < 2.0**10


def test_a_local_scale_changes_no_result_and_no_other_gradient(rng):
    """Forward results, integer arguments and gradients in float32 are as without it."""
    w, x = (jnp.asarray(rng.normal(size=(3, 3)), jnp.float32) for _ in range(2))

    def layer(params, x, row):
        return {"y": jnp.tanh(params["w"] @ x)[row], "row": row}

    local = gs.locally_scaled(layer, 2.0**7)
    assert local({"w": w}, x, 1)["row"] == 1
    for argument in (0, 1):
        one, other = (
            jax.value_and_grad(lambda p, x, f=f: (f(p, x, 1)["y"] ** 2).sum(), argument)(
                {"w": w}, x
            )
            for f in (layer, local)
        )
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("wrong", [lambda: False, "False", {}, 0, 1.0, [True], np.array([True])])
def test_only_a_bool_scalar_decides(wrong):
    """Anything else for `only_if` is an error, and nothing is built or changed; a bool of Python,
    numpy or JAX, and a variable of one, decides."""
    w, opt = gs.Variable(1.0), gs.LossScaleOptimizer(gs.SGD(0.5), 1.0)
    tx = gs.loss_scaled(optax.sgd(0.5))
    with pytest.raises((TypeError, ValueError), match="Expected a bool scalar for only_if; got"):
        opt.apply([1.0], [w], only_if=wrong)
    with pytest.raises((TypeError, ValueError), match="Expected a bool scalar for only_if; got"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2), only_if=wrong)
    assert not opt.built
    for right in (False, np.False_, jnp.array(False), gs.Variable(False)):
        opt.apply([1.0], [w], only_if=right)
    assert float(w) == 1.0


def test_a_veto_is_no_overflow():
    """Where `only_if` turns down finite gradients telemetry says that they were finite and the step
    was not applied; a recorded run puts it down to `only_if`."""
    w, opt = gs.Variable(1.0), gs.LossScaleOptimizer(gs.SGD(0.5), 8.0, telemetry=True)
    tx = gs.loss_scaled(optax.sgd(0.5), telemetry=True)
    params = jnp.ones(())
    state = tx.init(params)
    infos = []
    for gradient, only_if in ((1.0, True), (1.0, False), (np.inf, False), (np.inf, True)):
        opt.apply([gradient], [w], only_if=only_if)
        _, state = tx.update(jnp.float32(gradient), state, params, only_if=only_if)
        infos.append(gs.telemetry(opt))
        for info in (infos[-1], gs.telemetry(state)):
            finite = np.isfinite(gradient)
            assert (bool(info.finite), bool(info.applied)) == (finite, finite and only_if)
    assert (int(info.applied_steps), int(info.skipped_steps)) == (1, 3)
    assert gs.report(opt).counts.tolist() == [[2, 0, 2, 3]]
    columns = {name: np.float64([getattr(i, name) for i in infos]) for name in info._fields}
    run = Run(np.arange(4), columns)
    assert why_skipped(run)["overflow"].tolist() == [False, False, True, True]
    shown = headline(run)
    assert shown["Skipped, of those recorded"] == "2 (50.0%)"
    assert shown["Finite, but turned down by only_if"] == "1"
