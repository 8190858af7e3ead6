"""Gradients of a function on some batches, in any precision."""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gainstage._base import checks
from gainstage._base.arrays import Static, joined, partition
from gainstage._scaling import gradients
from gainstage._variables.types import PyTree, Using
from gainstage.precision.autocast import plan_of
from gainstage.transforms.value_and_grad import scaled_value_and_grad

MOST_SHOWN = 4  # arrays of a batch in an error
MIN_BATCHES = 2  # batches: from one, noise and bias cannot be told apart
POSITIONAL = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
FIRST_EXPONENT, EXPONENTS = 15, 3  # of the loss scale that is tried first, and between two
CALLS_ALIKE = 1e-3  # the largest relative difference of two losses of one batch

# `(batch, loss scale) -> [loss, *gradients]`
GradientsOf = Callable[[int, float], list[np.ndarray]]


def samples_of(
    fun: Callable[..., Any],
    params: PyTree,
    batches: Sequence[Any],
    has_aux: bool,
    using: Using | None,
    fewest: int = MIN_BATCHES,
) -> "Samples":
    """A float32 function on some batches.

    Args:
        fun: a function `(params, *batch)` that returns a scalar loss, or (loss, aux).
        params: its first argument, a pytree or a model.
        batches: a sequence of batches. A tuple holds the arguments of `fun` behind the parameters,
            if it takes several; anything else is one argument.
        has_aux, using: as for `gainstage.value_and_grad`.
        fewest: the number of batches that is needed.

    Raises:
        TypeError, ValueError: `fun` is under autocast, there are too few batches, they are not what
            `fun` takes, or they differ in structure or shapes.
    """
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
    is_apart = _is_apart(fun, params, batches[0])
    calls = [(params, *batch) if is_apart else (params, batch) for batch in batches]
    return Samples(fun, calls, has_aux, using)


class Samples:
    """A function, and its arguments in some calls, one for each batch."""

    def __init__(
        self,
        fun: Callable[..., Any],
        calls: Sequence[tuple[Any, ...]],
        has_aux: bool,
        using: Using | None,
    ):
        self.fun: Callable[..., Any] = fun
        self.has_aux: bool = has_aux
        self.names: list[str] = []  # of the gradients, once they are computed
        self._using = using
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
                    f"differs from batch 0{both}. Several arguments are a tuple: "
                    f"batches=[(x1, y1), (x2, y2)]. Leave a last, shorter batch out."
                )

    def __len__(self) -> int:
        return len(self.arrays)

    def of_arrays(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the arrays in the arguments, `(those of the parameters, the others)`, that
        returns the loss. Other leaves, as of Equinox's models, are not traced."""

        def loss(own: Sequence[Any], others: Sequence[Any]) -> Any:
            result = fun(*self.args([*own, *others]))
            return result[0] if self.has_aux else result

        return loss

    def args(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments of the function, of which some arrays may be traced."""
        return self.static.combine(arrays)

    def gradients_of(
        self, fun: Callable[..., Any], scale: jax.Array, arrays: Sequence[Any]
    ) -> list[jax.Array]:
        """The loss and the gradients of a function at a loss scale, in float32."""
        args = self.args(arrays)
        differentiate = scaled_value_and_grad(fun, scale, self.has_aux, self._using, args)
        (_, (loss, _)), grads = differentiate(*args)
        leaves = jax.tree_util.tree_flatten_with_path(gradients.unscale(grads, scale))[0]
        found = {joined(path): g for path, g in leaves if jnp.issubdtype(g.dtype, jnp.floating)}
        self.names = list(found)
        return [loss, *found.values()]

    def compiled(self, fun: Callable[..., Any]) -> GradientsOf:
        """A function `(number of a batch, loss scale) -> [loss, *gradients]`."""
        program = jax.jit(lambda scale, arrays: self.gradients_of(fun, scale, arrays))

        def run(number: int, scale: float) -> list[np.ndarray]:
            return jax.device_get(program(jnp.float32(scale), self.arrays[number]))

        return run

    def exact(self) -> list[list[np.ndarray]]:
        """The losses and gradients of all batches in float32.

        Raises:
            ValueError: one is not finite, all are 0, or two calls with one batch differ.
        """
        run = self.compiled(self.fun)
        found = [run(number, 1.0) for number in range(len(self))]
        for number, results in enumerate(found):
            if not is_finite(results):
                raise ValueError(
                    f"Expected a function whose loss and gradients are finite in float32; got a "
                    f"loss of {float(results[0])} on batch {number}. Look for the cause: "
                    f"gainstage.diagnostics.xray(fun, params, *batch), or batch if it is one "
                    f"argument."
                )
        if not any(np.any(g) for results in found for g in results[1:]):
            raise ValueError(
                "Expected a loss that depends on the parameters; its gradient is 0 on each batch."
            )
        # Traced again: what `numpy.random` draws in a trace is a constant of the program.
        result = jax.jit(lambda arrays: self.fun(*self.args(arrays)))(self.arrays[0])
        again = float(result[0] if self.has_aux else result)
        if abs(again - float(found[0][0])) > CALLS_ALIKE * max(abs(again), 1e-30):
            raise ValueError(
                f"Expected the same loss from two calls with one batch; got {float(found[0][0])} "
                f"and {again}. Draw random numbers from a key among the arguments, and pass the "
                f"same key with each batch."
            )
        return found


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


def _is_apart(fun: Callable[..., Any], params: PyTree, batch: Any) -> bool:
    """Whether the elements of a batch are the arguments of a function behind its parameters; else
    the batch is one argument."""
    is_tuple = isinstance(batch, tuple)
    try:
        every = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return is_tuple and not hasattr(batch, "_fields")
    own = every[every[0].kind is not inspect.Parameter.VAR_POSITIONAL :] if every else []
    takes = [q for q in own if q.kind in POSITIONAL]
    needed = [q for q in takes if q.default is q.empty]
    takes_any = any(q.kind is q.VAR_POSITIONAL for q in own)
    _refuse_names(own, needed, takes_any, batch)
    if not is_tuple:
        if len(needed) > 1:
            names = ", ".join(q.name for q in needed)
            raise TypeError(
                f"Expected each batch as a tuple of the arguments ({names}); got "
                f"{type(batch).__name__}. Write batches=[({names}), ...]."
            )
        return False
    if takes_any or (len(batch) <= 1 and not hasattr(batch, "_fields")):
        return not hasattr(batch, "_fields")
    if len(needed) < 2 and (len(takes) < 2 or len(batch) > len(takes)):
        return False
    if not len(needed) <= len(batch) <= len(takes):
        names = ", ".join(q.name for q in takes)
        raise TypeError(
            f"Expected each batch as a tuple of the arguments ({names}); got a tuple of "
            f"{len(batch)}."
        )
    return len(needed) > 1 or _is_apart_by_trial(fun, params, batch, [q.name for q in takes])


def _refuse_names(
    own: Sequence[inspect.Parameter],
    needed: Sequence[inspect.Parameter],
    takes_any: bool,
    batch: Any,
) -> None:
    """Raises a TypeError if a function takes a batch by names, with the line to write."""
    by_name = [q.name for q in own if q.kind is q.KEYWORD_ONLY and q.default is q.empty]
    takes_all = any(q.kind is q.VAR_KEYWORD for q in own)
    keys = [key for key in batch if isinstance(key, str)] if isinstance(batch, Mapping) else []
    names = [q.name for q in needed]
    # A dict with more than one name is no single argument of a function with just those names.
    are_names = len(keys) > 1 and {*names, *by_name} <= {*keys} <= {q.name for q in own}
    has_place = takes_any or any(q.kind in POSITIONAL for q in own)
    if keys and (are_names or len(names) > 1 or by_name or (takes_all and not has_place)):
        raise TypeError(
            f"Expected a function that takes a dict with {keys} as one argument; got one that "
            f"takes {', '.join(names + by_name) or 'them'} by name. Write "
            f"fun=lambda params, batch: loss_fn(params, **batch)."
        )
    if by_name:
        given = ", ".join([*names, *(f"{name}={name}" for name in by_name)])
        raise TypeError(
            f"Expected a function that takes the elements of a batch in order; got one that takes "
            f"{', '.join(by_name)} by name alone. Write "
            f"fun=lambda params, {', '.join(names + by_name)}: loss_fn(params, {given})."
        )


def _is_apart_by_trial(
    fun: Callable[..., Any], params: PyTree, batch: tuple[Any, ...], names: Sequence[str]
) -> bool:
    """Whether a function with optional arguments takes the elements of a batch, or the batch."""
    takes_elements, takes_batch = _runs(fun, (params, *batch)), _runs(fun, (params, batch))
    if takes_elements and takes_batch:
        raise TypeError(
            f"Expected a function that takes each batch in one way; got one that takes the tuple "
            f"as {names[0]}, and also its elements as {', '.join(names[: len(batch)])}. Write "
            f"fun=lambda params, batch: loss_fn(params, *batch), or loss_fn(params, batch)."
        )
    return not takes_batch


def _runs(fun: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a function can be traced on some arguments."""
    arrays, static = partition(args)
    try:
        jax.eval_shape(lambda arrays: fun(*static.combine(arrays)), arrays)
    except Exception:  # whatever the user's code raises
        return False
    return True


def _as_text(array: tuple[Any, Any] | None) -> str:
    """A shape and a dtype, as in JAX."""
    return "nothing" if array is None else f"{array[1]}{list(array[0])}"


def _shapes(arrays: Sequence[Any]) -> list[tuple[Any, Any]]:
    return [(np.shape(x), getattr(x, "dtype", type(x).__name__)) for x in arrays]
