"""Scaled losses of optax loops, and their true gradients."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp

from gainstage._base import checks
from gainstage._base._jax import is_written_zero, trace_ctx, values_in
from gainstage._base.checks import brief
from gainstage._base.warn import warn
from gainstage._programs.degrees import NO_SCALE
from gainstage._programs.true_cotangents import NeedsScaleError, Undecided, called_at, loss_times
from gainstage._scaling import gradients
from gainstage._scaling.finite_check import all_finite
from gainstage._variables.sharding import summed_over
from gainstage._variables.types import Aux, OptState, P, PyTree, Scalar, Using
from gainstage.transforms.loss_scale_state import loss_scale_state, state_to_scale_by
from gainstage.transforms.marks import marked
from gainstage.transforms.models import (
    Changeable,
    apply_changes,
    explain,
    has_statistics,
    kind_of,
    only_integers,
)
from gainstage.transforms.needs_scale import needs_scale, seen_in_trace
from gainstage.transforms.retrace import half_of
from gainstage.transforms.updates import selected


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
        opt_state: a state of `with_loss_scale`, or a pytree that contains exactly one.
        argnums: the arguments to differentiate with respect to, passed to `using`.
        has_aux: whether `fun` returns (loss, aux).
        using: the function that differentiates. By default the argument that is differentiated
            decides: `flax.nnx.value_and_grad` for an NNX model, `equinox.filter_value_and_grad`
            for an Equinox model, else `jax.value_and_grad`.

    Returns:
        A function of the arguments of `fun` that returns `(loss, grads)`, or
        `((loss, aux), grads)`. Loss and gradients are unscaled, in float32 or wider. A gradient
        that overflowed is not finite. Then a model of Flax NNX keeps the running means that it
        had, as `train_step` keeps them; its counts of random numbers go on.

    Raises:
        TypeError: `fun` does not return a scalar, or has a `loss_scale` of its own.
        ValueError: `opt_state` has no loss-scale state, or several, or a transformation around
            `with_loss_scale` could hide an overflow from it.

    Source: `jax.value_and_grad`; `flax.training.dynamic_scale.DynamicScale.value_and_grad`.
    """
    loss_fn = loss_function("fun", fun, has_aux, using, "value_and_grad")
    scale = state_to_scale_by(opt_state).rule_state.scale

    def true(*args: Any, **kwargs: Any) -> Any:
        objects = Changeable((args, kwargs))
        own_args, own_kwargs = objects.tree
        found = loss_fn.backward(marked(scale, "scale"), own_args, own_kwargs, argnums)
        found.tell_if_unused()
        if changes := objects.changes():
            kept = selected(changes, objects.before(changes), all_finite(found.grads))
            apply_changes((args, kwargs), kept)
            apply_changes((args, kwargs), only_integers(changes))  # random numbers go on
        return ((found.loss, found.aux) if has_aux else found.loss), found.true_grads()

    return true


def loss_function(
    name: str, fun: Any, has_aux: bool, using: Using | None, caller: str, advice: str = ""
) -> "LossFunction":
    """A loss with how it is differentiated, from the arguments of a caller.

    Args:
        name: the name of the argument `fun`.
        fun, has_aux, using: as for `value_and_grad`.
        caller: the function that has these arguments.
        advice: what to write instead of something that is no function.

    Raises:
        TypeError: one of them is of another type, or the loss scales its gradients itself.
    """
    if not callable(fun):
        raise TypeError(f"Expected a function for {name}; got {brief(fun)}.{advice}")
    if hasattr(fun, "stateless_call") and hasattr(fun, "fit"):
        raise TypeError(
            f"Expected a function for {name}; got the Keras model {brief(fun)}. Write model = "
            f"gainstage.interop.keras.compile(model, optimizer, loss), and then model.fit(x, y)."
        )
    if using is not None and not callable(using):
        raise TypeError(
            f"Expected a function such as jax.value_and_grad for using; got {brief(using)}."
        )
    if getattr(getattr(fun, "func", fun), "is_self_scaled", False):
        raise TypeError(
            f"Expected a loss without a loss_scale of its own for {caller}, which scales it by the "
            f"state of with_loss_scale; got two scales. Pass autocast(loss_fn) alone."
        )
    return LossFunction(fun, checks.flag("has_aux", has_aux), using)


NOT_USED = (
    "This loss uses none of the parameters that it is given, so all gradients are 0 and nothing is "
    "trained. Does it use weights, or a model, from outside of itself? Write loss_fn(params, x, y) "
    "with the params of its first argument."
)


class Backward(NamedTuple):
    """What the backward pass of a scaled loss has returned."""

    loss: jax.Array  # the true one, in float32 or wider
    extra: PyTree  # what a loss returns for the extra of a state
    aux: Any
    grads: PyTree  # still multiplied by the loss scale
    scale: jax.Array | None  # that scale; None if the loss needed none
    counts: jax.Array | None = None  # a bool scalar: whether the batch has weight; None for yes

    def tell_if_unused(self) -> None:
        """Warns if the loss uses none of the parameters."""
        leaves = jax.tree.leaves(self.grads)
        if leaves and all(map(is_written_zero, leaves)):
            warn(NOT_USED)

    def true_grads(self) -> PyTree:
        """The true gradients, marked if there was no scale, and if JAX has summed them over
        devices."""
        grads = gradients.unscale(self.grads, self.scale)
        if self.scale is None:
            grads = marked(grads, NO_SCALE)
        is_manual = jax.sharding.get_abstract_mesh().manual_axes
        over = summed_over(self.loss, grads) if is_manual else ""
        return marked(grads, "summed", over) if over else grads


class LossFunction(NamedTuple):
    """A function that returns a loss, or a loss with more, and how it is differentiated.

    Args:
        fun: a function that returns the loss, or (loss, extra), (loss, aux), (loss, extra, aux).
        has_aux, using: as for `value_and_grad`.
        has_extra: whether it returns the extra of a state.
    """

    fun: Callable[..., Any]
    has_aux: bool = False
    using: Using | None = None
    has_extra: bool = False

    def backward(
        self,
        scale: jax.Array,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        argnums: Any = 0,
    ) -> Backward:
        """Differentiates the loss at these arguments, times the scale if something in it is in
        float16 or float8, and as it is if not. In a compiled function that is read from the one
        trace which the gradient takes anyway. Outside of one there is none, so the loss is scaled,
        which does no harm."""
        if not (trace_ctx.is_top_level() or half_of(self.fun) == "float16"):
            with contextlib.suppress(NeedsScaleError):
                return self.backward_at(scale, args, kwargs, argnums, is_decided=False)
        return self.backward_at(scale, args, kwargs, argnums)

    def backward_at(
        self,
        scale: jax.Array,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        argnums: Any = 0,
        *,
        is_decided: bool = True,
    ) -> Backward:
        """Differentiates the loss times this scale at these arguments, the library of which chooses
        what differentiates.

        Args:
            scale, args, kwargs, argnums: as for `backward`.
            is_decided: whether the scale is used whatever is in the loss. If not, a loss without
                float16 and float8 is differentiated as it is.

        Raises:
            NeedsScaleError: it was not decided, and a part of the loss that was traced already
                should have known the scale.
        """

        @functools.wraps(self.fun, updated=())  # NNX finds the names of arguments in the signature
        def scaled(*args: Any, **kwargs: Any) -> tuple[jax.Array, tuple[Any, ...]]:
            given = [] if is_decided else values_in((args, kwargs))  # before objects change
            undecided = None if is_decided else Undecided()
            try:
                with loss_times(scale, undecided):
                    result = self.fun(*args, **kwargs)
            except Exception as error:
                explain(error)
                raise
            loss, extra, aux = self.parts(result, args)
            true = gradients.upcast(loss)
            if self._is_scaled(undecided, loss, given, args, kwargs):
                return gradients.scaled(loss, scale), (true, extra, aux, ())
            return true, (true, extra, aux, None)

        by: dict[str, Any] = {} if argnums == 0 else {"argnums": argnums}
        chosen: Sequence[Any] = argnums if isinstance(argnums, Sequence) else [argnums]
        numbers = [getattr(n, "argnum", n) for n in chosen]  # of an `nnx.DiffState`
        params = [args[n] for n in numbers if -len(args) <= n < len(args)]
        using = self.using or kind_of(*params, beside=args).value_and_grad
        (_, parts), grads = using(scaled, has_aux=True, **by)(*args, **(kwargs or {}))
        loss, extra, aux, is_scaled = parts  # the last is told by the structure: () or None
        return Backward(loss, extra, aux, grads, None if is_scaled is None else scale)

    def _is_scaled(
        self,
        undecided: Undecided | None,
        loss: jax.Array,
        given: Sequence[Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> bool:
        """Whether a loss that was traced just now is multiplied by the scale."""
        if undecided is None or undecided.is_asked_for:
            return True
        is_small, is_written = seen_in_trace(loss, given)
        needs = needs_scale(self.fun, args, kwargs) if is_small is None else is_small
        if needs and is_written:  # it may be under `autocast`, and gets true cotangents
            raise NeedsScaleError
        return needs

    def parts(self, result: Any, args: Sequence[Any] = ()) -> tuple[Any, PyTree, Any]:
        """The loss, the extra and aux of what the function has returned; None for what is none."""
        names = ["loss", *["extra"] * self.has_extra, *["aux"] * self.has_aux]
        each = [result] if len(names) == 1 else result
        if not (isinstance(each, (tuple, list)) and len(each) == len(names)):
            is_more = isinstance(each, (tuple, list)) and len(each) == len(names) + 1
            advice = " What a loss returns beside them needs has_aux=True." * is_more
            by = " with has_aux=True" * self.has_aux
            raise TypeError(
                f"Expected ({', '.join(names)}) from loss_fn{by}; got {brief(_shape(result))}."
                f"{advice}"
            )
        loss, *others = each
        if self.has_aux and has_statistics(others[-1]):
            warn(
                "A State of Equinox in aux is not what a skipped step keeps: one batch with a NaN "
                "ruins its statistics. Write gainstage.TrainState.create(model, tx, extra=state), "
                "with a loss (model, state, *batch) that returns (loss, state)."
            )
        if not jax.tree_util.all_leaves([loss]) or jnp.shape(loss):
            given: Any = jax.tree.structure(tuple(args[:1]))
            is_differentiated = isinstance(loss, tuple) and given == jax.tree.structure(loss[1:])
            advice = " Pass the loss itself, not jax.value_and_grad of it." * is_differentiated
            if isinstance(loss, tuple) and has_statistics(loss[1:]):
                advice = (
                    " A State of Equinox is the extra of a train state, which a skipped step keeps "
                    "too: gainstage.TrainState.create(model, tx, extra=state), with a loss (model, "
                    "state, *batch) that returns (loss, state)."
                )
            raise TypeError(
                f"Expected a scalar loss, or (loss, aux) with has_aux=True; got "
                f"{brief(jax.tree.map(_shape, loss))}.{advice}"
            )
        if not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
            raise TypeError(
                f"Expected a loss of a floating dtype; got {jnp.result_type(loss)}, which has no "
                f"gradient, as an accuracy or a count has none."
            )
        return loss, others[0] if self.has_extra else None, others[-1] if self.has_aux else None


def _shape(loss: Any) -> object:
    return f"shape {jnp.shape(loss)}" if hasattr(loss, "shape") else loss


def current_scale(opt_state: OptState) -> jax.Array:
    """Returns the loss scale, found anywhere inside an optax state: a float32 scalar.

    It is what `scale_loss` multiplies by. What the last step has used, 1.0 if it had nothing in
    float16 or float8, is `TrainState.loss_scale`.

    Args:
        opt_state: as for `value_and_grad`.

    Raises:
        ValueError: `opt_state` has no loss-scale state, or several.

    Examples:
        >>> import gainstage as gs
        >>> import jax.numpy as jnp, optax
        >>> tx = optax.chain(gs.with_loss_scale(optax.sgd(0.5)), optax.scale(2.0))
        >>> print(gs.transforms.current_scale(tx.init(jnp.ones(3))))
        32768.0
    """
    scale: jax.Array = loss_scale_state(opt_state).rule_state.scale
    return scale


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
    state_to_scale_by(opt_state, in_any_place=True)
    factor = marked(current_scale(opt_state), "scale")
    if callable(loss):
        called = called_at(loss, lambda: factor)
        return lambda *args, **kwargs: gradients.scaled(called(*args, **kwargs), factor)
    return gradients.scaled(loss, factor)
