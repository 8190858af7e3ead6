"""Tracing under `autocast` grows with a program as tracing in float32 does."""

import cProfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs

WIDTH, HEADS = 32, 4


def block(p, x):
    """A block of a transformer, written by hand."""
    h = norm(x, p["first"])
    q, k, v = (jnp.einsum("btd,dhk->bthk", h, p[name]) for name in "qkv")
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / 4
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    attended = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v)
    x = x + jnp.einsum("bthk,hkd->btd", attended, p["out"])
    h = jax.nn.gelu(norm(x, p["second"]) @ p["up"] + p["bias"])
    return x + h @ p["down"]


def norm(x, gain):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * gain


def parameters(blocks):
    heads = (WIDTH, HEADS, WIDTH // HEADS)
    shapes = {"first": (WIDTH,), "second": (WIDTH,), "bias": (4 * WIDTH,)}
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH), "out": heads[1:] + heads[:1]}
    shapes |= dict.fromkeys("qkv", heads)
    each = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    return {"blocks": [each] * blocks, "embedding": np.ones((50, WIDTH), np.float32)}


def loss_fn(params, tokens):
    x = params["embedding"][tokens]
    for p in params["blocks"]:
        x = block(p, x)
    logits = (x @ params["embedding"].T)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def calls(transform, blocks):
    """How many functions Python calls while the gradient of a loss is traced."""
    tokens = np.zeros((2, 8), np.int32)

    def trace(blocks):
        fun = transform(lambda params, tokens: loss_fn(params, tokens))
        jax.make_jaxpr(jax.value_and_grad(fun))(parameters(blocks), tokens)

    trace(1)  # the first time, JAX also fills its caches for other programs
    profile = cProfile.Profile()
    profile.enable()
    trace(blocks)
    profile.disable()
    return sum(entry.callcount for entry in profile.getstats())


@pytest.mark.parametrize("blocks", [6, pytest.param(24, marks=pytest.mark.thorough)])
def test_tracing_grows_with_the_program(blocks):
    """A trace is at most 2.5 times that of float32, and 4.5 times if the loss scales itself."""
    exact = calls(lambda fun: fun, blocks)
    assert calls(gs.autocast, blocks) <= 2.5 * exact
    assert calls(lambda fun: gs.autocast(fun, loss_scale=2.0**15), blocks) <= 4.5 * exact


def products_in(program):
    """The products of a program, also those in functions that JAX has compiled, in order."""
    for eqn in program.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        elif eqn.primitive.name == "jit":
            yield from products_in(eqn.params["jaxpr"])


@pytest.mark.parametrize("calls_itself", [False, True])
def test_a_program_traced_in_the_midst_of_another_changes_nothing_of_it(calls_itself):
    """While the gradient of a function under autocast is traced, a derivative of the user's may
    call the same function with other arguments: the first program stays what it is alone."""
    a, b = jnp.full((64, 64), 0.01), jnp.full((64, 64), 0.03)
    x = jnp.linspace(0.1, 1.0, 64 * 64).reshape(64, 64)

    @jax.custom_vjp
    def passed(h):
        return h

    def forward(h):
        return h, half({"a": a}, x) if calls_itself else None

    passed.defvjp(forward, lambda kept, cotangent: (cotangent,))

    def loss_fn(params, x):
        h = passed(x @ params["a"])
        return jnp.log(h @ params["b"]).mean() if "b" in params else jnp.mean(h**2)

    half = gs.autocast(loss_fn)
    program = jax.make_jaxpr(jax.grad(half))({"a": a, "b": b}, x)
    dtypes = [eqn.outvars[0].aval.dtype.name for eqn in products_in(program)]
    # Those of both calls come first: of x with "a". The logarithm gets a float32 result.
    first = ["float16"] * (1 + calls_itself)
    assert dtypes == [*first, "float32", "float32", "float32", "float16"]
