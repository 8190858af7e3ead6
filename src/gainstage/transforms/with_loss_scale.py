"""Loss scaling for optax loops: the same rules, finite check and skip decision, on pytrees."""

import contextlib
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.dtypes import float0

from gainstage._base import checks
from gainstage._base._jax import Tracer
from gainstage._base.arrays import leaves_and_none
from gainstage._base.warn import warn
from gainstage._scaling import gradients
from gainstage._scaling.finite_check import SMALL, all_finite
from gainstage._scaling.scaled_step import ScaledStep, ScaledStepState
from gainstage._scaling.step_telemetry import check_telemetry
from gainstage._variables.sharding import (
    on_mesh,
    replicated_like,
    typed_like,
    typed_sharding,
)
from gainstage._variables.types import (
    Flag,
    OptState,
    PyTree,
    Scalar,
    Structure,
    Transformation,
    Tree,
)
from gainstage._variables.variable import is_inside
from gainstage._variables.zero_sharding import axis_names, created_over, divided_gradients
from gainstage.rules.loss_scale import (
    FixedLossScale,
    LossScale,
    LossScaleLike,
    as_rule,
    is_default,
    start,
)
from gainstage.transforms.loss_scale_state import (
    LossScaleState,
    refuse_other,
    states_in,
)
from gainstage.transforms.marks import marked, marked_function
from gainstage.transforms.models import kind_of
from gainstage.transforms.optax_checks import MissingArgumentError, check_transformation, updated_by
from gainstage.transforms.plain_gradients import NOT_SCALED, Origin, origin_of
from gainstage.transforms.refusals import (
    cast_state,
    check_leaves,
    half_in,
    statistics_in,
    unrecorded,
    wrong_rule,
    wrong_state,
)
from gainstage.transforms.self_scaled import scaled_by_itself

NO_LOSS = (
    "This update of gainstage.with_loss_scale does not get the loss, which {rule} measures: "
    "without it a NaN in the data looks like an overflow, and lowers the scale. Write "
    "state.apply_gradients(grads, extra, loss=loss), or tx.update(grads, opt_state, params, "
    "value=loss), or take gainstage.DynamicLossScale()."
)
FUNCTIONS = {"value_fn", "grad_fn", "obj_fn"}  # which an update may call for more values
KeyPath = tuple[Any, ...]  # the keys of a leaf in a pytree


def with_loss_scale(
    tx: Transformation,
    loss_scale: LossScaleLike = "dynamic",
    telemetry: bool = False,
    underflow_every: int | None = None,
    shard_state_over: str | Sequence[str] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """An optax transformation that skips non-finite steps and adapts the loss scale.

    It takes the true gradients that `gainstage.value_and_grad` returns. If one of them is not
    finite, the updates are -0.0 and the state of `tx` does not change. `apply_updates` then keeps
    every weight bit for bit; `optax.apply_updates` may flush subnormal weights to 0. Half-precision
    gradients and parameters are upcast for `tx`, which keeps its state in float32. But a parameter
    in float16 loses an update below `2**-11` of it, one in bfloat16 below `2**-8`: keep parameters
    in float32, and let `autocast` compute in half precision.

    Wrap the whole chain, `with_loss_scale(optax.chain(...))`. A transformation before it can hide
    an overflow (`optax.clip`) or store it (`optax.MultiSteps`), and inside of
    `optax.multi_transform` only one group's gradients are checked. `train_step` and
    `value_and_grad` refuse these; a loop that only calls `update` is not seen. A transformation
    after it still runs on a skipped step.

    Args:
        tx: the transformation that turns gradients into updates.
        loss_scale: "dynamic" for `DynamicLossScale()`, a number > 0 for a fixed scale, a
            `LossScale`, which is a rule, or None for none. A step that is not finite is skipped
            with each of them. A loss without float16 and float8 is never scaled.
        telemetry: whether the state records each step for `gainstage.diagnostics.telemetry`, and
            the tensors that overflowed for `gainstage.diagnostics.report`. Adds eight scalars to
            the state, and four integers per parameter.
        underflow_every: the number of steps between histograms of each gradient's magnitudes, from
            which `gainstage.diagnostics.report` computes what float16 loses. Adds 82 numbers per
            parameter to the state; None for no histograms.
        shard_state_over: the mesh axis or axes over which the state of `tx` is sharded, beside the
            sharding of its parameter (ZeRO, stage 1). The weights stay whole, and steps are the
            same up to the rounding of sums over devices. State stays whole if it has not the shape
            of a parameter, has fewer than 1024 elements, or cannot be divided evenly. Do not
            compile `init`: traced parameters name no sharding. `train_step` divides a state again
            that was loaded whole, but not one inside of `optax.chain`: place that by `device_put`.

    Returns:
        A transformation to use instead of `tx`, also inside `optax.chain`. `init` and `update` take
        an NNX or Equinox model as `params` too. `update` takes more arguments. `value=` is the true
        loss, for rules and transformations that need it. `apply_if=` is a bool; False skips the
        update, even on finite gradients. `loss_scale=` is the scale of gradients that `update` has
        to unscale itself.
        `shardings=` is a `NamedSharding` per gradient, for gradients traced on a mesh of Auto axes.

    Raises:
        TypeError: `tx` is not a transformation, `loss_scale` not one of those, or `telemetry` not a
            bool.
        ValueError: from `init`, if `tx` contains another `with_loss_scale`, or `shard_state_over`
            names an axis that the mesh of the parameters does not have.

    Examples:
        >>> import gainstage as gs
        >>> import jax, jax.numpy as jnp, optax
        >>> params = jnp.float32(1.0)
        >>> tx = gs.with_loss_scale(optax.sgd(0.5))
        >>> opt_state = tx.init(params)
        >>> loss, grads = gs.value_and_grad(lambda w: w**2, opt_state)(params)
        >>> updates, opt_state = tx.update(grads, opt_state, params)
        >>> print(loss, grads, gs.transforms.apply_updates(params, updates, opt_state))
        1.0 2.0 0.0

        With the state of Adam sharded over a mesh:

        >>> from jax.sharding import AxisType, NamedSharding, PartitionSpec
        >>> mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        >>> params = jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, PartitionSpec()))
        >>> tx = gs.with_loss_scale(optax.adam(1e-3), shard_state_over="data")
        >>> print(tx.init(params).inner[0].mu.addressable_shards[0].data.shape)
        (8, 64)

    Source: `optax.apply_if_finite`; Micikevicius et al., 2018, arXiv:1710.03740. Sharded state:
    Rajbhandari et al., 2020, arXiv:1910.02054 (ZeRO, stage 1).
    """
    transformation = ScaledTransformation(
        tx,
        loss_scale,
        telemetry,
        underflow_every,
        over=axis_names(shard_state_over),
    )
    return transformation.as_optax()


def skip_nonfinite(
    tx: Transformation, telemetry: bool = False
) -> optax.GradientTransformationExtraArgs:
    """An optax transformation that skips steps whose gradients are not finite, and scales nothing.

    It is `with_loss_scale(tx, loss_scale=None)`, for a loss that needs no scale from outside: one
    in bfloat16 or float32, or one that `gainstage.autocast(loss_fn, dtype, loss_scale=...)` has
    made for a trainer. Any `jax.grad` will do. A skipped step leaves the state of `tx` bit for bit
    as it was, and its updates are -0.0. Wrap the whole chain: `skip_nonfinite(optax.chain(...))`.

    Args:
        tx: a transformation of optax.
        telemetry: as for `with_loss_scale`.

    Returns:
        A transformation to use instead of `tx`.

    Raises:
        TypeError: `tx` is not a transformation, or `telemetry` not a bool.
        ValueError: from `init`, if `tx` contains another one of these.

    Examples:
        >>> import gainstage as gs
        >>> import jax.numpy as jnp, optax
        >>> tx = gs.skip_nonfinite(optax.sgd(0.5))
        >>> state = tx.init(jnp.ones(2))
        >>> for grads in (jnp.array([1.0, jnp.nan]), jnp.array([1.0, 2.0])):
        ...     updates, state = tx.update(grads, state)
        ...     print(updates)
        [-0. -0.]
        [-0.5 -1. ]

    Source: `optax.apply_if_finite`, which applies the step after some that it has skipped.
    """
    return with_loss_scale(tx, None, telemetry)


class ScaledTransformation:
    """A transformation with a loss scale around it: the `init` and `update` of `with_loss_scale`.

    Args:
        tx, loss_scale, telemetry, underflow_every: as for `with_loss_scale`.
        over: the mesh axes of `shard_state_over`.
    """

    def __init__(
        self,
        tx: Transformation,
        loss_scale: LossScaleLike,
        telemetry: bool,
        underflow_every: int | None,
        *,
        over: tuple[str, ...] = (),
    ):
        self.rule: LossScale = as_rule("loss_scale", loss_scale)
        self.is_fixed: bool = isinstance(self.rule, FixedLossScale)
        self.over: tuple[str, ...] = over
        self._is_chosen = not is_default(loss_scale)  # whether the user has chosen the rule
        check_transformation("tx", tx)
        self._tx = with_extra_args(tx)
        telemetry, every = check_telemetry(telemetry, underflow_every)
        self._scaling = ScaledStep(self.rule, telemetry, every)
        self._watches = self.rule != FixedLossScale(1.0)  # gradients times 1 are the true ones
        self._fits = (
            False  # whether an eager update got a state that fits: its loop is checked once
        )
        # What decides what it does: two that are made alike of one `tx` do the same.
        self.key: tuple[Any, ...] = (tx.init, tx.update, self.rule, telemetry, every, over)

    def around(self, tx: Transformation) -> optax.GradientTransformationExtraArgs:
        """Another transformation with the same loss scale and telemetry around it."""
        *_, telemetry, every, over = self.key
        rule: LossScaleLike = self.rule if self._is_chosen else "dynamic"
        return ScaledTransformation(tx, rule, telemetry, every, over=over).as_optax()

    def as_optax(self) -> optax.GradientTransformationExtraArgs:
        """The transformation of optax, whose `update` is a method of this object."""
        return optax.GradientTransformationExtraArgs(self.init, self.update)

    def init(self, params: PyTree) -> LossScaleState:
        """The state before the first step."""
        params = kind_of(params).trainable(params)
        check_leaves(params)
        inner = created_over(self._first, params, self.over) if self.over else self._first(params)
        for wrong in (half_in(params), statistics_in(params, inner)):
            if wrong:
                warn(wrong)
        if states_in(inner):
            raise ValueError(
                "Expected a tx without with_loss_scale in it; got a scale within a scale."
            )
        first = self._scaling.first(start(self.rule), len(leaves_and_none(params)))
        flags = jnp.array(True), jnp.array(True)  # each of its own, as both may be donated
        state = LossScaleState(first.rule_state, inner, flags[0], first.observed, flags[1])
        return on_mesh_of(params, state)

    def _first(self, params: PyTree) -> OptState:
        """The state of `tx` before the first step."""
        return self._tx.init(gradients.upcast(params))

    def update(
        self,
        updates: PyTree,
        state: OptState,
        params: PyTree = None,
        *,
        loss_scale: Scalar | None = None,
        shardings: Sequence[Any] = (),
        param_shardings: Sequence[Any] = (),  # from `train_step`, also if all are replicated
        apply_if: Flag | None = None,
        is_scaled: bool = True,  # from `train_step`
        **extra: Any,
    ) -> tuple[PyTree, LossScaleState]:
        """The updates and the state after a step, as `with_loss_scale` documents them."""
        apply_if = None if apply_if is None else checks.condition("apply_if", apply_if)
        self._check(updates, state, extra)
        is_scaled = is_scaled and self._is_scaled(updates, state, params, loss_scale)
        updates, state, loss_scale = self._marked(updates, state, loss_scale, apply_if)
        if (kind := kind_of(params)).is_model:
            params = kind.chosen(params, updates)
        params = gradients.upcast(params)
        if self.over:
            updates, shardings = divided_gradients(updates, shardings or param_shardings, self.over)
        if jax.device_count() == 1:
            rows, structure = jax.tree.flatten(updates)
            updates = jax.tree.unflatten(structure, gradients.row_major(rows))
        if loss_scale is None:
            grads = updates = gradients.upcast(updates)
        else:
            loss_scale = jnp.asarray(loss_scale, jnp.float32)
            grads = gradients.unscale(updates, loss_scale)
        named, _ = jax.tree_util.tree_flatten_with_path(updates, is_leaf=lambda x: x is None)
        arrays = [
            g if g is not None and jnp.issubdtype(g.dtype, jnp.inexact) else None for _, g in named
        ]
        step: Callable[..., tuple[PyTree, OptState]]
        step, is_finite = functools.partial(self._updated, grads, params, extra), None
        if FUNCTIONS & extra.keys():  # what they return may overflow where the gradients do not
            found = step(None, state.inner)
            step, is_finite = lambda norms, inner: found, all_finite(found[0])
        updates, inner, after, _, applied = self._scaling.step(
            step,
            ScaledStepState(state.rule_state, state.observed),
            state.inner,
            arrays,
            1.0 if loss_scale is None else loss_scale,
            onto=_sums_of_multi_steps(state.inner, named, params),
            shardings=shardings,
            # The barrier stops XLA:CPU from storing squares that `tx` computes too.
            checked=gradients.behind_barriers(arrays, larger_than=SMALL),
            loss=extra.get("value"),
            apply_if=apply_if,
            is_finite=is_finite,
            is_scaled=is_scaled,
        )
        updates = jax.tree.map(
            lambda u: u if u.dtype == float0 else jnp.where(applied, u, -0.0).astype(u.dtype),
            updates,
        )
        rule_state = after.rule_state._replace(scale=marked(after.rule_state.scale, "new"))
        # A bool that is computed with the scale, as a constant would be stored by a kernel.
        was_scaled = rule_state.scale > 0 if is_scaled else state.rule_state.scale <= 0
        return updates, LossScaleState(rule_state, inner, applied, after.observed, was_scaled)

    def _marked(
        self, grads: PyTree, state: LossScaleState, by: Scalar | None, apply_if: Flag | None
    ) -> tuple[PyTree, LossScaleState, Scalar | None]:
        """What an update gets, marked for `lint`."""
        rule_state = state.rule_state
        is_own = by is rule_state.scale
        options = {
            "fixed": self.is_fixed,
            "ruled": self._is_chosen,
            "chosen": apply_if is not None,
            "divides": is_own,  # by this scale
        }
        scale = marked(rule_state.scale, "state", *(word for word in options if options[word]))
        applied = marked(state.applied, "taken")
        state = state._replace(rule_state=rule_state._replace(scale=scale), applied=applied)
        if by is not None:
            by = scale if is_own else marked(jnp.asarray(by, jnp.float32), "by")
        return marked(grads, "gradient"), state, by

    def _updated(
        self,
        grads: PyTree,
        params: PyTree,
        extra: Mapping[str, Any],
        norms: object,
        inner: OptState,
    ) -> tuple[PyTree, OptState]:
        """The updates of `tx` and its state, for true gradients."""
        try:
            updates, new = updated_by(self._tx, grads, inner, params, {"grad": grads, **extra})
        except MissingArgumentError:
            raise
        except Exception as error:  # of any kind, for the state of another transformation
            refuse_other(self._tx, inner, grads, error=error)
            raise
        trees = updates, grads, new, inner
        shapes = [list(map(jnp.shape, jax.tree.leaves(tree))) for tree in trees]
        if shapes[0] != shapes[1] or shapes[2] != shapes[3]:  # they were broadcast
            refuse_other(self._tx, inner, grads, params)
        elif (inside := is_inside()) or not self._fits:
            passes_on = any(map(operator.is_, jax.tree.leaves(new), jax.tree.leaves(inner)))
            if passes_on and not _fits(self._tx, inner, grads):  # the tx may not look at it at all
                refuse_other(self._tx, inner, grads, params)
            self._fits |= not inside
        if any(map(typed_sharding, jax.tree.leaves(inner))):
            new = jax.tree.map(typed_like, new, inner)
        return updates, new

    def _is_scaled(
        self, updates: PyTree, state: LossScaleState, params: PyTree, by: Scalar | None
    ) -> bool:
        """Whether gradients are those of a scaled loss, as far as their program shows it. It warns
        of a loss in float16 that has no scale."""
        origin = Origin.UNKNOWN
        if by is None:
            origin = origin_of(updates, state.rule_state.scale, params)
        if origin is Origin.LOST and self._watches:
            warn(NOT_SCALED)
        return origin is not Origin.UNSCALED

    def _check(self, updates: PyTree, state: OptState, extra: dict[str, Any]) -> None:
        """Refuses a state of another transformation. In `extra`, what functions return is marked
        for `lint`."""
        ours = isinstance(state, LossScaleState)
        scale = getattr(state.rule_state, "scale", None) if ours else None
        if scale is None or not jax.tree_util.all_leaves([scale]):
            raise wrong_state(state)
        own: Structure = jax.tree.structure(self.rule.init())
        if own != jax.tree.structure(state.rule_state) and not self.is_fixed:
            raise wrong_rule(self.rule, state.rule_state)
        if self._scaling.telemetry and not (
            state.observed and (state.observed.exponents or not self._scaling.every)
        ):
            raise unrecorded("underflow_every" if state.observed else "telemetry")
        if self._watches:
            if getattr(scale, "dtype", None) in (jnp.float16, jnp.bfloat16):
                raise cast_state(scale.dtype)
            if "grad_fn" in extra:
                extra["grad_fn"] = marked_function(extra["grad_fn"], "grad_fn")
            if "value_fn" in extra:
                extra["value_fn"] = scaled_by_itself(extra["value_fn"], scale)
        if "loss" in self.rule.measures and extra.get("value") is None:
            warn(NO_LOSS.format(rule=type(self.rule).__name__))


def _fits(tx: Transformation, state: OptState, grads: PyTree) -> bool:
    """Whether `tx.init` makes such a state of such gradients; False too where it cannot tell."""
    with contextlib.suppress(Exception):  # `refuse_other` looks at what is not as usual
        kinds = jax.eval_shape(tx.init, grads), state
        made, given = (jax.tree.map(lambda x: x.shape, tree) for tree in kinds)
        return bool(made == given)
    return False


def with_extra_args(tx: Transformation) -> optax.GradientTransformationExtraArgs:
    """`optax.with_extra_args_support`, which drops what `optax.MultiSteps` passes on."""
    if isinstance(tx, optax.MultiSteps):
        update: Any = tx.update  # its type says that it takes its own state
        return optax.GradientTransformationExtraArgs(tx.init, update)
    return optax.with_extra_args_support(cast(optax.GradientTransformation, tx))


def transformation_of(tx: Transformation) -> ScaledTransformation | None:
    """What `with_loss_scale` has made `tx` of, None for a transformation of another library."""
    owner = getattr(tx.update, "__self__", None)
    return owner if isinstance(owner, ScaledTransformation) else None


def _sums_of_multi_steps(
    state: OptState, named: Sequence[tuple[KeyPath, jax.Array | None]], params: PyTree
) -> Sequence[jax.Array | None]:
    """The accumulators of `optax.MultiSteps`, one per gradient, with the gradients' signs.

    optax adds gradients up, or moves a mean by their difference from it. Neither can overflow
    unless the sum of the magnitudes does.
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, optax.MultiStepsState))
    sums: dict[KeyPath, jax.Array] = {}
    for node in nodes:
        if isinstance(node, optax.MultiStepsState):
            sums |= jax.tree_util.tree_flatten_with_path(node.acc_grads)[0]
    if not sums:
        return ()

    def total(path: KeyPath, gradient: jax.Array | None) -> jax.Array | None:
        if gradient is None:
            return None
        if path not in sums or sums[path].shape != gradient.shape:  # `_updated` refuses these
            return jnp.zeros_like(gradient)
        return jnp.copysign(sums[path], gradient)

    return [total(path, gradient) for path, gradient in named]


def on_mesh_of(params: PyTree, state: Tree) -> Tree:
    """The state, with arrays that are not on a mesh replicated over the parameters' mesh.

    Slots already have their parameter's sharding, if `params` are arrays that are not traced."""
    everywhere = replicated_like(params)
    if everywhere is None or any(isinstance(x, Tracer) for x in jax.tree.leaves((params, state))):
        return state
    return jax.tree.map(lambda x: x if on_mesh(x) else jax.device_put(x, everywhere), state)
