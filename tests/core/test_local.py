"""Several losses, or parts of a network: a scale for each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gainstage as gs


def test_a_local_scale_bears_complex_numbers():
    """Gradients of what is complex are the same with a scale of its own; one that float32 cannot
    hold is refused."""
    for fun, x in [
        (lambda z: jnp.abs(z) ** 2, jnp.complex64(1 + 2j)),
        (lambda x: jnp.abs(x * (1 + 1j)) ** 2, jnp.float32(3)),
    ]:
        local = gs.locally_scaled(fun, 2.0**10)
        np.testing.assert_allclose(jax.grad(local)(x), jax.grad(fun)(x), rtol=1e-6)
    for scale in (1e39, 1e-40):
        with pytest.raises(ValueError, match="scale"):
            gs.locally_scaled(jnp.sin, scale)
