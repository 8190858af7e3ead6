"""The page about kernels: on a GPU each of its recipes calls cuDNN in half precision."""

import functools
import re

import cudnn_on_a_cpu as cudnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from docs.pages import BLOCK, DOCS

import gainstage as gs

pytestmark = pytest.mark.repo
BOTH_WAYS = [["f16"] * 3] * 2  # forward and backward


def error(found, exact):
    """The distance of gradients, relative to the norm of the second."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    both = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    squares = [(np.sum((a - b) ** 2), np.sum(b**2)) for a, b in both]
    return float(np.sqrt(sum(s[0] for s in squares) / sum(s[1] for s in squares)))


@pytest.fixture
def page(monkeypatch):
    """What the page defines, where the checks of a GPU hold and cuDNN's calls run on this CPU."""
    pytest.importorskip("flax")
    pytest.importorskip("equinox")
    cudnn.use(monkeypatch)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    scope = {"__name__": "docs"}
    for code, _ in re.findall(BLOCK, (DOCS / "kernels.md").read_text(), re.DOTALL):
        exec(code, scope)
    return scope


def test_the_first_block(page):
    """The loss of plain JAX."""
    loss_fn, x = page["loss_fn"], page["x"]
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        name: jax.random.normal(key, (64, 64)) / 8
        for name, key in zip(("q", "k", "v", "out"), keys, strict=True)
    }
    half = jax.grad(gs.autocast(loss_fn))
    assert cudnn.dtypes_of_calls(half, params, x) == BOTH_WAYS
    assert error(half(params, x), jax.grad(loss_fn)(params, x)) < 2e-3


def test_nnx(page):
    """A block with `nnx.MultiHeadAttention`, beside one with NNX's own function."""
    from flax import nnx

    block, plain = (page["Block"](nnx.Rngs(0)) for _ in range(2))
    plain.attention.attention_fn = nnx.dot_product_attention
    graph, params = nnx.split(block)
    half = gs.autocast(page["block_loss"])

    def loss(params, x):
        return half(nnx.merge(graph, params), x)

    assert cudnn.dtypes_of_calls(jax.grad(loss), params, page["x"]) == BOTH_WAYS
    exact = nnx.grad(page["block_loss"])(plain, page["x"])
    assert error(nnx.grad(half)(block, page["x"]), exact) < 2e-3


@pytest.mark.parametrize("masked", [False, True])
def test_linen(page, masked):
    """`linen.MultiHeadDotProductAttention`, with one of Flax's masks and without."""
    from flax import linen

    x = page["x"]
    mask = linen.make_causal_mask(jnp.ones(x.shape[:2])) if masked else None
    own = linen.MultiHeadDotProductAttention(4, attention_fn=page["attention_fn"])
    plain = linen.MultiHeadDotProductAttention(4)
    params = own.init(jax.random.key(0), x)

    def loss(layer, params):
        return jnp.mean((layer.apply(params, x, mask=mask) - 1) ** 2)

    half = jax.grad(gs.autocast(functools.partial(loss, own)))
    assert cudnn.dtypes_of_calls(half, params) == BOTH_WAYS
    assert error(half(params), jax.grad(functools.partial(loss, plain))(params)) < 2e-3


def test_equinox(page):
    """The projections of `eqx.nn.MultiheadAttention`, beside the layer itself."""
    import equinox as eqx

    x = page["x"]
    layer = eqx.nn.MultiheadAttention(4, 64, key=jax.random.key(0))
    causal = np.tril(np.ones((x.shape[1], x.shape[1]), bool))

    def exact(layer, x):
        return jnp.mean((jax.vmap(lambda row: layer(row, row, row, causal))(x) - 1) ** 2)

    def own(layer, x):
        return page["block_loss"](page["Attention"](layer), x)

    half = gs.autocast(own)
    arrays, static = eqx.partition(layer, eqx.is_array)

    def loss(arrays, x):
        return half(eqx.combine(arrays, static), x)

    assert cudnn.dtypes_of_calls(jax.grad(loss), arrays, x) == BOTH_WAYS
    assert error(eqx.filter_grad(half)(layer, x), eqx.filter_grad(exact)(layer, x)) < 2e-3


def test_dropout_is_refused(page):
    """A layer with dropout does not train without it in silence."""
    from flax import nnx

    options = {"decode": False, "attention_fn": page["attention_fn"], "rngs": nnx.Rngs(0)}
    layer = nnx.MultiHeadAttention(4, 64, dropout_rate=0.1, **options)
    with pytest.raises(ValueError, match="no dropout"):
        layer(page["x"], deterministic=False)
    assert layer(page["x"], deterministic=True).shape == page["x"].shape


def test_a_library_that_chooses_a_kernel_by_itself():
    """As Tokamax: in float32 it takes a slower way without a word, under `half_only` the kernel."""
    taken = []

    def mosaic(query, key, value):  # in place of Tokamax's kernel for a GPU
        if query.dtype not in (jnp.float16, jnp.bfloat16):
            raise NotImplementedError("Only f16 and bf16 supported")
        taken.append("kernel")
        weights = jax.nn.softmax((query @ key.mT).astype(jnp.float32))
        return weights.astype(value.dtype) @ value

    def xla(query, key, value):
        taken.append("XLA")
        return jax.nn.softmax(query @ key.mT) @ value

    def dot_product_attention(query, key, value, *, implementation=None):
        for each in (mosaic, xla) if implementation is None else (implementation,):
            try:
                return each(query, key, value)
            except NotImplementedError:
                continue
        raise NotImplementedError

    def loss(attend, x):
        return jnp.mean(attend(x, x, x) ** 2)

    x = jax.random.normal(jax.random.key(0), (2, 8, 8))
    exact = jax.grad(functools.partial(loss, dot_product_attention))(x)
    jax.grad(gs.autocast(functools.partial(loss, dot_product_attention)))(x)
    assert set(taken) == {"XLA"}
    attend = gs.half_only(dot_product_attention)
    found = jax.grad(gs.autocast(functools.partial(loss, attend)))(x)
    assert taken[-1] == "kernel"
    assert error(found, exact) < 2e-3
    taken.clear()
    attend(x, x, x)
    assert taken == ["XLA"]
