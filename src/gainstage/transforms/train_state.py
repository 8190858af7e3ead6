"""A train state: parameters, optimizer state and loss scale, and all that a skipped step keeps."""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Self, overload

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from gainstage._base import checks
from gainstage._base._jax import Tracer
from gainstage._base.arrays import joined
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
from gainstage.transforms.loss_scaled import loss_scaled, on_mesh_of, transformation_of
from gainstage.transforms.loss_scaled_state import (
    loss_scaled_state,
    observed_in,
    states_in,
    with_scale,
)
from gainstage.transforms.models import Model
from gainstage.transforms.optax_checks import check_transformation
from gainstage.transforms.refusals import check_leaves, refuse_others
from gainstage.transforms.updates import selected, step_was_applied, updated
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
    _returned: ClassVar[Any] = None  # what `train_step` notes of a state that it has returned

    @staticmethod
    @checks.explained(
        "Write gainstage.TrainState.create(params, tx), and by name extra=, telemetry=True, or "
        "rule=gainstage.DynamicLossScale(2.0**15) for another first loss scale."
    )
    def create(
        params: Model,
        tx: Transformation,
        *,
        extra: PyTree = None,
        rule: Rule | None = None,
        telemetry: bool = False,
        underflow_every: int | None = None,
        shard_state_over: str | Sequence[str] | None = None,
    ) -> "TrainState[Model]":
        """Returns the state before the first step.

        Args:
            params: a pytree of arrays, or a model of Flax NNX or Equinox.
            tx: a transformation of optax. One that `loss_scaled` has made, or a chain with one in
                it, is taken as it is. States with the same `tx` are mapped together, and stepped by
                one program.
            extra: what else a loss changes, a pytree of arrays; None if there is nothing.
            rule, telemetry, underflow_every, shard_state_over: as for `loss_scaled`.

        Raises:
            TypeError: `tx` is not a transformation, or a leaf of `params` or `extra` no array.
            ValueError: `tx` has a loss scale, and `rule` or another argument of it is given too.
        """
        if hasattr(params, "init") and hasattr(params, "update") and not hasattr(tx, "init"):
            raise TypeError(
                f"Expected the parameters, and then an optax.GradientTransformation for tx, as in "
                f"TrainState.create(params, tx); got {brief(params)} for params."
            )
        check_transformation("tx", tx)
        refuse_others(params)
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
        if _has_scale(tx, trainable):
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
        extra, step = on_mesh_of(trainable, (extra, jnp.int32(0)))
        return TrainState(params, scaled.init(trainable), extra, step, scaled)

    @property
    def loss_scale(self) -> jax.Array:
        """The loss scale of the next step, a float32 scalar."""
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

    def replace(self, *, loss_scale: ArrayLike | None = None, **changes: Any) -> Self:
        """Returns a state with other fields, such as `state.replace(params=params)`.

        Args:
            loss_scale: another loss scale, a number > 0; the rule goes on from it.
            **changes: the fields of the state by name. What `value_and_grad` has returned as
                `extra` is one: the state goes on from it, also with an NNX model, such as for the
                next of several microbatches.

        Raises:
            TypeError: a state has no such field.
        """
        if unknown := changes.keys() - {field.name for field in dataclasses.fields(self)}:
            raise TypeError(
                f"Expected loss_scale, or fields of a state: {', '.join(_FIELDS)} and tx; got "
                f"{min(unknown)}."
            )
        if isinstance(extra := changes.get("extra"), NewExtra):
            params, _ = nnx_copy(changes.get("params", self.params))
            nnx_objects.change(params, extra.model)
            changes |= {"params": params, "extra": extra.extra}
        state = dataclasses.replace(self, **changes)
        if loss_scale is None:
            return state
        if not isinstance(loss_scale, Tracer):
            loss_scale = checks.loss_scale("loss_scale", loss_scale)
        opt_state = with_scale(state.opt_state, loss_scale)
        return dataclasses.replace(state, opt_state=opt_state)

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
        applied = loss_scaled_state(opt_state).applied
        if changed and before is not None:
            old = nnx_objects.values_of(changed, before)
            nnx_objects.change(params, selected(changed, old, applied))
        params = updated(params, updates, applied)
        if extra is not None:
            extra = selected(extra, jax.tree.map(lambda x: x, self.extra), applied)
        step = self.step + applied.astype(jnp.int32)
        return dataclasses.replace(self, params=params, opt_state=opt_state, extra=extra, step=step)

    def __copy__(self) -> Self:
        return self.replace()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A state with arrays of its own, which no step of this one donates."""
        copied: Any = jax.tree.map(jnp.copy, self)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """All but the transformation, which is made of functions that cannot be pickled."""
        return {**{name: getattr(self, name) for name in _FIELDS}, "tx": None}


def key_of(tx: Any) -> Any:
    """What decides what a transformation does; None for that of a pickled state."""
    scaled = None if tx is None else transformation_of(tx)
    return scaled.key if scaled else tx


def with_parts(
    loss_fn: Callable[..., Any], has_extra: bool, has_aux: bool
) -> Callable[..., tuple[Any, tuple[PyTree, Any]]]:
    """A loss that returns `(loss, (extra, aux))`; what `loss_fn` does not return is None."""
    names = ["loss", *["extra"] * has_extra, *["aux"] * has_aux]

    @functools.wraps(loss_fn, updated=())  # NNX finds the names of arguments in the signature
    def whole(*args: Any, **kwargs: Any) -> tuple[Any, tuple[PyTree, Any]]:
        _check_arguments(loss_fn, args, kwargs, has_extra)
        result = loss_fn(*args, **kwargs)
        if len(names) == 1:
            return result, (None, None)
        if not (isinstance(result, (tuple, list)) and len(result) == len(names)):
            is_more = isinstance(result, (tuple, list)) and len(result) == len(names) + 1
            advice = " What a loss returns beside them needs has_aux=True." * is_more
            raise TypeError(
                f"Expected ({', '.join(names)}) from loss_fn; got {brief(result)}.{advice}"
            )
        loss, *others = result
        return loss, (others[0] if has_extra else None, others[-1] if has_aux else None)

    return whole


def _check_arguments(
    loss_fn: Callable[..., Any], args: Any, kwargs: dict[str, Any], has_extra: bool
) -> None:
    """Raises a TypeError for a loss that takes other arguments than it is given."""
    try:
        inspect.signature(loss_fn).bind(*args, **kwargs)
    except ValueError:  # it has no signature
        return
    except TypeError as error:
        given = "params, extra, *batch" if has_extra else "params, *batch"
        if len(args) == 2 + has_extra and isinstance(args[-1], tuple | list | dict):
            advice = (
                "Take a batch that is a dict as one argument, loss_fn(params, batch), or pass its "
                "values: step(state, batch['x'], batch['y'])."
                if isinstance(args[-1], dict)
                else f"Unpack a batch that is a {type(args[-1]).__name__}: step(state, *batch)."
            )
        elif has_extra:
            advice = "Take the extra of the state as the second argument."
        else:
            advice = (
                "A loss that takes an extra needs a state that has one: "
                "gainstage.TrainState.create(params, tx, extra=extra)."
            )
        raise TypeError(
            f"Expected a loss_fn of ({given}), here of {len(args)} arguments; got one to which "
            f"this applies: {error}. {advice}"
        ) from error


def nnx_copy(params: Params) -> tuple[Params, nnx_objects.Before | None]:
    """A copy of an NNX model, which a call may change, with its values before; other parameters as
    they are, and None."""
    if not nnx_objects.nodes_in(params):
        return params, None
    copy = nnx_objects.sharing_as(params, jax.tree.map(lambda x: x, params))
    return copy, nnx_objects.values_in(copy)


def _has_scale(tx: Transformation, params: PyTree) -> bool:
    """Whether there is a loss scale in the state of a transformation."""
    if transformation_of(tx):
        return True
    try:
        first = jax.eval_shape(tx.init, params)
    except jax.errors.JAXTypeError:  # its `init` reads the values of the parameters
        first = tx.init(params)
    return bool(states_in(first))


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
    """An Equinox model without its arrays: its leaves that are no arrays are static, as in
    `filter_jit`."""

    structure: Structure
    names: tuple[str | None, ...]  # of its leaves; None for a static one
    static: tuple[Any, ...]

    def arrays(self, model: Any) -> dict[str, Any]:
        """The arrays of the model by name, or what they were mapped to."""
        leaves = self.structure.flatten_up_to(model)
        return {n: leaf for n, leaf in zip(self.names, leaves, strict=True) if n is not None}

    def model(self, arrays: Any) -> Any:
        """The model with these arrays; what is not by name as it is."""
        if not isinstance(arrays, dict):
            return arrays
        static = iter(self.static)
        leaves = [next(static) if name is None else arrays[name] for name in self.names]
        return self.structure.unflatten(leaves)


def _values_of(model: Any) -> _Values:
    """What is static of an Equinox model."""
    structure: Structure
    leaves, structure = jax.tree_util.tree_flatten_with_path(model)
    static = [x for _, x in leaves if _is_static(x)]
    names = [None if _is_static(x) else joined(path) for path, x in leaves]
    return _Values(structure, tuple(names), tuple(static))


def _is_static(leaf: object) -> bool:
    return callable(leaf) or isinstance(leaf, (bool, int, float, complex, str))


@dataclasses.dataclass(frozen=True, eq=False)
class _Static:
    """What is static of a state. Two transformations that `loss_scaled` has made alike of the same
    one are equal, so that states of two calls of `create` are of one structure."""

    tx: Any
    values: _Values | None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Static) or self.values != other.values:
            return False
        return self.tx is other.tx or key_of(self.tx) == key_of(other.tx)

    def __hash__(self) -> int:
        return hash((key_of(self.tx), self.values))


_FIELDS = "params", "opt_state", "extra", "step"
_KNOWN = "_values"  # where a state of an Equinox model keeps its `_Values`


def _flatten(state: TrainState[Any]) -> tuple[tuple[Any, ...], Any]:
    params, values = state.params, None
    if models.EQUINOX in sys.modules and models.library(params) == models.EQUINOX:
        values = vars(state).get(_KNOWN) or _values_of(params)
        params = values.arrays(params)
    return (params, state.opt_state, state.extra, state.step), _Static(state.tx, values)


def _flatten_with_keys(state: TrainState[Any]) -> tuple[tuple[Any, ...], Any]:
    children, static = _flatten(state)
    keys = map(jax.tree_util.GetAttrKey, _FIELDS)
    return tuple(zip(keys, children, strict=True)), static


def _unflatten(static: Any, children: Any) -> TrainState[Any]:
    params, opt_state, extra, step = children
    if static.values is None:
        return TrainState(params, opt_state, extra, step, static.tx)
    params = static.values.model(params)
    state = TrainState(params, opt_state, extra, step, static.tx)
    vars(state)[_KNOWN] = static.values  # the leaves may be anything now, such as their names
    return state


jax.tree_util.register_pytree_with_keys(TrainState, _flatten_with_keys, _unflatten, _flatten)
