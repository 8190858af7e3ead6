"""Any optax transformation as an optimizer: `Optax`."""

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
