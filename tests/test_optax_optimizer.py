"""Any optax transformation as an optimizer: `Optax`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs


@pytest.mark.parametrize("compiled", [True, False])
def test_no_gradient_leaves_the_state_of_a_variable_alone(compiled):
    """A variable without a gradient keeps its moments bit for bit; the others take their step."""
    masked = optax.masked(optax.trace(0.9), [True, False, True])
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1), masked)
    variables = [gs.Variable([1.0, 2.0], name=name) for name in "abc"]
    opt = gs.LossScaleOptimizer(gs.Optax(tx, jit_compile=compiled), 8.0)
    opt.apply([jnp.full(2, 8.0)] * 3, variables)

    def part(of):
        of = variables.index(of)
        return {k: np.asarray(v).tobytes() for k, v in opt.state().items() if f"[{of}]" in k[-3:]}

    a, b, _ = variables
    before, others = {**part(b), "": b.numpy().tobytes()}, part(a)
    with pytest.warns(UserWarning, match="No gradient for"):
        opt.apply([jnp.full(2, 8.0), None, jnp.full(2, 8.0)], variables)
    assert {**part(b), "": b.numpy().tobytes()} == before
    assert len(before) == 3
    assert all(part(a)[key] != value for key, value in others.items())


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_in_the_state_are_saved(impl):
    """A transformation with a typed key trains as in optax, and its state is saved and loaded."""
    key = jax.random.key(3, impl=impl)
    gradient, tx = jnp.ones(2), optax.noisy_sgd(0.1, key=key)
    theirs, state = jnp.ones(2), tx.init(jnp.ones(2))
    runs = []
    for _ in range(2):
        w, opt = gs.Variable([1.0, 1.0]), gs.LossScaleOptimizer(gs.Optax(tx), 1.0)
        opt.build([w])
        runs.append((w, opt))
    (w, opt), (other, copy) = runs
    for _ in range(2):
        opt.apply([gradient], [w])
        updates, state = tx.update(gradient, state)
        theirs = optax.apply_updates(theirs, updates)
    np.testing.assert_allclose(w.numpy(), theirs, rtol=1e-6)
    store = {}
    opt.save_own_variables(store)
    copy.load_own_variables(store)
    copy.load_state(opt.state())
    other.assign(w)
    values = [v.value() for v in copy.variables]
    (pure,), _ = copy.stateless_apply(values, [gradient], [other.value()])
    for variable, optimizer in runs:
        optimizer.apply([gradient], [variable])
    assert w.numpy().tolist() == other.numpy().tolist()
    np.testing.assert_allclose(w.numpy(), pure, rtol=1e-6)


def test_a_save_that_fails_stores_nothing():
    """A state with a value that is only planned is not saved in part."""
    planned, store = gs.Variable(jax.ShapeDtypeStruct((2,), jnp.float32), name="w"), {}
    opt = gs.Optax(optax.noisy_sgd(0.1, key=3))
    opt.build([planned])
    with pytest.raises(ValueError, match="only planned"):
        opt.save_own_variables(store)
    assert store == {}
