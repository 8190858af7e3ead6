"""Steps that the caller skips, alone or for several optimizers together: `apply_if`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs
from gainstage.diagnostics import telemetry
from gainstage.optimizers import SGD, Adam, LossScaleOptimizer, Variable
from gainstage.runs.recording import Run
from gainstage.runs.skip_causes import why_skipped
from gainstage.runs.summary import headline


def two_networks():
    """Two weights with an optimizer each: a generator and its critic."""
    made = []
    for name, scale in (("generator", 2.0**8), ("critic", 2.0**12)):
        w = Variable(np.ones(3, np.float32), name=name)
        opt = LossScaleOptimizer(Adam(0.1), scale, telemetry=True)
        opt.build([w])
        made.append((w, opt))
    return made


def bits(w, opt):
    return [np.asarray(v) for v in (w, *opt.inner_optimizer.variables)]


# Asked for in apex#232.
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_two_optimizers_skip_together_or_apart(shared, compiled):
    """Each loss has its own scale, which only its own gradients move. With a shared decision both
    skip where one overflowed, else only that one."""
    made = two_networks()

    def step(grads):
        fine = None
        if shared:
            checks = [opt.check_finite([g]) for (_, opt), g in zip(made, grads, strict=True)]
            fine = checks[0] & checks[1]
        for (_, opt), gradient in zip(made, grads, strict=True):
            opt.apply([gradient], apply_if=fine)

    variables = [[w, *opt.variables] for w, opt in made]
    program = gs.optimizers.jit(step, variables, donate=True) if compiled else step
    program([np.ones(3, np.float32)] * 2)
    first = [[variable.numpy() for variable in each] for each in variables]
    before = [bits(*each) for each in made]
    for which in (None, 0, 1):
        for each, values in zip(variables, first, strict=True):
            for variable, value in zip(each, values, strict=True):
                variable.assign(value)
        program([np.full(3, np.inf if i == which else 1.0, np.float32) for i in range(2)])
        for i, ((w, opt), old) in enumerate(zip(made, before, strict=True)):
            skips = i == which or (shared and which is not None)
            assert int(opt.iterations) == (1 if skips else 2)
            assert int(telemetry(opt).skipped_steps) == skips
            if skips:
                for one, other in zip(old, bits(w, opt), strict=True):
                    np.testing.assert_array_equal(one, other)
            assert float(opt.loss_scale) == (2.0**8, 2.0**12)[i] / (2 if i == which else 1)


def test_optax_loops_share_a_decision_too():
    """`apply_if=False` skips a finite step: updates of -0.0, the state as it was, the scale not
    lowered, and telemetry says so."""
    params = jnp.ones(3)
    tx = gs.with_loss_scale(optax.adam(0.1), telemetry=True)
    state = tx.init(params)
    _, state = tx.update(params, state, params)
    updates, new = tx.update(params, state, params, apply_if=jnp.array(False))
    assert np.signbit(updates).all()
    np.testing.assert_array_equal(updates, 0)
    for one, other in zip(jax.tree.leaves(new.inner), jax.tree.leaves(state.inner), strict=True):
        np.testing.assert_array_equal(one, other)
    assert int(new.rule_state.good_steps) == 2
    info = telemetry(new)
    assert (int(info.applied_steps), int(info.skipped_steps)) == (1, 1)
    assert not gs.transforms.step_was_applied(new)


@pytest.mark.parametrize("make", [lambda: SGD(0.1), lambda: SGD(0.1, loss_scale_factor=4.0)])
def test_any_optimizer_can_be_told_to_skip(make):
    """`apply_if` works on optimizers without a scale, and with a fixed one."""
    w, opt = Variable(1.0), make()
    opt.apply([1.0], [w], apply_if=False)
    assert (float(w), int(opt.iterations)) == (1.0, 0)
    opt.apply([4.0], apply_if=True)
    assert int(opt.iterations) == 1
    assert float(w) < 1.0


@pytest.mark.parametrize("wrong", [lambda: False, "False", {}, 0, 1.0, [True], np.array([True])])
def test_only_a_bool_scalar_decides(wrong):
    """Anything else for `apply_if` is an error, and nothing is built or changed; a bool of Python,
    numpy or JAX, and a variable of one, decides."""
    w, opt = Variable(1.0), LossScaleOptimizer(SGD(0.5), 1.0)
    tx = gs.with_loss_scale(optax.sgd(0.5))
    with pytest.raises((TypeError, ValueError), match="Expected a bool scalar for apply_if; got"):
        opt.apply([1.0], [w], apply_if=wrong)
    with pytest.raises((TypeError, ValueError), match="Expected a bool scalar for apply_if; got"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2), apply_if=wrong)
    assert not opt.built
    for right in (False, np.False_, jnp.array(False), Variable(False)):
        opt.apply([1.0], [w], apply_if=right)
    assert float(w) == 1.0


def test_a_veto_is_no_overflow():
    """Where `apply_if` turns down finite gradients telemetry says that they were finite and the
    step was not applied; a recorded run puts it down to `apply_if`."""
    w, opt = Variable(1.0), LossScaleOptimizer(SGD(0.5), 8.0, telemetry=True)
    tx = gs.with_loss_scale(optax.sgd(0.5), telemetry=True)
    params = jnp.ones(())
    state = tx.init(params)
    infos = []
    for gradient, apply_if in ((1.0, True), (1.0, False), (np.inf, False), (np.inf, True)):
        opt.apply([gradient], [w], apply_if=apply_if)
        _, state = tx.update(jnp.float32(gradient), state, params, apply_if=apply_if)
        infos.append(telemetry(opt))
        for info in (infos[-1], telemetry(state)):
            finite = np.isfinite(gradient)
            assert (bool(info.finite), bool(info.applied)) == (finite, finite and apply_if)
    assert (int(info.applied_steps), int(info.skipped_steps)) == (1, 3)
    assert gs.diagnostics.report(opt).counts.tolist() == [[2, 0, 2, 3]]
    columns = {name: np.float64([getattr(i, name) for i in infos]) for name in info._fields}
    run = Run(np.arange(4), columns)
    assert why_skipped(run)["overflow"].tolist() == [False, False, True, True]
    shown = headline(run)
    assert shown["Skipped, of those recorded"] == "2 (50.0%)"
    assert shown["Finite, but skipped by apply_if"] == "1"
