"""Losses that scale their own gradients, for trainers that differentiate by themselves."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from gainstage._base import checks
from gainstage._base._jax import ClosedJaxpr, is_differentiated
from gainstage._base.checks import SMALLEST, brief
from gainstage._base.warn import warn
from gainstage._programs import jaxprs
from gainstage._programs.scopes import SELF_SCALED
from gainstage._programs.true_cotangents import loss_times
from gainstage._scaling import gradients
from gainstage._scaling.finite_check import all_finite
from gainstage._scaling.retry_loop import BACKOFF, Attempt, try_again
from gainstage._variables.sharding import on_all_devices, varying_like
from gainstage._variables.types import P, PyTree, R
from gainstage.transforms.marks import marked
from gainstage.transforms.needs_scale import is_for_scale
from gainstage.transforms.retrace import IS_KEPT, traced

RETRIES = 8


def self_scaled(
    loss_fn: Callable[P, R], scale: float = 2.0**15, *, retries: int = RETRIES
) -> Callable[P, R]:
    """Returns the same loss, whose backward pass is scaled: true values and true gradients.

    A trainer that calls `jax.value_and_grad` itself takes it like any other loss. If a gradient is
    not finite, loss and gradients are computed again at a sixteenth of the scale, so an overflow
    costs time but no batch. Nothing is kept for a retry: memory is that of a step without one. On
    a GPU the host reads one bit at each step, to know whether to retry.

    - Wrap the whole loss, with its mean over a batch. Inside of `jax.vmap` or `jax.lax.scan` it
      keeps the gradient of each example.
    - A loss without float16 and float8 needs no scale, and is left as it is.
    - If every step is retried, the scale is too high for it: pass a lower one.
    - It is differentiated once, in reverse mode: JAX refuses `jax.jvp` of it, and in compiled code
      second derivatives.
    - Only the loss has gradients; of (loss, aux), aux has none.
    - What a call changes, such as the running means of an NNX model, is changed by the last try.
    - Inside `jax.shard_map` and `jax.pmap` all devices retry together, or none does.
    - A non-finite loss is not computed again, as it does not depend on the scale. Keep
      `gainstage.with_loss_scale` or `optax.apply_if_finite` around the optimizer, if that may
      happen.

    Use `locally_scaled` for a part of a network, whose result is not a loss.

    Args:
        loss_fn: a function that returns a scalar loss, or a tuple (loss, aux). It takes pytrees and
            models, by position or by name.
        scale: the loss scale at the first try, > 0 and at most `2**126`. A power of two
            causes no rounding.
        retries: the largest number of retries in a step, >= 0.

    Raises:
        TypeError: `loss_fn` is not callable, or `scale` or `retries` is not a number; from the
            call, the loss is not a scalar.
        ValueError: `scale` is out of range, or `retries` is not an integer >= 0.

    Examples:
        >>> from gainstage.transforms.self_scaled import self_scaled
        >>> import jax, jax.numpy as jnp
        >>> def loss_fn(w, x):
        ...     y = w.astype(jnp.float16) * x
        ...     return y.astype(jnp.float32) * 2.0**-10
        >>> w, x = jnp.float32(1.0), jnp.float16(2.0**-15)
        >>> print(jax.grad(loss_fn)(w, x), jax.grad(self_scaled(loss_fn))(w, x))
        0.0 2.9802322e-08

    Source: Micikevicius et al., 2018, arXiv:1710.03740.
    """
    if not callable(loss_fn):
        raise TypeError(f"Expected a function for loss_fn; got {loss_fn!r}.")
    scale = checks.loss_scale("scale", scale)
    return scaled_by_itself(loss_fn, scale, checks.integer("retries", retries, low=0))


def scaled_by_itself(
    loss_fn: Callable[P, R], scale: float | jax.Array, retries: int = RETRIES
) -> Callable[P, R]:
    """`self_scaled`, also for a scale that is traced."""
    if getattr(loss_fn, "is_self_scaled", False):
        return loss_fn

    def run(program: ClosedJaxpr, inputs: Sequence[Any], arguments: PyTree) -> list[Any]:
        arrays = inputs[1:]  # the scale is the first
        if IS_KEPT.value or not is_for_scale(program, inputs):
            unscaled = _varying(jnp.float32(1)), *arrays
            return jaxprs.interpret(
                program, unscaled, lambda eqn, xs, _: jaxprs.bind_shared(eqn, xs)
            )
        halves = [x for x in arrays if is_differentiated(x) and x.dtype == jnp.float16]
        if halves:
            warn(
                f"The gradient of a float16 parameter, here of shape {halves[0].shape}, is float16 "
                f"too, and loses below 6e-8 what loss_scale has kept. Keep parameters in float32, "
                f"and compute in half precision: autocast(loss_fn, loss_scale=2.0**15)."
            )
        loss: Any = program.out_avals[0] if program.out_avals else None
        if loss is None or loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
            raise TypeError(
                f"Expected a scalar loss from loss_fn, or (loss, aux); got {brief(loss)}."
            )
        return _with_own_scale(program, arrays, scale, retries)

    @functools.wraps(loss_fn)
    def of_scale(scale: jax.Array, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with loss_times(scale):
            return loss_fn(*args, **kwargs)

    program_of = traced(of_scale, run, _varying)

    @functools.wraps(loss_fn)
    def scaled(*args: P.args, **kwargs: P.kwargs) -> R:
        return program_of(jnp.float32(scale), *args, **kwargs)

    result: Any = scaled
    result.is_self_scaled = True  # read by `autocast` and `value_and_grad`, which refuse it
    return result


@jax.named_scope(SELF_SCALED)
def _with_own_scale(
    program: ClosedJaxpr, arrays: Sequence[Any], scale: float | jax.Array, retries: int
) -> list[Any]:
    """The results of a program, the first of which is a loss, differentiated as in `self_scaled`.

    Args:
        program: a jaxpr, of the scale and of other arguments.
        arrays: the others.
        scale, retries: as for `self_scaled`.
    """
    closed_over = len(program.consts)  # what it closes over may be differentiated too
    avals: list[Any] = [v.aval for v in (*program.jaxpr.constvars, *program.jaxpr.invars[1:])]

    def results_at(scale: jax.Array, values: Sequence[Any]) -> list[Any]:
        bound = ClosedJaxpr(program.jaxpr, list(values[:closed_over]))
        inputs = _varying(scale), *values[closed_over:]
        return jaxprs.interpret(bound, inputs, lambda eqn, xs, _: jaxprs.bind_shared(eqn, xs))

    differentiable = jax.custom_vjp(lambda *values: results_at(jnp.float32(scale), values))

    def forward(*primals: Any) -> tuple[list[Any], list[Any]]:
        values = [primal.value for primal in primals]
        chosen = [
            i
            for i, primal in enumerate(primals)
            if primal.perturbed and jnp.issubdtype(jnp.result_type(primal.value), jnp.inexact)
        ]

        @functools.partial(jax.jit, inline=True)  # traced once for the retries too
        def at(scale: jax.Array, values: list[Any]) -> tuple[jax.Array, list[Any], list[Any]]:
            def scaled(variables: list[Any]) -> tuple[jax.Array, list[Any]]:
                whole = list(values)
                for i, x in zip(chosen, variables, strict=True):
                    whole[i] = x
                results = results_at(scale, whole)
                return gradients.scaled(results[0], scale), results

            differentiate = jax.value_and_grad(scaled, has_aux=True)
            (_, results), grads = differentiate([values[i] for i in chosen])
            true = marked(gradients.unscale(grads, scale), "own")  # here, where they are computed
            # A lower scale mends no non-finite loss.
            overflowed = ~all_finite(true) & jnp.isfinite(results[0])
            return on_all_devices(~overflowed), results, true

        def tried(scale: jax.Array) -> Attempt:
            finite, *found = at(scale, values)
            return Attempt(~finite, (scale, *found))

        def again(found: tuple[Any, ...]) -> Attempt:
            return tried(jnp.maximum(found[0] / BACKOFF, SMALLEST))

        first = tried(jnp.asarray(scale, jnp.float32))
        _, (_, results, grads) = try_again(first, again, retries)
        each = dict(zip(chosen, grads, strict=True))
        return results, [each.get(i) for i in range(len(values))]

    def backward(grads: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
        of_loss = cotangents[0]
        if isinstance(of_loss, SymbolicZero):
            return (None,) * len(grads)
        of_loss = gradients.upcast(of_loss)
        return tuple(
            None if g is None else (g * of_loss).astype(aval.dtype)
            for g, aval in zip(grads, avals, strict=True)
        )

    differentiable.defvjp(forward, backward, symbolic_zeros=True)
    loss, *others = differentiable(*program.consts, *arrays)
    return [loss, *map(lax.stop_gradient, others)]


def _manual_axes() -> tuple[str, ...]:
    """The mesh axes of the `jax.shard_map` around the caller."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def _varying(x: Any) -> Any:
    """An array that differs by device inside `jax.shard_map`, as its gradient does."""
    axes = _manual_axes()
    is_inexact = jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    return varying_like(x, map(lax.axis_index, axes)) if is_inexact else x
