"""A train state: parameters, optimizer state and loss scale, and all that a skipped step keeps."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, Self, overload

import jax
import jax.numpy as jnp
import optax

from gainstage._base import checks
from gainstage._base.checks import InvalidArgumentError, brief
from gainstage._scaling.step_telemetry import StepInfo
from gainstage._variables.types import (
    Aux,
    OptState,
    Params,
    PyTree,
    Scalar,
    Structure,
    Transformation,
    Using,
)
from gainstage.rules.loss_scale import Rule
from gainstage.transforms import models, nnx_objects
from gainstage.transforms.loss_scaled import loss_scaled
from gainstage.transforms.loss_scaled_state import loss_scaled_state, observed_in, states_in
from gainstage.transforms.refusals import check_leaves
from gainstage.transforms.updates import apply_updates, select_if_applied, step_was_applied
from gainstage.transforms.value_and_grad import value_and_grad


class NewExtra(NamedTuple):
    """What a loss has changed of an NNX model, and of the rest of a state."""

    model: PyTree  # the new values, as an `nnx.State`; {} if there are none
    extra: PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class TrainState(Generic[Params]):
    """Parameters, the state of their optimizer with the loss scale, and all that a skipped step
    keeps.

    A step whose gradients overflow changes nothing but the loss scale: the parameters, the state of
    the optimizer, `extra` and `step` stay bit for bit. A state is a pytree, which works inside of
    `jax.jit`, `jax.lax.scan`, `jax.vmap` and `jax.shard_map`, and is saved as any other. Its
    transformation is static: no leaf, and left out by `pickle`.

    Args:
        params: a pytree of arrays, or a model of Flax NNX or Equinox.
        opt_state: the state of `tx`, with the loss scale in it.
        extra: what else a loss changes, such as statistics of a batch normalisation, moving
            averages or keys: a pytree of arrays, or None.
        step: the number of steps that were applied, an int32 scalar.
        tx: the transformation, one of `loss_scaled`.

    Examples:
        >>> import gainstage as gs
        >>> import jax, jax.numpy as jnp, optax
        >>> def loss_fn(w, mean, x):  # the mean of the batches so far is the extra
        ...     return ((w * x) ** 2).sum(), 0.9 * mean + 0.1 * x.mean()
        >>> @jax.jit
        ... def step(state, x):
        ...     loss, extra, grads = state.value_and_grad(loss_fn)(x)
        ...     return state.apply_gradients(grads, extra), loss
        >>> state = gs.TrainState.create(jnp.ones(2), optax.sgd(0.25), extra=jnp.float32(0.0))
        >>> for x in (jnp.ones(2), jnp.array([1.0, jnp.nan])):
        ...     state, loss = step(state, x)
        >>> print(state.params, state.extra, state.step, state.loss_scale)
        [0.5 0.5] 0.1 1 16384.0

    Source: `flax.training.train_state.TrainState`.
    """

    params: Params
    opt_state: OptState
    extra: PyTree
    step: jax.Array
    tx: optax.GradientTransformationExtraArgs

    @classmethod
    def create(
        cls,
        params: Params,
        tx: Transformation,
        *,
        extra: PyTree = None,
        rule: Rule | None = None,
        telemetry: bool = False,
        underflow_every: int | None = None,
        shard_state_over: str | None = None,
    ) -> Self:
        """Returns the state before the first step.

        Args:
            params: a pytree of arrays, or a model of Flax NNX or Equinox.
            tx: a transformation of optax. One that `loss_scaled` has made, or a chain with one in
                it, is taken as it is: give several states the same one if they are to be mapped
                together, or stepped by one program.
            extra: what else a loss changes, a pytree of arrays; None if there is nothing.
            rule, telemetry, underflow_every, shard_state_over: as for `loss_scaled`.

        Raises:
            TypeError: `tx` is not a transformation, or a leaf of `params` or `extra` no array.
            ValueError: `tx` has a loss scale, and `rule` or another argument of it is given too.
        """
        checks.transformation("tx", tx)
        trainable = models.trainable(params)
        check_leaves(trainable)
        check_leaves(extra, "extra", "Bind what is no array to the loss: functools.partial.")
        extra = jax.tree.map(jnp.asarray, extra)
        given = {
            "rule": rule,
            "telemetry": telemetry or None,
            "underflow_every": underflow_every,
            "shard_state_over": shard_state_over,
        }
        if states_in(jax.eval_shape(tx.init, trainable)):
            if named := [name for name, value in given.items() if value is not None]:
                raise ValueError(
                    f"Expected no {named[0]}, as tx has a loss scale; got {given[named[0]]!r}. "
                    f"Pass it to loss_scaled, or pass the transformation without loss_scaled."
                )
            scaled = optax.with_extra_args_support(tx)  # pyright: ignore[reportArgumentType]
        else:
            scaled = loss_scaled(
                tx,
                rule,
                telemetry=telemetry,
                underflow_every=underflow_every,
                shard_state_over=shard_state_over,
            )
        return cls(params, scaled.init(trainable), extra, jnp.int32(0), scaled)

    @property
    def loss_scale(self) -> jax.Array:
        """The factor of the next loss, a float32 scalar."""
        return loss_scaled_state(self.opt_state).rule_state.scale

    @property
    def applied(self) -> jax.Array:
        """Whether the last step was applied, a bool scalar; True before the first."""
        return step_was_applied(self.opt_state)

    @property
    def info(self) -> StepInfo:
        """What the last step did, with `telemetry=True`.

        Raises:
            ValueError: the state was created without telemetry.
        """
        return observed_in(self.opt_state).info

    def replace(self, **changes: Any) -> Self:
        """Returns a state with other fields, such as `state.replace(params=params)`."""
        return dataclasses.replace(self, **changes)

    @overload
    def value_and_grad(
        self,
        loss_fn: Callable[..., Any],
        *,
        has_aux: Literal[False] = False,
        using: Using | None = ...,
    ) -> Callable[..., tuple[jax.Array, PyTree, PyTree]]: ...

    @overload
    def value_and_grad(
        self, loss_fn: Callable[..., Any], *, has_aux: Literal[True], using: Using | None = ...
    ) -> Callable[..., tuple[jax.Array, PyTree, PyTree, Aux]]: ...

    def value_and_grad(
        self, loss_fn: Callable[..., Any], *, has_aux: bool = False, using: Using | None = None
    ) -> Callable[..., Any]:
        """Differentiates the scaled loss; returns the true loss and the true gradients.

        Args:
            loss_fn: a function `(params, *batch)` that returns the loss, a scalar. In a state with
                `extra` it is `(params, extra, *batch)`, and returns `(loss, extra)`.
            has_aux: whether `loss_fn` returns something more, last.
            using: the function that differentiates, as for `gainstage.value_and_grad`.

        Returns:
            A function of the batch that returns `(loss, extra, grads)`, or `(loss, extra, grads,
            aux)`. Give `extra` to `apply_gradients`: it is what the loss has changed, also of an
            NNX model. The model of the state itself is not changed.

        Raises:
            TypeError: from the call, `loss_fn` returns something else.
        """
        has_aux = checks.flag("has_aux", has_aux)
        has_extra = self.extra is not None
        whole = with_parts(loss_fn, has_extra, has_aux)

        def true(*batch: Any, **kwargs: Any) -> tuple[Any, ...]:
            params, before = nnx_copy(self.params)
            # A copy: Equinox refuses a `State` that was used once.
            own = [jax.tree.map(lambda x: x, self.extra)] if has_extra else []
            differentiate = value_and_grad(whole, self.opt_state, has_aux=True, using=using)
            (loss, (extra, aux)), grads = differentiate(params, *own, *batch, **kwargs)
            if before is not None:
                extra = NewExtra(nnx_objects.changes(params, before), extra)
            return loss, extra, grads, *([aux] if has_aux else [])

        return true

    def apply_gradients(
        self, grads: PyTree, extra: PyTree = None, *, loss: Scalar | None = None
    ) -> Self:
        """Returns the state after a step with these gradients, or after a skipped one.

        Args:
            grads: the true gradients, from `value_and_grad` of this state.
            extra: what `value_and_grad` has returned beside them; needed where it is not None.
            loss: the true loss, for rules and transformations that measure it.

        Raises:
            TypeError: `extra` is missing, or of another state.
            ValueError: `grads` or `extra` has another structure than `params` and `extra` of the
                state.
        """
        params, before = nnx_copy(self.params)
        changed: PyTree = {}
        if before is not None:
            if not isinstance(extra, NewExtra):
                raise _no_extra(extra)
            changed, extra = extra
        if extra is None and self.extra is not None:
            raise _no_extra(extra)
        trainable = (
            models.chosen(params, grads)
            if models.is_nnx(params, grads)
            else models.trainable(params)
        )
        check_like("grads", grads, "params", trainable)
        check_like("extra", extra, "extra", self.extra)
        more = {} if loss is None else {"value": loss}
        updates, opt_state = self.tx.update(grads, self.opt_state, trainable, **more)
        if changed and before is not None:
            old = nnx_objects.values_of(changed, before)
            nnx_objects.change(params, select_if_applied(changed, old, opt_state))
        params = apply_updates(params, updates, opt_state)
        if extra is not None:
            extra = select_if_applied(extra, jax.tree.map(lambda x: x, self.extra), opt_state)
        step = self.step + step_was_applied(opt_state).astype(jnp.int32)
        return dataclasses.replace(self, params=params, opt_state=opt_state, extra=extra, step=step)

    def __getstate__(self) -> dict[str, Any]:
        """All but the transformation, which is made of functions that cannot be pickled."""
        return {**vars(self), "tx": None}


def with_parts(
    loss_fn: Callable[..., Any], has_extra: bool, has_aux: bool
) -> Callable[..., tuple[Any, tuple[PyTree, Any]]]:
    """A loss that returns `(loss, (extra, aux))`; what `loss_fn` does not return is None."""
    names = ["loss", *["extra"] * has_extra, *["aux"] * has_aux]

    @functools.wraps(loss_fn, updated=())  # NNX finds the names of arguments in the signature
    def whole(*args: Any, **kwargs: Any) -> tuple[Any, tuple[PyTree, Any]]:
        result = loss_fn(*args, **kwargs)
        if len(names) == 1:
            return result, (None, None)
        if not (isinstance(result, (tuple, list)) and len(result) == len(names)):
            raise TypeError(
                f"Expected ({', '.join(names)}) from loss_fn; got "
                f"{brief(jax.tree.map(jnp.shape, result))}."
            )
        loss, *others = result
        return loss, (others[0] if has_extra else None, others[-1] if has_aux else None)

    return whole


def nnx_copy(params: Params) -> tuple[Params, nnx_objects.Before | None]:
    """A copy of an NNX model, which a call may change, with its values before; other parameters as
    they are, and None."""
    if not nnx_objects.nodes_in(params):
        return params, None
    copy = nnx_objects.sharing_as(params, jax.tree.map(lambda x: x, params))
    return copy, nnx_objects.values_in(copy)


def _no_extra(extra: object) -> InvalidArgumentError:
    """The error for something else than what `value_and_grad` has returned."""
    return InvalidArgumentError(
        f"Expected the extra that value_and_grad of this state has returned; got {brief(extra)}. "
        f"Write loss, extra, grads = state.value_and_grad(loss_fn)(*batch), then "
        f"state.apply_gradients(grads, extra)."
    )


def check_like(name: str, given: PyTree, other: str, expected: PyTree) -> None:
    """Raises a ValueError for a pytree of another structure, or arrays of other shapes."""

    def shapes(tree: PyTree) -> dict[str, Any]:
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is None)
        return {
            jax.tree_util.keystr(path): None if leaf is None else jnp.shape(leaf)
            for path, leaf in leaves
        }

    of_given, of_expected = shapes(given), shapes(expected)
    for path in of_expected | of_given:
        own, wanted = of_given.get(path, "none"), of_expected.get(path, "none")
        if own != wanted and None not in (own, wanted):
            raise ValueError(
                f"Expected {name} in the structure of state.{other}; got shape {own} of "
                f"`{name}{path}` for shape {wanted} of `state.{other}{path}`."
            )


# ── as a pytree ──────────────────────────────────────────────────────────────────────────────────


class _Values(NamedTuple):
    """The leaves of an Equinox model that are no arrays, which are static, as in `filter_jit`."""

    structure: Structure
    leaves: tuple[tuple[int, Any], ...]  # with their places


def _without_values(params: Any) -> tuple[Any, _Values | None]:
    """An Equinox model without its leaves that are no arrays; other parameters as they are."""
    if models.library(params) != models.EQUINOX:
        return params, None
    structure: Structure
    leaves, structure = jax.tree.flatten(params)
    found = [
        (place, leaf)
        for place, leaf in enumerate(leaves)
        if callable(leaf) or isinstance(leaf, (bool, int, float, complex, str))
    ]
    for place, _ in found:
        leaves[place] = None
    return structure.unflatten(leaves), _Values(structure, tuple(found))


def _with_values(params: Any, values: _Values | None) -> Any:
    """The model that `_without_values` has divided."""
    if values is None:
        return params
    leaves = values.structure.flatten_up_to(params)
    for place, leaf in values.leaves:
        leaves[place] = leaf
    return values.structure.unflatten(leaves)


_FIELDS = "params", "opt_state", "extra", "step"


def _flatten(state: TrainState[Any]) -> tuple[tuple[Any, ...], Any]:
    params, values = _without_values(state.params)
    return (params, state.opt_state, state.extra, state.step), (state.tx, values)


def _flatten_with_keys(state: TrainState[Any]) -> tuple[tuple[Any, ...], Any]:
    children, static = _flatten(state)
    keys = map(jax.tree_util.GetAttrKey, _FIELDS)
    return tuple(zip(keys, children, strict=True)), static


def _unflatten(static: Any, children: Any) -> TrainState[Any]:
    tx, values = static
    params, opt_state, extra, step = children
    return TrainState(_with_values(params, values), opt_state, extra, step, tx)


jax.tree_util.register_pytree_with_keys(TrainState, _flatten_with_keys, _unflatten, _flatten)
