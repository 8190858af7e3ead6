"""Several losses, or parts of a network: a scale for each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gainstage as gs
from gainstage.optimizers import SGD
from gainstage.transforms import locally_scaled


def test_a_local_scale_bears_complex_numbers():
    """Gradients of what is complex are the same with a scale of its own; one that float32 cannot
    hold is refused."""
    for fun, x in [
        (lambda z: jnp.abs(z) ** 2, jnp.complex64(1 + 2j)),
        (lambda x: jnp.abs(x * (1 + 1j)) ** 2, jnp.float32(3)),
    ]:
        local = locally_scaled(fun, 2.0**10)
        np.testing.assert_allclose(jax.grad(local)(x), jax.grad(fun)(x), rtol=1e-6)
    for scale in (1e39, 1e-40):
        with pytest.raises(ValueError, match="scale"):
            locally_scaled(jnp.sin, scale)


def bits(w, opt):
    return [np.asarray(v) for v in (w, *opt.inner_optimizer.variables)]


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
    own = {"second": lambda f: locally_scaled(f, 2.0**25)}
    assert right(gradient(SCALE, **own))
    assert right(jax.jit(lambda: gradient(SCALE, **own))())


def test_what_a_part_closes_over_is_scaled_back_too():
    """A variable that a part of the network reads by itself gets its true gradient."""
    w, x = gs.optimizers.Variable(np.float32([1.0, 2.0])), jnp.float32([3.0, 4.0])
    opt = SGD(1.0)
    part = locally_scaled(lambda x: w.value() * x, 2.0**20)
    (pair,) = opt.compute_gradients(lambda: part(x).sum(), [w])
    np.testing.assert_array_equal(pair[0], x)
    with pytest.raises(ValueError, match="scale"):
        locally_scaled(lambda x: x, 0.0)


def test_a_local_scale_changes_no_result_and_no_other_gradient(rng):
    """Forward results, integer arguments and gradients in float32 are as without it."""
    w, x = (jnp.asarray(rng.normal(size=(3, 3)), jnp.float32) for _ in range(2))

    def layer(params, x, row):
        return {"y": jnp.tanh(params["w"] @ x)[row], "row": row}

    local = locally_scaled(layer, 2.0**7)
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
