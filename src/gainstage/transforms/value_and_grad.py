"""Scaled losses of optax loops, and their true gradients."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from gainstage._base.checks import brief
from gainstage._programs.true_cotangents import called_at, loss_times
from gainstage._scaling import gradients
from gainstage._variables.sharding import summed_over
from gainstage._variables.types import Aux, OptState, P, PyTree, Scalar, Using
from gainstage.transforms import models, nnx_objects
from gainstage.transforms.loss_scaled_state import loss_scaled_state, state_to_scale_by
from gainstage.transforms.marks import marked


@overload
def value_and_grad(
    fun: Callable[P, Scalar],
    opt_state: OptState,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: Literal[False] = False,
    using: Using | None = ...,
) -> Callable[P, tuple[jax.Array, PyTree]]: ...


@overload
def value_and_grad(
    fun: Callable[P, tuple[Scalar, Aux]],
    opt_state: OptState,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: Literal[True],
    using: Using | None = ...,
) -> Callable[P, tuple[tuple[jax.Array, Aux], PyTree]]: ...


@overload
def value_and_grad(
    fun: Callable[..., Any],
    opt_state: OptState,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool,
    using: Using | None = ...,
) -> Any: ...


def value_and_grad(
    fun: Callable[..., Any],
    opt_state: OptState,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    using: Using | None = None,
) -> Callable[..., Any]:
    """`jax.value_and_grad` of the scaled loss; returns the true loss and the true gradients.

    Args:
        fun: a function that returns a scalar loss, or (loss, aux).
        opt_state: a state of `loss_scaled`, or a pytree that contains exactly one.
        argnums: the arguments to differentiate with respect to, passed to `using`.
        has_aux: whether `fun` returns (loss, aux).
        using: the function that differentiates. By default the argument that is differentiated
            decides: `flax.nnx.value_and_grad` for an NNX model, `equinox.filter_value_and_grad`
            for an Equinox model, else `jax.value_and_grad`.

    Returns:
        A function of the arguments of `fun` that returns `(loss, grads)`, or
        `((loss, aux), grads)`. Loss and gradients are unscaled, in float32 or wider. A gradient
        that overflowed is not finite.

    Raises:
        TypeError: `fun` does not return a scalar, or has a `loss_scale` of its own.
        ValueError: `opt_state` has no loss-scale state, or several, or a transformation around
            `loss_scaled` could hide an overflow from it.

    Source: `jax.value_and_grad`; `flax.training.dynamic_scale.DynamicScale.value_and_grad`.
    """
    refuse_self_scaled(fun, "value_and_grad")
    scale = state_to_scale_by(opt_state).rule_state.scale

    def true(*args: Any, **kwargs: Any) -> Any:
        factor = marked(scale, "scale")
        differentiate = scaled_value_and_grad(fun, factor, has_aux, using, args, argnums)
        (_, (loss, aux)), grads = differentiate(*args, **kwargs)
        grads = gradients.unscale(grads, factor)
        if jax.sharding.get_abstract_mesh().manual_axes and (over := summed_over(loss, grads)):
            grads = marked(grads, "summed", over)
        return ((loss, aux) if has_aux else loss), grads

    return true


def refuse_self_scaled(fun: Any, caller: str) -> None:
    """Raises a TypeError for a loss that scales its gradients itself."""
    if getattr(getattr(fun, "func", fun), "is_self_scaled", False):
        raise TypeError(
            f"Expected a loss without a loss_scale of its own for {caller}, which scales it by the "
            f"state of loss_scaled; got two scales. Pass autocast(loss_fn) alone."
        )


def scaled_value_and_grad(
    fun: Callable[..., Any],
    scale: jax.Array,
    has_aux: bool,
    using: Using | None,
    args: Sequence[Any],
    argnums: Any = 0,
) -> Callable[..., Any]:
    """A function that returns `((scaled loss, (true loss, aux)), scaled gradients)`.

    Args:
        fun, has_aux, using, argnums: as for `value_and_grad`.
        scale: the loss scale.
        args: the arguments of `fun`, whose library chooses what differentiates.
    """

    @functools.wraps(fun, updated=())  # NNX finds the names of keyword arguments in the signature
    def scaled(*args: Any, **kwargs: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        try:
            with loss_times(scale):
                result: Any = fun(*args, **kwargs)
        except Exception as error:
            nnx_objects.explain(error)
            raise
        if has_aux and not (isinstance(result, (tuple, list)) and len(result) == 2):
            raise TypeError(
                f"Expected (loss, aux) from the loss function with has_aux=True; got "
                f"{brief(_shape(result))}."
            )
        loss: Any = result[0] if has_aux else result
        aux: Any = result[1] if has_aux else None
        if not jax.tree_util.all_leaves([loss]) or jnp.shape(loss):
            given: Any = jax.tree.structure(args[:1])
            is_differentiated = isinstance(loss, tuple) and given == jax.tree.structure(loss[1:])
            advice = " Pass the loss itself, not jax.value_and_grad of it." * is_differentiated
            raise TypeError(
                f"Expected a scalar loss, or (loss, aux) with has_aux=True; got "
                f"{brief(jax.tree.map(_shape, loss))}.{advice}"
            )
        return gradients.scaled(loss, scale), (gradients.upcast(loss), aux)

    by: dict[str, Any] = {} if argnums == 0 else {"argnums": argnums}
    chosen: Sequence[Any] = argnums if isinstance(argnums, Sequence) else [argnums]
    numbers = [getattr(n, "argnum", n) for n in chosen]  # of an `nnx.DiffState`
    params = [args[n] for n in numbers if -len(args) <= n < len(args)]
    using = using or models.VALUE_AND_GRAD[models.library(*params, beside=args)]
    return using(scaled, has_aux=True, **by)


def _shape(loss: Any) -> object:
    return f"shape {jnp.shape(loss)}" if hasattr(loss, "shape") else loss


def current_scale(opt_state: OptState) -> jax.Array:
    """Returns the current scale, found anywhere inside an optax state: a float32 scalar.

    Args:
        opt_state: as for `value_and_grad`.

    Raises:
        ValueError: `opt_state` has no loss-scale state, or several.

    Examples:
        >>> import gainstage as gs
        >>> import jax.numpy as jnp, optax
        >>> tx = optax.chain(gs.loss_scaled(optax.sgd(0.5)), optax.scale(2.0))
        >>> print(gs.transforms.current_scale(tx.init(jnp.ones(3))))
        32768.0
    """
    return loss_scaled_state(opt_state).rule_state.scale


@overload
def scale_loss(loss: Scalar, opt_state: OptState) -> jax.Array: ...


@overload
def scale_loss(loss: Callable[P, Scalar], opt_state: OptState) -> Callable[P, jax.Array]: ...


def scale_loss(loss: Any, opt_state: OptState) -> Any:
    """Returns the loss times the scale, in float32 or wider, for your own backward pass.

    Divide the gradients by `current_scale(opt_state)` in float32 before `update`, which takes true
    gradients; `value_and_grad` does both.

    Args:
        loss: the loss, of any floating dtype, or a function that returns it: then a function is
            returned. Under `gainstage.autocast`, a `jax.custom_vjp` in such a function gets true
            cotangents; in a number that was computed already, it gets them times the scale.
        opt_state: as for `value_and_grad`.

    Raises:
        TypeError: `loss` is not a single array.
        ValueError: `opt_state` has no loss-scale state, or several, or a transformation around it
            can hide an overflow.
    """
    scale = state_to_scale_by(opt_state, in_any_place=True).rule_state.scale
    factor = marked(scale, "scale")
    if callable(loss):
        called = called_at(loss, lambda: factor)
        return lambda *args, **kwargs: gradients.scaled(called(*args, **kwargs), factor)
    return gradients.scaled(loss, factor)
