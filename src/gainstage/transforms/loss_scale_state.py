"""The state of `with_loss_scale`, and the search for it in an optax state."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from gainstage._base.arrays import one_more
from gainstage._base.checks import brief
from gainstage._scaling.step_telemetry import Observed
from gainstage._variables.types import OptState, PyTree, RuleState, Transformation
from gainstage._variables.variable import Variable


class LossScaleState(NamedTuple):
    """The state of `with_loss_scale`."""

    rule_state: RuleState
    inner: OptState  # the state of the wrapped transformation
    applied: Any = True  # bool scalar: whether the last step was applied, True before the first
    observed: Any = None  # the telemetry, if enabled
    is_scaled: Any = (
        True  # bool scalar: whether the last step used the scale, True before the first
    )


def loss_scale_state(opt_state: OptState) -> LossScaleState:
    """The only state of `with_loss_scale` inside an optax state; raises a ValueError otherwise."""

    states = states_in(opt_state)
    if len(states) != 1:
        raise ValueError(
            f"Expected exactly one state of gainstage.with_loss_scale(tx).init(params) in "
            f"opt_state; got {len(states)} in {_what_it_is(opt_state)}. "
            f"{_remedy(opt_state, states)}"
        )
    state = states[0]
    if not hasattr(state.rule_state, "scale"):
        raise no_rule_state(state.rule_state)
    return state if isinstance(state.rule_state.scale, jax.Array) else _unboxed(state)


def no_rule_state(value: object) -> TypeError:
    """The error for something else in the place of a rule's state."""
    return TypeError(
        f"Expected the state of a rule in opt_state.rule_state; got a {type(value).__name__}. "
        f"For another scale, write opt_state._replace(rule_state=opt_state.rule_state._replace("
        f"scale=jnp.float32(scale))). For a dictionary of torch: "
        f"gainstage.interop.importers.from_torch(state_dict)."
    )


def _what_it_is(tree: PyTree) -> str:
    """What a user passed, in a few words."""
    if isinstance(tree, optax.GradientTransformation):
        return "a transformation"
    name = type(tree).__name__
    return brief(repr(tree)) if isinstance(tree, int | float | str) else f"an object of type {name}"


def _remedy(tree: PyTree, found: Sequence[LossScaleState]) -> str:
    """What to write instead of something that has no state of `with_loss_scale`, or several."""
    if found:
        return "One loss has one scale: with_loss_scale(optax.multi_transform(...))."
    if isinstance(tree, optax.GradientTransformation):
        return "Pass its state: opt_state = tx.init(params)."
    if any(base.__module__.startswith("keras.") for base in type(tree).__mro__):
        return (
            "It is an optimizer of Keras: read its loss_scale, and pass "
            "gainstage.interop.keras.LogLossScale() to fit."
        )
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: type(x).__module__.startswith("optax"))
    if not any(type(node).__module__.startswith("optax") for node in nodes):
        return "It has no state of optax: are the arguments in another order?"
    return (
        "Wrap the transformation: tx = gainstage.with_loss_scale(tx); for steps without loss "
        "scaling, skip_nonfinite(tx)."
    )


# What keeps or hides a non-finite gradient around `with_loss_scale`, by the name of its state: what
# to write instead, and why.
_AROUND = {
    "MultiStepsState": (
        "optax.MultiSteps(tx, k)",
        "A non-finite microbatch would stay in its sum.",
    ),
    "ApplyIfFiniteState": ("tx", "It skips non-finite steps itself."),
    "MaskedState": ("optax.masked(tx, mask)", "It checks only the gradients that it gets."),
    "PartitionState": (
        "optax.multi_transform(...)",
        "It checks only the gradients that it gets, those of one group.",
    ),
    "MechanicState": (
        "optax.contrib.mechanize(tx)",
        "A skipped step would enter its sums.",
    ),
    "SAMState": ("optax.contrib.sam(...)", "A skipped step would enter its cache."),
    "ScheduleFreeState": (
        "optax.contrib.schedule_free(tx, learning_rate)",
        "A skipped step would enter its average.",
    ),
    "LookaheadState": (
        "optax.lookahead(tx, sync_period, slow_step_size)",
        "It would count a skipped step.",
    ),
    "ConditionallyTransformState": (
        "optax.conditionally_transform(tx, condition)",
        "A step without tx would not be checked.",
    ),
}


def state_to_scale_by(opt_state: OptState, *, in_any_place: bool = False) -> LossScaleState:
    """`loss_scale_state`, for code that scales a loss by it and lets it decide on the step.

    Args:
        opt_state: an optax state.
        in_any_place: whether something may stand before it in a chain.

    Raises:
        ValueError: as `loss_scale_state`, or a transformation around it can hide an overflow.
    """
    whole = isinstance(opt_state, LossScaleState) and isinstance(opt_state.applied, jax.Array)
    if whole and hasattr(opt_state.rule_state, "scale"):
        return opt_state  # there is nothing around it, and nothing boxed
    state, node = loss_scale_state(opt_state), opt_state
    while not isinstance(node, LossScaleState):
        kind = type(node).__name__
        if kind in _AROUND:
            instead, why = _AROUND[kind]
            raise ValueError(
                f"Expected with_loss_scale around all; got its state in a {kind}. Write "
                f"gainstage.with_loss_scale({instead}). {why}"
            )
        parts = list(node.values() if isinstance(node, Mapping) else _parts(node))
        place = next((i for i, part in enumerate(parts) if states_in(part)), None)
        if place is None:
            break
        is_later = place > 0 and (type(node) is tuple or isinstance(node, Mapping))
        if is_later and not in_any_place:
            raise ValueError(
                f"Expected with_loss_scale around a chain, or first in it; got it as number "
                f"{place + 1}. What comes before it, such as optax.clip, can hide an overflow. "
                f"Write gainstage.with_loss_scale(optax.chain(...))."
            )
        node = parts[place]
    return state


def _parts(node: OptState) -> Sequence[Any]:
    """The parts of a tuple or another node."""
    return node if isinstance(node, tuple) else list(getattr(node, "__dict__", {}).values())


@functools.singledispatch
def applied_in(opt_state: OptState) -> jax.Array | Variable:
    """Whether the last step was applied, by an optax state; optimizers are registered by theirs."""
    return loss_scale_state(opt_state).applied


@functools.singledispatch
def observed_in(opt_state: OptState) -> Observed:
    """The telemetry in an optax state; optimizers are registered by their own module."""
    observed: Observed | None = loss_scale_state(opt_state).observed
    if observed is None:
        raise ValueError(
            "Expected telemetry=True of the state; got one without it. Write "
            "gainstage.TrainState.create(params, tx, telemetry=True), or, in a chain of your own, "
            "gainstage.with_loss_scale(tx, telemetry=True)."
        )
    return observed


def states_in(tree: PyTree) -> list[LossScaleState]:
    """All states of `with_loss_scale` inside an optax state."""
    if isinstance(tree, LossScaleState):
        return [tree]
    nodes = jax.tree.leaves(tree, is_leaf=_is_state)
    return [node for node in nodes if _is_state(node)]


def used_scale(opt_state: OptState) -> jax.Array:
    """The loss scale of the last step, 1 if it used none; before the first that of the rule."""
    state = loss_scale_state(opt_state)
    return jnp.where(state.is_scaled, state.rule_state.scale, 1.0)


def retried(opt_state: OptState) -> OptState:
    """The state after a skipped step that is taken again: its telemetry counts a retry instead."""

    def changed(state: LossScaleState) -> LossScaleState:
        if state.observed is None:
            return state
        info = state.observed.info
        skipped, again = info.skipped_steps - 1, one_more(info.retried_steps)
        info = info._replace(skipped_steps=skipped, retried_steps=again)
        return state._replace(observed=state.observed._replace(info=info))

    return _with_states(changed, opt_state)


def with_first_scale_if_skipped(last: OptState, first: OptState) -> OptState:
    """The state after the last try of a step, with the loss scale after the first if none was
    applied."""
    return with_rule_state_unless(loss_scale_state(last).applied, last, first)


def with_rule_state_unless(stays: jax.Array, opt_state: OptState, other: OptState) -> OptState:
    """An optax state, with the loss scale and the counts of another one unless `stays` is True."""
    (old,) = states_in(other)

    def changed(state: LossScaleState) -> LossScaleState:
        chosen = functools.partial(jnp.where, stays)
        scale = jax.tree.map(chosen, state.rule_state, old.rule_state)
        return state._replace(rule_state=scale)

    return _with_states(changed, opt_state)


def with_scale(opt_state: OptState, scale: ArrayLike) -> OptState:
    """An optax state with another loss scale, which lies where the old one does."""

    def changed(state: LossScaleState) -> LossScaleState:
        old = state.rule_state
        new = jnp.zeros_like(old.scale) + jnp.asarray(scale, jnp.float32)
        return state._replace(
            rule_state=old._replace(scale=new), is_scaled=jnp.ones_like(state.is_scaled)
        )

    return _with_states(changed, opt_state)


def _with_states(
    changed: Callable[[LossScaleState], LossScaleState], opt_state: OptState
) -> OptState:
    """An optax state with `changed` applied to each state of `with_loss_scale` in it."""

    return jax.tree.map(
        lambda node: changed(node) if _is_state(node) else node, opt_state, is_leaf=_is_state
    )


def _is_state(node: object) -> bool:
    return isinstance(node, LossScaleState)


def refuse_other(
    tx: Transformation, state: OptState, *like: PyTree, error: Exception | None = None
) -> None:
    """Raises a ValueError if `tx.init` makes another state of each of the trees.

    Args:
        tx: the transformation that is to update the state.
        state: the state, perhaps of another chain or for other parameters.
        like: the gradients, and the parameters if there are any.
        error: what `tx` raised.
    """
    differ = list[str]()
    for tree in like:
        with contextlib.suppress(Exception):  # `tx` may have a mask, which fits its parameters only
            shapes, made = (
                {jax.tree_util.keystr(path): getattr(leaf, "shape", ()) for path, leaf in leaves}
                for leaves in (
                    jax.tree_util.tree_leaves_with_path(each)
                    for each in (state, jax.eval_shape(tx.init, tree))
                )
            )
            if shapes == made:
                return
            differ = differ or sorted(n for n in shapes | made if shapes.get(n) != made.get(n))
    if differ:
        raise ValueError(
            f"opt_state was made by another chain than tx, or for other parameters: they differ in "
            f"{brief(differ)}. Use the chain that made it, or start with opt_state = "
            f"tx.init(params). If `using` selects some parameters of a model, pass these alone: "
            f"tx.init(nnx.state(model, nnx.LoRAParam)); for all parameters leave `using` out."
        ) from error


class StepScalars(NamedTuple):
    """The scalars that describe a state of `with_loss_scale`."""

    rule_state: RuleState
    applied: jax.Array
    is_scaled: jax.Array
    info: Any  # of the telemetry, if there is some


def without_scalars(opt_state: OptState) -> tuple[OptState, list[StepScalars]]:
    """Splits an optax state into the arrays of a step, and the scalars that describe it. A program
    that donates the first leaves the second readable."""
    scalars = list[StepScalars]()

    def split(state: LossScaleState) -> LossScaleState:
        stats = state.observed
        own = state.rule_state, state.applied, state.is_scaled
        scalars.append(StepScalars(*own, stats and stats.info))
        stats = stats and stats._replace(info=None)
        return state._replace(rule_state=None, applied=None, is_scaled=None, observed=stats)

    return _with_states(split, opt_state), scalars


def _unboxed(state: LossScaleState) -> LossScaleState:
    """The scalars of a state, out of the boxes that a library such as Flax puts them in."""

    def unboxed(x: Any) -> Any:
        if x is None or hasattr(x, "_fields"):
            return x and type(x)(*map(unboxed, x))
        return jax.tree.leaves(x)[0]

    more = map(unboxed, (state.applied, state.observed, state.is_scaled))
    return LossScaleState(unboxed(state.rule_state), state.inner, *more)
