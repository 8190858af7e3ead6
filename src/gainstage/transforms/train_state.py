"""A train state: parameters, optimizer state and loss scale, and all that a skipped step keeps."""

import dataclasses
import difflib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, Self, overload

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from gainstage._base import checks
from gainstage._base._jax import Tracer
from gainstage._base.arrays import joined
from gainstage._base.checks import brief
from gainstage._scaling.step_telemetry import StepInfo
from gainstage._variables.types import (
    Aux,
    Flag,
    OptState,
    Params,
    PyTree,
    Scalar,
    Structure,
    Transformation,
    Using,
)
from gainstage.rules.loss_scale import LossScaleLike, as_rule, is_default
from gainstage.transforms.kept_moments import with_kept_moments
from gainstage.transforms.loss_scale_state import (
    observed_in,
    state_to_scale_by,
    states_in,
    used_scale,
    with_scale,
)
from gainstage.transforms.marks import marked, marked_extra
from gainstage.transforms.models import Changeable, Equinox, Model, apply_changes, kind_of
from gainstage.transforms.optax_checks import check_transformation, refuse_per_example
from gainstage.transforms.refusals import check_leaves, check_parameters, refuse_others
from gainstage.transforms.step import apply_gradients
from gainstage.transforms.step_gradients import (
    NewExtra,
    StateParts,
    compute_gradients_beside,
)
from gainstage.transforms.updates import step_was_applied
from gainstage.transforms.value_and_grad import loss_function
from gainstage.transforms.with_loss_scale import (
    on_mesh_of,
    transformation_of,
    with_extra_args,
    with_loss_scale,
)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TrainState(Generic[Params]):
    """Parameters, the state of their optimizer with the loss scale, and all that a skipped step
    keeps.

    A step whose gradients are not finite changes nothing but the loss scale: the parameters, the
    state of the optimizer, `extra` and `step` stay bit for bit. In a compiled step a loss without
    float16 and float8 is not scaled, and leaves the scale alone. A state is a pytree, which works
    inside of `jax.jit`, `jax.lax.scan`, `jax.vmap` and `jax.shard_map`, and is saved as any other.
    Its transformation is static: no leaf, and left out by `pickle`.

    Args:
        params: a pytree of arrays, or a model of Flax NNX or Equinox.
        opt_state: the state of `tx`, with the loss scale in it.
        extra: what else a loss changes, such as statistics of a batch normalisation, moving
            averages or keys: a pytree of arrays, or None.
        step: the number of steps that were applied, an int32 scalar that does not
            wrap around.
        tx: the transformation, one of `with_loss_scale`.

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
        >>> print(state.params, state.extra, state.step, state.loss_scale)  # float32 needs none
        [0.5 0.5] 0.1 1 1.0

    Source: `flax.training.train_state.TrainState`.
    """

    params: Params
    opt_state: OptState
    extra: PyTree
    step: jax.Array
    tx: optax.GradientTransformationExtraArgs
    _returned: ClassVar[Any] = None  # what `train_step` notes of a state that it has returned

    @staticmethod
    @checks.explains(
        "Write gainstage.TrainState.create(params, tx), and by name extra=, telemetry=True, or "
        "loss_scale=gainstage.DynamicLossScale(2.0**15) for another first loss scale."
    )
    def create(
        params: Model,
        tx: Transformation,
        *,
        extra: PyTree = None,
        loss_scale: LossScaleLike = "dynamic",
        telemetry: bool = False,
        underflow_every: int | None = None,
        shard_state_over: str | Sequence[str] | None = None,
    ) -> "TrainState[Model]":
        """Returns the state before the first step.

        Args:
            params: a pytree of arrays, or a model of Flax NNX or Equinox.
            tx: a transformation of optax. One that `with_loss_scale` has made, or a chain with one
                in it, is taken as it is. States with the same `tx` are mapped together, and stepped
                by one program.
            extra: what else a loss changes, a pytree of arrays; None if there is nothing.
            loss_scale, telemetry, underflow_every, shard_state_over: as for `with_loss_scale`.

        Raises:
            TypeError: `tx` is not a transformation, or needs the gradient of each example, as
                those of `optax.contrib` for private training do; or a leaf of `params` or `extra`
                is no array.
            ValueError: `tx` has a loss scale, and `loss_scale` or another of its arguments is
                given too.
        """
        if hasattr(params, "init") and hasattr(params, "update") and not hasattr(tx, "init"):
            raise TypeError(
                f"Expected the parameters, and then an optax.GradientTransformation for tx, as in "
                f"TrainState.create(params, tx); got {brief(params)} for params."
            )
        check_transformation("tx", tx)
        refuse_others(params)
        trainable = kind_of(params).trainable(params)
        check_parameters(trainable)
        check_leaves(
            extra,
            "extra",
            "Of a model of Equinox, pass equinox.filter(model, equinox.is_array). Bind what else "
            "is no array to the loss: functools.partial.",
        )
        extra = jax.tree.map(jnp.asarray, extra)
        options = {
            "loss_scale": None if is_default(loss_scale) else as_rule("loss_scale", loss_scale),
            "telemetry": telemetry or None,
            "underflow_every": underflow_every,
            "shard_state_over": shard_state_over,
        }
        if _has_scale(tx, trainable):
            if named := [name for name, value in options.items() if value is not None]:
                raise ValueError(
                    f"Expected no {named[0]}, as tx has a loss scale; got {options[named[0]]!r}. "
                    f"Pass it to with_loss_scale, or pass the transformation without it."
                )
            scaled = with_extra_args(tx)
        else:
            scaled = with_loss_scale(
                tx,
                loss_scale,
                telemetry=telemetry,
                underflow_every=underflow_every,
                shard_state_over=shard_state_over,
            )
        extra, step = on_mesh_of(trainable, (extra, jnp.int32(0)))
        opt_state = scaled.init(trainable)
        refuse_per_example(opt_state)
        return TrainState(params, opt_state, extra, step, scaled)

    @property
    def loss_scale(self) -> jax.Array:
        """The loss scale as the last step left it, a float32 scalar. It is 1.0 after a step without
        float16 and float8, which needs none. Before the first step, of which nothing is known yet,
        it is the first scale of the rule."""
        return used_scale(self.opt_state)

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

    @property
    def _transformation(self) -> optax.GradientTransformationExtraArgs:
        """The transformation `tx`, which takes a step.

        Raises:
            ValueError: the state was pickled, which leaves its transformation out.
        """
        tx: Any = self.tx
        if tx is None:
            raise ValueError(
                "Expected a state with its transformation, which no pickle holds. Write "
                "state = state.replace(tx=other.tx), where other is a new state of the same "
                "parameters."
            )
        return self.tx

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
            params = Changeable(changes.get("params", self.params)).tree
            apply_changes(params, extra.model)
            changes |= {"params": params, "extra": extra.extra}
        state = dataclasses.replace(self, **changes)
        if loss_scale is None:
            return state
        if not isinstance(loss_scale, Tracer):
            loss_scale = checks.loss_scale("loss_scale", loss_scale)
        opt_state = with_scale(state.opt_state, loss_scale)
        return dataclasses.replace(state, opt_state=opt_state)

    def copy(self) -> Self:
        """Returns the same state in memory of its own, which no step of this one donates: the best
        of a run, or one to go back to."""
        refuse_deleted(self)
        copied: Any = jax.tree.map(jnp.copy, self)
        return copied

    def with_params(self, params: Model, tx: Transformation | None = None) -> "TrainState[Model]":
        """Returns a state that goes on with other parameters: more of them, fewer, or merged ones.

        `extra`, `step`, the loss scale, the counts of the optimizer and the numbers of the
        telemetry stay, and so do the moments of each parameter that keeps its name and shape, or
        that is the same array under another name. All other moments are those of a new state.

        Args:
            params: a pytree of arrays, or a model of Flax NNX or Equinox.
            tx: another transformation of optax, with the loss scale and telemetry of this state
                around it, or one of `with_loss_scale`; None for the same one.

        Raises:
            TypeError: as from `create`.

        Examples:
            >>> import gainstage as gs
            >>> import jax.numpy as jnp, optax
            >>> state = gs.TrainState.create({"head": jnp.ones(2)}, optax.adam(0.1))
            >>> state, _ = gs.train_step(lambda p: (p["head"] ** 2).sum())(state)
            >>> whole = state.with_params(state.params | {"body": jnp.zeros(2)})
            >>> print(whole.step, whole.opt_state.inner[0].mu)
            1 {'body': Array([0., 0.], dtype=float32), 'head': Array([0.2, 0.2], dtype=float32)}
        """
        if isinstance(params, TrainState):
            raise TypeError("Expected parameters for with_params; got a TrainState. Write .params.")
        refuse_deleted(self)
        scaled = transformation_of(self._transformation)
        if tx is not None:
            check_transformation("tx", tx)
        if tx is None:
            tx = self._transformation
        elif scaled and not _has_scale(tx, kind_of(params).trainable(params)):
            tx = scaled.around(tx)
        new = TrainState.create(params, tx)
        opt_state = with_kept_moments(self.opt_state, self.params, new.opt_state, params)
        return dataclasses.replace(new, opt_state=opt_state, extra=self.extra, step=self.step)

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
            NNX model. The model of the state itself is not changed. The running means of a model
            in the batch change when `apply_gradients` gets this `extra`, in the same compiled
            function, and applies the step. Random states in the batch advance at once.

        Raises:
            TypeError: from the call, `loss_fn` returns something else.
        """
        loss = loss_function("loss_fn", loss_fn, has_aux, using, "value_and_grad")
        scale = state_to_scale_by(self.opt_state).rule_state.scale

        def true(*batch: Any, **kwargs: Any) -> tuple[Any, ...]:
            factor = marked(scale, "scale")
            found = compute_gradients_beside(loss, self._parts, factor, batch, kwargs)
            found.tell_if_unused()
            aux = [found.aux] if has_aux else []
            extra, started = found.extra, ((self.params, self.extra), (batch, kwargs))
            if isinstance(extra, NewExtra):  # without the objects of the batch, which stay the same
                model, more = marked_extra((extra.model, extra.extra), *started)
                extra = extra._replace(model=model, extra=more)
            else:
                extra = marked_extra(extra, *started)
            return found.loss, extra, found.true_grads(), *aux

        return true

    def apply_gradients(
        self,
        grads: PyTree,
        extra: PyTree = None,
        *,
        loss: Scalar | None = None,
        apply_if: Flag | None = None,
        **asked_for: Any,
    ) -> Self:
        """Returns the state after a step with these gradients, or after a skipped one.

        Args:
            grads: the true gradients, from `value_and_grad` of this state.
            extra: what `value_and_grad` has returned beside them; needed where it is not None.
            loss: the true loss, for rules and transformations that measure it.
            apply_if: a bool scalar. False skips the step, as for two states that are to be skipped
                together, or gradients that are too large. The loss scale still
                reacts to these gradients. Telemetry counts such a step as skipped, and not as an
                overflow.
            **asked_for: what else the transformation asks for, such as `value_fn=lambda params:
                loss_fn(params, *batch)` for the line search of `optax.lbfgs`. A `value_fn` is
                differentiated with the loss scale, and a step whose update is not finite skipped.

        Raises:
            TypeError: `extra` is missing, or not what `value_and_grad` returns, or an argument is
                spelt in another way.
            ValueError: `grads` or `extra` has another structure than `params` and `extra` of the
                state.
        """
        for name in asked_for:
            if meant := difflib.get_close_matches(name, ("apply_if", "loss", "extra"), 1):
                raise TypeError(
                    f"Expected loss, apply_if, or what the transformation asks for; got {name}. "
                    f"Write {meant[0]}=."
                )
        return dataclasses.replace(
            self,
            **apply_gradients(
                self._transformation,
                self._parts,
                grads,
                extra,
                loss,
                **({} if apply_if is None else {"apply_if": apply_if}),
                **asked_for,
            )._asdict(),
        )

    @property
    def _parts(self) -> StateParts:
        return StateParts(self.params, self.opt_state, self.extra, self.step)

    if not TYPE_CHECKING:  # a checker would take every name for an attribute

        def __getattr__(self, name):
            """What `forget_donated` has left out is an error with what to do."""
            if name in _DONATED:
                raise ValueError(
                    f"`state.{name}` was donated to an earlier step and deleted. Pass on what that "
                    f"step returned. For a state to keep, write best = state.copy() before the "
                    f"step, or create the step with train_step(..., donate=False)."
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        parts = [
            f"{name}={_in_short(vars(self)[name]) if name in vars(self) else 'donated'}"
            for name in _FIELDS
        ]
        return f"TrainState({', '.join(parts)})"

    def __copy__(self) -> Self:
        """The same as `copy`: a state that shares arrays would lose them to the next step."""
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The same as `copy`."""
        return self.copy()

    def __getstate__(self) -> dict[str, Any]:
        """All but the transformation, which is made of functions that cannot be pickled."""
        return {**{name: getattr(self, name) for name in _FIELDS}, "tx": None}


def _in_short(tree: PyTree) -> str:
    """How many arrays and numbers a part of a state has; an array alone by `repr`."""
    leaves = jax.tree.leaves(tree)
    if len(leaves) == 1 and leaves[0] is tree and not jnp.shape(tree):
        return repr(tree)
    arrays = "1 array" if len(leaves) == 1 else f"{len(leaves)} arrays"
    return f"<{arrays}, {sum(jnp.size(x) for x in leaves):,} numbers>" if leaves else repr(tree)


def refuse_deleted(state: PyTree) -> None:
    """Raises a ValueError for arrays that a step has deleted, such as those of a state with the
    `params` of another one."""
    for path, x in jax.tree_util.tree_flatten_with_path(state)[0]:
        if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted():
            raise ValueError(
                f"`state.{joined(path)}` was donated to a step and deleted, perhaps as an array of "
                f"another state that shared it. Take a copy before such a step: state.copy()."
            )


def forget_donated(state: TrainState[Any]) -> None:
    """Leaves out of a state what a step has deleted, so that its use says what to do."""
    for name in _DONATED:
        vars(state).pop(name, None)


def key_of(tx: Any) -> Any:
    """What decides what a transformation does; None for that of a pickled state."""
    scaled = None if tx is None else transformation_of(tx)
    return scaled.key if scaled else tx


def _has_scale(tx: Transformation, params: PyTree) -> bool:
    """Whether there is a loss scale in the state of a transformation."""
    if transformation_of(tx):
        return True
    try:
        first = jax.eval_shape(tx.init, params)
    except jax.errors.JAXTypeError:  # its `init` reads the values of the parameters
        first = tx.init(params)
    return bool(states_in(first))


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
    """What is static of a state. Two transformations that `with_loss_scale` has made alike of the
    same one are equal, so that states of two calls of `create` are of one structure."""

    tx: Any
    values: _Values | None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Static) or self.values != other.values:
            return False
        return self.tx is other.tx or key_of(self.tx) == key_of(other.tx)

    def __hash__(self) -> int:
        return hash((key_of(self.tx), self.values))


_FIELDS = "params", "opt_state", "extra", "step"
_DONATED = "params", "extra"  # what a step that donates deletes as a whole
_KNOWN = "_values"  # where a state of an Equinox model keeps its `_Values`


def _flatten(state: TrainState[Any]) -> tuple[tuple[Any, ...], Any]:
    params, values = state.params, None
    if isinstance(kind_of(params), Equinox):
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
