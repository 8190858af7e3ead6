"""The dtype that `gs.autocast` gives each operation: the lists of `docs/operations.md`.

Each function is called with the result of a product, which is in half precision, and traced under
`gs.autocast`. The dtypes are those of the equations that it is made of in that program, so the page
says what is computed and not what somebody remembers.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

import gainstage as gs
from benchmarks.harness import between_marks

PAGE = Path(__file__).parents[1] / "docs" / "operations.md"
Function = Callable[[jax.Array, jax.Array], Any]
X, W, FACTOR = jnp.ones((128, 64)), jnp.ones((64, 64)), jnp.ones(64)
IMAGES, FILTERS = jnp.ones((2, 16, 16, 8)), jnp.ones((3, 3, 8, 16))
LABELS = jnp.arange(128) % 64
# What only moves numbers, or changes how they are written, is in the dtype of what it moves.
WRITTEN = {
    "convert_element_type",
    "broadcast_in_dim",
    "reshape",
    "squeeze",
    "copy",
    "stop_gradient",
}


def attention(x: jax.Array, _: jax.Array) -> jax.Array:
    """Attention of one head."""
    heads = x[None, :, None]
    return jax.nn.dot_product_attention(heads, heads, heads)


def layer_norm(x: jax.Array, factor: jax.Array) -> jax.Array:
    """A layer normalisation as libraries write it."""
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-6) * factor + factor


def cross_entropy(x: jax.Array, _: jax.Array) -> jax.Array:
    """The loss of labels."""
    return -jnp.take_along_axis(jax.nn.log_softmax(x), LABELS[:, None], 1).mean()


# What a user calls, by its name: a function of the result of a product, and of a parameter.
FUNCTIONS: dict[str, Function] = {
    "`x + bias`": lambda x, p: x + p,
    "`x * factor` of a parameter": lambda x, p: x * p,
    "`x + y`, `x * y` of two results": lambda x, p: x + x * jnp.tanh(x),
    "`jax.nn.relu`": lambda x, p: jax.nn.relu(x),
    "`jax.nn.leaky_relu`": lambda x, p: jax.nn.leaky_relu(x),
    "`jnp.tanh`": lambda x, p: jnp.tanh(x),
    "`jax.nn.sigmoid`": lambda x, p: jax.nn.sigmoid(x),
    "`jax.nn.silu`": lambda x, p: jax.nn.silu(x),
    "`jax.nn.gelu`": lambda x, p: jax.nn.gelu(x),
    "`jnp.maximum`, `jnp.minimum`": lambda x, p: jnp.minimum(jnp.maximum(x, -1.0), jnp.tanh(x)),
    "`jnp.clip`": lambda x, p: jnp.clip(x, -1, 1),
    "`jnp.where`": lambda x, p: jnp.where(x > 0, x, 0.0),
    "`jnp.abs`": lambda x, p: jnp.abs(x),
    "`jnp.transpose`, slices, `jnp.pad`": lambda x, p: jnp.pad(x.T[1:], 1),
    "`jnp.concatenate`": lambda x, p: jnp.concatenate([x, x]),
    "`x[indices]`, `jnp.take`": lambda x, p: x[LABELS],
    "`jnp.max`, `jnp.argmax`": lambda x, p: x.max(-1),
    "`jnp.exp`": lambda x, p: jnp.exp(x),
    "`jnp.log`, `jnp.log1p`": lambda x, p: jnp.log1p(x),
    "`jnp.sin`, `jnp.cos`": lambda x, p: jnp.sin(x),
    "`jax.nn.softplus`": lambda x, p: jax.nn.softplus(x),
    "`jnp.sqrt`, `jax.lax.rsqrt`": lambda x, p: jax.lax.rsqrt(x),
    "`x ** 2`, `jnp.square`": lambda x, p: x**2,
    "`x ** 3`": lambda x, p: x**3,
    "`x / y`": lambda x, p: x / (x + 2),
    "`jnp.sum`, `jnp.mean`": lambda x, p: x.mean(0),
    "`jnp.var`, `jnp.std`": lambda x, p: x.std(0),
    "`jnp.prod`": lambda x, p: x.prod(0),
    "`jnp.cumsum`": lambda x, p: jnp.cumsum(x, 0),
    "`jnp.linalg.norm`": lambda x, p: jnp.linalg.norm(x, axis=-1),
    "`jax.scipy.special.logsumexp`": lambda x, p: jax.scipy.special.logsumexp(x, -1),
    "`jax.nn.softmax`": lambda x, p: jax.nn.softmax(x),
    "`jax.nn.log_softmax`": lambda x, p: jax.nn.log_softmax(x),
    "a cross entropy of logits": cross_entropy,
    "a layer normalisation": layer_norm,
    "`jax.nn.dot_product_attention`, by XLA": attention,
    "`jnp.linalg.solve`, `inv`, `cholesky`": lambda x, p: jnp.linalg.inv(x[:64] + jnp.eye(64)),
    "`jnp.fft.rfft`": lambda x, p: jnp.abs(jnp.fft.rfft(x)),
    "`jax.lax.cumlogsumexp`": lambda x, p: jax.lax.cumlogsumexp(x, 0),
}
# A product of a parameter and of data.
PRODUCTS: dict[str, tuple[Function, jax.Array, jax.Array]] = {
    "`x @ w`, `jnp.dot`, `jnp.einsum`": (lambda w, x: x @ w, W, X),
    "`jax.lax.conv_general_dilated`": (
        lambda w, x: jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        FILTERS,
        IMAGES,
    ),
    "a product whose result has at most 8 columns": (lambda w, x: x @ w, W[:, :8], X),
    "a product of small matrices, such as 8 x 32 x 8": (lambda w, x: x @ w, W[:32, :8], X[:8, :32]),
    '`jnp.dot(x, w, precision="highest")`': (
        lambda w, x: jnp.dot(x, w, precision="highest"),
        W,
        X,
    ),
}


def dtypes_of(function: Function) -> list[str]:
    """The dtypes that a function computes in, after a product and under autocast."""

    width = jax.eval_shape(function, X @ W, FACTOR).shape[-1:] or (1,)
    params = {"w": W, "factor": FACTOR, "next": jnp.ones((*width, 64))}

    def called(params: dict[str, jax.Array], x: jax.Array) -> Any:
        found = function(x @ params["w"], params["factor"])
        return found.reshape(-1, *width) @ params["next"]  # as in a network

    program = jax.make_jaxpr(gs.autocast(called))(params, X).jaxpr
    alone = jax.make_jaxpr(function)(X @ W, FACTOR).jaxpr
    names = {eqn.primitive.name for eqn in _equations(alone)} - WRITTEN
    each = [e for e in _equations(program) if e.primitive.name in names and not _programs(e)]
    outs = [v.aval.dtype for eqn in each for v in eqn.outvars]
    return sorted({str(dtype) for dtype in outs if jnp.issubdtype(dtype, jnp.inexact)})


def product(function: Function, w: jax.Array, x: jax.Array) -> str:
    """The dtypes of the operands and of the result of a product under autocast."""
    program = jax.make_jaxpr(gs.autocast(function))(w, x).jaxpr
    names = {"dot_general", "conv_general_dilated"}
    (eqn,) = [eqn for eqn in _equations(program) if eqn.primitive.name in names]
    dtypes = [str(v.aval.dtype) for v in (eqn.invars[0], eqn.outvars[0])]
    return dtypes[0] if dtypes[0] == dtypes[1] else f"{dtypes[0]}, and its result in {dtypes[1]}"


def _programs(eqn: Any) -> list[Any]:
    return list(jaxprs_in_params(eqn.params))


def _equations(program: Any) -> list[Any]:
    inner = ((eqn, *map(_equations, _programs(eqn))) for eqn in program.eqns)
    return [e for eqn, *parts in inner for e in (eqn, *itertools.chain(*parts))]


def tables() -> str:
    """The lists in Markdown: products, what is computed in half precision, and what is not."""
    lines = ["| product | computed in |", "|---|---|"]
    lines += [f"| {name} | {product(*given)} |" for name, given in PRODUCTS.items()]
    found = {name: dtypes_of(function) for name, function in FUNCTIONS.items()}
    titles = {
        "In float16, after a product in float16": lambda each: each == ["float16"],
        "In float32": lambda each: "float16" not in each,
        "In both, each part as its list says": lambda each: len(each) > 1 and "float16" in each,
    }
    for title, holds in titles.items():
        names = [name for name, each in found.items() if holds(each)]
        lines += ["", f"**{title}**: {', '.join(names)}."]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the lists, and writes them to the page."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(argv)
    print(tables())
    if options.page.exists():
        options.page.write_text(between_marks(options.page.read_text(), tables(), "operations"))


if __name__ == "__main__":
    main()
