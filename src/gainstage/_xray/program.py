"""The program of a step (loss and gradients): a jaxpr with named arguments and results."""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gainstage._base._jax import ClosedJaxpr
from gainstage._base.arrays import ARRAYS, is_key, joined, partition
from gainstage._variables.types import PyTree
from gainstage._xray.numbers import has_floats
from gainstage.transforms.value_and_grad import LossFunction


class Program(NamedTuple):
    """A step. Its first argument is the loss scale, its first result the loss."""

    jaxpr: ClosedJaxpr  # as `jax.make_jaxpr` returns it
    arguments: list[jax.Array]  # without the scale
    names: list[str]  # of the arguments
    is_parameter: list[bool]  # whether the loss is differentiated with respect to it
    gradients: list[str]  # the names of the results after the loss
    is_finite: Callable[..., jax.Array]  # of the scale and the arguments: the compiled program


def program_of(loss: LossFunction, args: Sequence[Any], argnums: int | Sequence[int]) -> Program:
    """Traces the loss and its gradients.

    Args:
        loss: what is differentiated.
        argnums: as for `gainstage.value_and_grad`.
        args: the arguments of the loss. Leaves that are not arrays are constants.
    """
    chosen = {n % max(len(args), 1) for n in np.atleast_1d(argnums).tolist()}
    words = _argument_names(loss.fun, len(args))
    names, is_parameter = [], []
    # A number in the batch is an argument; one inside a model, such as a dropout rate, is not.
    args = tuple(jnp.asarray(x) if type(x) in (float, complex) else x for x in args)
    arrays, static = partition(args)
    leaves, _ = jax.tree_util.tree_flatten_with_path(args)
    for path, leaf in [(path, leaf) for path, leaf in leaves if isinstance(leaf, ARRAYS)]:
        number = path[0].idx
        is_parameter.append(number in chosen and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))
        own = is_parameter[-1] and len(chosen) == 1
        names.append(_parameter_name(path[1:], words[number], own))
    arrays = [x if is_key(x) else jnp.asarray(x) for x in arrays]

    def step(scale: jax.Array, arrays: list[jax.Array]) -> tuple[jax.Array, PyTree]:
        backward = loss.backward_at(scale, static.combine(arrays), argnums=argnums)
        return backward.loss, backward.grads

    jaxpr, (_, shapes) = jax.make_jaxpr(step, return_shape=True)(jnp.float32(1), arrays)
    paths = jax.tree_util.tree_flatten_with_path(shapes)[0]
    first = words[min(chosen, default=0)]
    gradients = [_parameter_name(path, first, True) for path, _ in paths]

    def is_finite(scale: jax.Array, arrays: list[jax.Array]) -> jax.Array:
        outs = [x for x in jax.tree.leaves(step(scale, arrays)) if has_floats(x)]
        return jnp.stack([jnp.isfinite(x).all() for x in outs]).all()

    return Program(jaxpr, arrays, names, is_parameter, gradients, jax.jit(is_finite))


def _parameter_name(path: Sequence[Any], argument: str, is_own: bool) -> str:
    """The path of a parameter; for a list of arrays, and other arguments, with the argument."""
    keys = joined(path)
    return keys if is_own and re.search("[a-zA-Z]", keys) else joined(path, argument)


def _argument_names(loss_fn: Callable[..., Any], count: int) -> list[str]:
    """The names of a function's arguments, if they are known."""
    try:
        known = [
            p.name
            for p in inspect.signature(loss_fn).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        known = []
    return [known[i] if i < len(known) else f"args[{i}]" for i in range(count)]
