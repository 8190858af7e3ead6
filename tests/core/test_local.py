"""Several losses, or parts of a network: a scale for each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equations import equations

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


def energy(w, x):
    """A small network, of which all derivatives are of size one."""
    return jnp.sum(jnp.tanh(x @ w["a"]) @ w["b"])


def orders(grad):
    """Derivatives of a function of two arguments, through its gradient: a name and a scalar."""

    def size(tree):
        return sum(jnp.sum(jnp.sin(leaf) ** 2) for leaf in jax.tree.leaves(tree))

    by_x = lambda w, x: grad(energy, 1)(w, x)  # noqa: E731
    captured = lambda w, x: grad(lambda x: energy(w, x), 0)(x)  # noqa: E731
    by_row = lambda w, x: jax.vmap(captured, (None, 0))(w, x)  # noqa: E731
    turn = lambda w: lambda row, _: (row - 0.1 * captured(w, row), None)  # noqa: E731
    return {
        "the same argument": lambda w, x: size(grad(energy, 0)(w, x)),
        "another argument": lambda w, x: size(by_x(w, x)),
        "a captured value": lambda w, x: size(captured(w, x)),
        "in vmap": lambda w, x: size(by_row(w, x)),
        "in a scan": lambda w, x: size(jax.lax.scan(turn(w), x, None, 3)[0]),
        "in remat": lambda w, x: size(jax.checkpoint(by_x)(w, x)),
        "in a scan of remat of vmap": lambda w, x: size(
            jax.lax.scan(lambda c, _: (c - jax.checkpoint(by_row)(w, c), None), x, None, 2)[0]
        ),
        "compiled inside": lambda w, x: size(jax.jit(by_x)(w, x)),
        "in a branch": lambda w, x: size(jax.lax.cond(x[0, 0] < 9, by_x, captured, w, x)),
    }


@pytest.mark.parametrize("name", orders(jax.grad))
def test_derivatives_of_all_orders_are_those_without_a_local_scale(name, rng):
    """Second and third derivatives, with regard to what the first was for and to all else, are
    those of `jax.grad`, at each factor, compiled or not."""
    x = jnp.asarray(rng.normal(size=(6, 3)), jnp.float32)
    w = {"a": jnp.asarray(rng.normal(size=(3, 5)), jnp.float32), "b": jnp.ones(5)}
    second = lambda fun: jax.grad(fun, (0, 1))  # noqa: E731

    def third(fun):
        of_gradient = lambda w, x: sum(  # noqa: E731
            jnp.sum(jnp.cos(g)) for g in jax.tree.leaves(second(fun)(w, x))
        )
        return jax.grad(of_gradient, (0, 1))

    exact = orders(jax.grad)[name]
    for factor in (1.0, 2.0, 2.0**15):
        scaled = orders(lambda f, n, by=factor: jax.grad(locally_scaled(f, by), n))[name]
        for order in (second, third):
            for compiled in (jax.jit, lambda fun: fun) if factor == 2 else (jax.jit,):
                found = compiled(order(scaled))(w, x)
                for a, b in zip(
                    jax.tree.leaves(found), jax.tree.leaves(order(exact)(w, x)), strict=True
                ):
                    assert float(jnp.linalg.norm(a - b)) <= 5e-3 * float(jnp.linalg.norm(b))


def test_forward_mode_over_a_gradient_is_right_and_by_itself_refused():
    """A Hessian by forward over reverse mode is that without a local scale; `jax.jvp` of the
    function is refused by JAX."""
    fun = lambda x: jnp.sum(jnp.sin(x) * x[::-1] ** 2)  # noqa: E731
    x = jnp.linspace(0.5, 1.0, 4)
    found = jax.jacfwd(jax.grad(locally_scaled(fun, 2.0**15)))(x)
    np.testing.assert_allclose(found, jax.hessian(fun)(x), rtol=1e-5, atol=1e-6)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(locally_scaled(fun, 2.0**15), (x,), (x,))


def test_a_part_with_a_local_scale_is_in_half_precision_like_others():
    """Autocast looks into it, so a layer costs what it costs without, and gets its gradients."""
    layer = lambda w, x: jnp.tanh(x @ w)  # noqa: E731
    w, x = jnp.eye(64) * 0.3, jnp.ones((64, 64))

    def program(part):
        grad = jax.grad(gs.autocast(lambda w, x: jnp.mean(part(w, part(w, x)))), (0, 1))
        every = list(equations(jax.make_jaxpr(grad)(w, x)))
        products = [e.outvars[0].aval for e in every if e.primitive.name == "dot_general"]
        return sum(product.dtype == jnp.float16 for product in products), grad(w, x)

    (plain, exact), (count, found) = program(layer), program(locally_scaled(layer, 2.0**4))
    assert count == plain == 6
    for a, b in zip(found, exact, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-6)
