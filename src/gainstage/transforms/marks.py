"""Marks in a traced program, by which `lint` finds loss scales, updates and their gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gainstage._base._jax import trace_ctx
from gainstage._programs.degrees import PREFIX
from gainstage._variables.types import PyTree, Tree


def marked(tree: Tree, name: str, *options: str) -> Tree:
    """The same arrays, which a program that is traced now names so. They compile to the same.

    Args:
        tree: a pytree.
        name: "scale", a loss scale that is read; "unscaled", true gradients of a loss without one;
            "state", the scale of the state of an update; "new", that after it; "gradient", what it
            gets; "by", what it divides by; "own", a gradient of a loss that scales itself;
            "grad_fn", what such a function returns to a transformation; "summed", gradients that
            JAX sums over devices, with these axes as its option; "taken", the decision in the state
            of an update; "decision", one that is asked for; "extra", what a loss has changed, with
            what tells a state and a batch from others as its options.
        options: what else is to be known of it.
    """
    if trace_ctx.is_top_level():
        return tree
    words = ",".join((PREFIX + name, *options))
    return jax.tree.map(
        lambda x: (
            checkpoint_name(x, words)
            if isinstance(x, jax.Array)  # of numbers: integers and keys have no mark
            and (jnp.issubdtype(x.dtype, jnp.inexact) or x.dtype == jnp.bool_)
            else x
        ),
        tree,
    )


def marked_extra(extra: Tree, state: PyTree, batch: PyTree) -> Tree:
    """What a loss has changed, marked with the state and the batch that it was called with."""
    words = (str(hash(tuple(map(id, jax.tree.leaves(tree))))) for tree in (state, batch))
    return marked(extra, "extra", *words)


def marked_function(fun: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function for a transformation, whose result is marked."""
    return lambda *args, **kwargs: marked(fun(*args, **kwargs), name)
