"""Gradients of a function on some batches, in any precision."""

import contextlib
import copy
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gainstage._base import checks
from gainstage._base.arrays import Static, joined, partition
from gainstage._scaling import gradients
from gainstage._variables.types import PyTree
from gainstage.precision.autocast import plan_of
from gainstage.transforms.retrace import IS_KEPT
from gainstage.transforms.value_and_grad import LossFunction

MOST_SHOWN = 4  # arrays of a batch in an error
MIN_BATCHES = 2  # batches: from one, noise and bias cannot be told apart
FIRST_EXPONENT, EXPONENTS = 15, 3  # of the loss scale that is tried first, and between two
CALLS_ALIKE = 1e-3  # the largest relative difference of two losses of one batch

# `(batch, loss scale) -> [loss, *gradients]`
GradientsOf = Callable[[int, float], list[np.ndarray]]


def samples_of(
    loss: LossFunction,
    params: PyTree,
    batches: Sequence[Any],
    fewest: int = MIN_BATCHES,
) -> "Samples":
    """A float32 function on some batches.

    Args:
        loss: a function `(params, *batch)`, and how it is differentiated.
        params: its first argument, a pytree or a model.
        batches: a list of batches, each the tuple of what it takes after the parameters.
        fewest: the number of batches that is needed.

    Raises:
        TypeError, ValueError: it is under autocast, there are too few batches, they are not what it
            takes, or they differ in structure or shapes.
    """
    fun = loss.fun
    if not callable(fun):
        raise TypeError(f"Expected a function for fun; got {checks.brief(fun)}.")
    if plan_of(fun) is not None:
        raise ValueError(
            f"Expected a float32 function for fun; got {fun!r}, which is under autocast "
            f"already. Pass the function that autocast was given: fun.__wrapped__."
        )
    if not partition(params)[0]:
        raise TypeError(
            f"Expected parameters with arrays for params; got {checks.brief(params)}. The order is "
            f"(loss_fn, params, batches)."
        )
    if not isinstance(batches, Sequence) or isinstance(batches, (str, tuple)):
        raise TypeError(
            f"Expected a list of batches, such as [(x1, y1), (x2, y2)]; got "
            f"{checks.brief(batches)}."
        )
    if len(batches) < fewest:
        raise ValueError(
            f"Expected at least {fewest} batches; got {len(batches)}. Noise is what differs "
            f"between batches, and bias is what does not: one batch shows neither."
        )
    _check_batches(fun, params, batches)
    return Samples(loss, [(params, *batch) for batch in batches])


class Samples:
    """A function, and its arguments in some calls, one for each batch.

    Args:
        loss: the function, and how it is differentiated.
        calls: the arguments of each call.
    """

    def __init__(self, loss: LossFunction, calls: Sequence[tuple[Any, ...]]):
        self.loss: LossFunction = loss
        self.fun: Callable[..., Any] = loss.fun
        self.names: list[str] = []  # of the gradients, once they are computed
        split = [partition(args) for args in calls]
        self.arrays: list[list[Any]] = [arrays for arrays, _ in split]
        self.static: Static = split[0][1]
        self.parameters: int = len(partition(calls[0][:1])[0])  # arrays of the first argument
        for number, (arrays, static) in enumerate(split[1:], 1):
            if static != self.static or _shapes(arrays) != _shapes(self.arrays[0]):
                every = [_shapes(self.arrays[i])[self.parameters :] for i in (number, 0)]
                pairs = list(itertools.zip_longest(*every))
                some = [pair for pair in pairs if pair[0] != pair[1]][:MOST_SHOWN]
                other, first = (", ".join(map(_as_text, side)) for side in zip(*some, strict=True))
                both = f": {other}, for {first}" if some else ", in what is no array"
                raise ValueError(
                    f"Expected batches of one structure and of the same shapes; batch {number} "
                    f"differs from batch 0{both}. Leave a last, shorter batch out."
                )

    def __len__(self) -> int:
        return len(self.arrays)

    def of(self, fun: Callable[..., Any]) -> "Samples":
        """The same arguments of another function."""
        other = copy.copy(self)
        other.fun, other.loss = fun, self.loss._replace(fun=fun)
        return other

    def of_arrays(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """The loss of a function as one of lists of the arrays in its arguments. Other leaves, as
        of Equinox's models, are not traced."""

        def loss(*arrays: Sequence[Any]) -> Any:
            args = self.args([*itertools.chain(*arrays)])
            return self.loss.parts(fun(*args), args)[0]

        return loss

    def args(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments of the function, of which some arrays may be traced."""
        return self.static.combine(arrays)

    def gradients_of(
        self, fun: Callable[..., Any], scale: jax.Array, arrays: Sequence[Any]
    ) -> list[jax.Array]:
        """The loss and the gradients of a function at a loss scale, in float32."""
        args = self.args(arrays)
        backward = self.loss._replace(fun=fun).backward_at(scale, args)
        grads = gradients.unscale(backward.grads, scale)
        leaves = jax.tree_util.tree_flatten_with_path(grads)[0]
        found = {joined(path): g for path, g in leaves if jnp.issubdtype(g.dtype, jnp.floating)}
        self.names = list(found)
        return [backward.loss, *found.values()]

    def trace(self) -> None:
        """Traces the loss on the first batch."""
        jax.eval_shape(self.of_arrays(self.fun), self.arrays[0])

    def compiled(self, fun: Callable[..., Any], *, is_exact: bool = False) -> GradientsOf:
        """A function `(number of a batch, loss scale) -> [loss, *gradients]`.

        Args:
            fun: what is differentiated.
            is_exact: whether all is in float32, with products at the highest precision. By default
                a GPU rounds their operands to TF32, and a TPU to bfloat16.
        """
        program = jax.jit(lambda scale, arrays: self.gradients_of(fun, scale, arrays))

        def run(number: int, scale: float) -> list[np.ndarray]:
            exact = contextlib.ExitStack()
            if is_exact:
                exact.enter_context(exact_products())
                exact.enter_context(IS_KEPT(True))
            with exact:
                return jax.device_get(program(jnp.float32(scale), self.arrays[number]))

        return run

    def exact(self) -> list[list[np.ndarray]]:
        """The losses and gradients of all batches in float32, with exact products.

        Raises:
            ValueError: one is not finite, all are 0, or two calls with one batch differ.
        """
        run = self.compiled(self.fun, is_exact=True)
        each = [run(number, 1.0) for number in range(len(self))]
        for number, results in enumerate(each):
            if not is_finite(results):
                raise ValueError(
                    f"Expected a function whose loss and gradients are finite in float32; got a "
                    f"loss of {float(results[0])} on batch {number}. Look for the cause: "
                    f"gainstage.xray(fun, params, *batch, scale=1.0)."
                )
        if not any(np.any(g) for results in each for g in results[1:]):
            raise ValueError(
                "Expected a loss that depends on the parameters; its gradient is 0 on each batch."
            )
        # Traced again: what `numpy.random` draws in a trace is a constant of the program.
        with exact_products(), IS_KEPT(True):
            again = float(jax.jit(self.of_arrays(self.fun))(self.arrays[0]))
        if abs(again - float(each[0][0])) > CALLS_ALIKE * max(abs(again), 1e-30):
            raise ValueError(
                f"Expected the same loss from two calls with one batch; got {float(each[0][0])} "
                f"and {again}. Draw random numbers from a key among the arguments, and pass the "
                f"same key with each batch."
            )
        return each


def exact_products() -> contextlib.AbstractContextManager[Any]:
    """The context of what others are compared with: float32 products are not rounded in it."""
    return jax.default_matmul_precision("highest")


def are_products_rounded() -> bool:
    """Whether this device rounds the operands of float32 products, unless it is told not to."""
    x = jnp.linspace(1, 2, 256 * 256).reshape(256, 256)
    return bool(jnp.any(jnp.dot(x, x) != jnp.dot(x, x, precision="highest")))


def largest_exponent(fits: Callable[[int], bool], last: int = FIRST_EXPONENT) -> int:
    """The exponent of the largest loss scale that fits, in steps of three from `2**0` to `2**last`;
    0 if none does."""
    exponent = FIRST_EXPONENT
    if fits(exponent):
        while exponent < last and fits(exponent + EXPONENTS):
            exponent += EXPONENTS
        return exponent
    while exponent > 0 and not fits(exponent):
        exponent -= EXPONENTS
    return exponent


def is_finite(results: Sequence[Any]) -> bool:
    """Whether a loss and gradients are finite."""
    return all(bool(np.isfinite(x).all()) for x in results)


def _check_batches(fun: Callable[..., Any], params: PyTree, batches: Sequence[Any]) -> None:
    """Raises a TypeError for a batch that is not the tuple of what a function takes after its
    parameters."""
    try:
        signature = inspect.signature(fun)
    except ValueError:  # of a function in C
        return
    for batch in batches:
        got = type(batch).__name__
        if type(batch) is tuple:  # a named tuple is one argument
            try:
                signature.bind(params, *batch)
                continue
            except TypeError:
                got = f"a tuple of {len(batch)}"
        raise TypeError(
            f"Expected each batch as the tuple of what fun takes after the parameters, such as "
            f"[(x1, y1), (x2, y2)], or [(x1,), (x2,)] for one argument; got {got}, for a fun with "
            f"the arguments {', '.join(signature.parameters)}."
        )


def _as_text(array: tuple[Any, Any] | None) -> str:
    """A shape and a dtype, as in JAX."""
    return "nothing" if array is None else f"{array[1]}{list(array[0])}"


def _shapes(arrays: Sequence[Any]) -> list[tuple[Any, Any]]:
    return [(np.shape(x), getattr(x, "dtype", type(x).__name__)) for x in arrays]
