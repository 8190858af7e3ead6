"""A whole step of a train state as one compiled program."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVarTuple, overload

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.tree_util import default_registry, treedef_tuple

from gainstage._base import checks
from gainstage._base.arrays import (
    ARRAYS,
    Static,
    joined,
    leaves_and_none,
    partition,
    unshared,
)
from gainstage._base.dead_run import DeadRunWatch
from gainstage._base.warn import warn
from gainstage._scaling import gradients
from gainstage._scaling.retry_loop import NO_RETRY, Attempt, may_help, try_again
from gainstage._variables.bridge import reruns
from gainstage._variables.sharding import (
    SUMMED,
    knows_what_varies,
    on_mesh,
    on_one_mesh,
    replicated_like,
    summed_over,
    tell_if_whole,
)
from gainstage._variables.types import Aux, OptState, Params, PyTree, Scalar, Structure, Using
from gainstage._variables.variable import is_inside
from gainstage._variables.zero_sharding import divided_state
from gainstage.rules.loss_scale import LossScale
from gainstage.transforms import models, nnx_objects
from gainstage.transforms.audit import BOUNDS, AuditResult, Given, Sides, check_cast, checked_bounds
from gainstage.transforms.audited_run import AuditedRun, Audits
from gainstage.transforms.loss_scaled import transformation_of
from gainstage.transforms.loss_scaled_state import (
    LossScaledState,
    loss_scaled_state,
    retried,
    state_to_scale_by,
    states_in,
    with_first_scale_if_skipped,
    without_scalars,
)
from gainstage.transforms.nnx_objects import Graph, partition_model
from gainstage.transforms.refusals import explain_step, needless_scale
from gainstage.transforms.train_state import TrainState, check_like, key_of, with_parts
from gainstage.transforms.updates import selected, updated
from gainstage.transforms.value_and_grad import refuse_self_scaled, scaled_value_and_grad

DRIFTS = (
    "gainstage.train_step inside of jax.pmap, or of jax.shard_map with check_vma=False: each "
    "device takes a step with its own gradients, and nothing averages them. For one model on all "
    "devices, call it outside, with the batch sharded over a mesh: jax.device_put(batch, "
    'NamedSharding(mesh, PartitionSpec("data"))). For a model per device, silence this warning: '
    'warnings.filterwarnings("ignore", message="gainstage.train_step inside").'
)
More = TypeVarTuple("More")  # the type of aux, if there is one


@overload
def train_step(
    loss_fn: Callable[..., Scalar | tuple[Scalar, Any]],
    *,
    has_aux: Literal[False] = False,
    using: Using | None = ...,
    donate: bool = True,
    retries: int = 0,
    audit_every: int | None = None,
    audit_bounds: Sequence[float] = BOUNDS,
) -> "TrainStep[()]": ...


@overload
def train_step(
    loss_fn: Callable[..., tuple[Scalar, Aux]],
    *,
    has_aux: Literal[True],
    using: Using | None = ...,
    donate: bool = True,
    retries: int = 0,
    audit_every: int | None = None,
    audit_bounds: Sequence[float] = BOUNDS,
) -> "TrainStep[Aux]": ...


@overload
def train_step(
    loss_fn: Callable[..., tuple[Scalar, Any, Aux]],
    *,
    has_aux: Literal[True],
    using: Using | None = ...,
    donate: bool = True,
    retries: int = 0,
    audit_every: int | None = None,
    audit_bounds: Sequence[float] = BOUNDS,
) -> "TrainStep[Aux]": ...


@overload
def train_step(
    loss_fn: Callable[..., Any],
    *,
    has_aux: Literal[True],
    using: Using | None = ...,
    donate: bool = True,
    retries: int = 0,
    audit_every: int | None = None,
    audit_bounds: Sequence[float] = BOUNDS,
) -> "TrainStep[Any]": ...


@overload
def train_step(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool,
    using: Using | None = ...,
    donate: bool = True,
    retries: int = 0,
    audit_every: int | None = None,
    audit_bounds: Sequence[float] = BOUNDS,
) -> "TrainStep[*tuple[Any, ...]]": ...


@checks.explained(
    "Write state = gainstage.TrainState.create(params, tx), step = gainstage.train_step(loss_fn), "
    "and state, loss = step(state, *batch)."
)
def train_step(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    using: Using | None = None,
    donate: bool = True,
    retries: int = 0,
    audit_every: int | None = None,
    audit_bounds: Sequence[float] = BOUNDS,
) -> Any:
    """Returns a compiled step of a `TrainState`: scaled loss, gradients, check, update.

    It computes the same as `value_and_grad` and `apply_gradients` of a `TrainState` inside of
    `jax.jit`. On a CPU it is faster than that, because it stores no unscaled gradients; on a GPU
    both move the same bytes. If an argument is on a mesh, parameters and state keep their
    shardings, and those without one are replicated.

    Args:
        loss_fn: a function `(params, *batch)` that returns a scalar loss, or (loss, aux). `params`
            may be an NNX or Equinox model. For a state with `extra` it is `(params, extra,
            *batch)`, and returns (loss, extra), or (loss, extra, aux).
        has_aux: whether `loss_fn` returns aux.
        using: the function that differentiates, by default as for `value_and_grad`.
        donate: whether a step donates its state, which is then deleted. An array
            that is there twice, or also in the batch, is copied first. The loss scale, `step` and
            the numbers of the telemetry are not donated, so you may read them later; `report` needs
            the newest state. Nothing is donated under `jax_debug_nans` and `jax_debug_infs`. If a
            step is interrupted before its results are assigned, they are lost: restart from a
            checkpoint.
        retries: the largest number of times that a step with a non-finite gradient is taken again
            with the same batch, >= 0, at the scale that the rule has lowered. There is no retry if
            the loss is not finite, or the rule keeps its scale. If none is applied, the scale is
            that after one skipped step. The telemetry counts `retried_steps`. No copy of parameters
            or batch is made for it. With retries, the host reads one bit at each step on a GPU.
        audit_every: an integer >= 1: the first step, and then each that many, is compared with
            float32 before it is taken, as by `gainstage.audit`; None for no audits. It is a program
            of its own, so other steps are what they are without it, and no step waits for a result.
            An error past the bounds is a warning at a later step, once, with the name of the
            tensor. Unless the loss itself is off, and an error is past three times its bound, two
            of the next steps are audited too, and must be past a bound as well. `step.audit` is the
            audit of the last step, or None; `step.audits` has their `count`, the mean difference of
            the loss (`bias`) and its `spread`, and the `last`. `loss_fn` must be from `autocast`.
            If float32 does not fit into memory, half, a quarter or an eighth of the batch is used.
        audit_bounds: the largest errors of the loss, of all gradients together and of one tensor,
            by default 1 %, 10 % and 50 %: three numbers > 0.

    Returns:
        A function `step(state, *batch)` that returns the new `TrainState`, the true loss in
        float32, and `aux` if there is one. It takes any state. `step.lower(state, *batch)` lowers
        the program, also for `jax.ShapeDtypeStruct` arguments.

    Raises:
        TypeError: `loss_fn` is not callable, or has a `loss_scale` of its own, `donate` is not a
            bool, or `retries` or `audit_every` not a number; from `step`, the first argument is no
            `TrainState`, or the loss or a parameter no array.
        ValueError: `retries` is not an integer >= 0, `audit_every` none >= 1, or `audit_bounds` are
            out of range; `audit_every` is given, and `loss_fn` is not from `autocast`; from `step`,
            a transformation around `loss_scaled` could hide an overflow.

    Examples:
        >>> import gainstage as gs
        >>> import jax.numpy as jnp, optax
        >>> state = gs.TrainState.create(jnp.ones(2), optax.sgd(0.25))
        >>> step = gs.train_step(lambda w, x: ((w * x) ** 2).sum())
        >>> for x in (1.0, 1.0):
        ...     state, loss = step(state, x)
        >>> print(loss, state.params)
        0.5 [0.25 0.25]

    Source: `jax.value_and_grad`; `optax.apply_updates`.
    """
    if not callable(loss_fn):
        raise TypeError(
            f"Expected a function for loss_fn; got {checks.brief(loss_fn)}. The optimizer is part "
            f"of the state: gainstage.TrainState.create(params, tx)."
        )
    if using is not None and not callable(using):
        raise TypeError(
            f"Expected a function such as jax.value_and_grad for using; got {checks.brief(using)}."
        )
    refuse_self_scaled(loss_fn, "train_step")
    donates, has_aux = checks.flag("donate", donate), checks.flag("has_aux", has_aux)
    retries = checks.integer("retries", retries, low=0)
    bounds = checked_bounds("audit_bounds", audit_bounds)
    audits = None
    if audit_every is not None:
        every = checks.integer("audit_every", audit_every, low=1)
        check_cast("loss_fn", loss_fn, "train_step(gs.autocast(loss_fn), audit_every=...)")
        audits = AuditedRun(Sides(loss_fn, has_aux, using), every, bounds)
    found: Any = TrainStep(_Options(loss_fn, has_aux, using, donates, retries), audits)
    return found


class _Options(NamedTuple):
    """The arguments of `train_step`."""

    loss_fn: Callable[..., Any]
    has_aux: bool
    using: Using | None
    donates: bool
    retries: int


class TrainStep(Generic[*More]):
    """The compiled step that `train_step` returns."""

    def __init__(self, options: _Options, audits: AuditedRun | None):
        self._options, self._audits = options, audits
        self._compiled: dict[Any, _CompiledStep] = {}  # by transformation

    def __call__(
        self, state: TrainState[Params], *batch: PyTree, **named: PyTree
    ) -> tuple[TrainState[Params], jax.Array, *More]:
        """Takes a step; returns the new state, the true loss, and `aux` if there is one."""
        if named:
            raise TypeError(
                f"Expected the batch by position; got {', '.join(named)} by name. Write "
                f"step(state, {', '.join(named)})."
            )
        returned: Any = getattr(state, "_returned", None)
        if returned is not None and returned.step.options is self._options:
            found: Any = returned.step.take(state, batch)
        else:
            found = self._of(state).take(state, batch)
        return found

    def lower(self, state: TrainState[Any], *batch: PyTree) -> jax.stages.Lowered:
        """Returns the lowered program, for arrays or for `jax.ShapeDtypeStruct`s."""
        return self._of(state).lowered(state, batch)

    def _of(self, state: object) -> "_CompiledStep":
        """The step of the transformation of a state."""
        if not isinstance(state, TrainState):
            raise TypeError(
                f"Expected a TrainState first, as in state, loss = step(state, *batch); got "
                f"{checks.brief(state)}. Write state = gainstage.TrainState.create(params, tx)."
            )
        if state.tx is None:
            raise ValueError(
                "Expected a state with its transformation, which no pickle holds. Write "
                "state = state.replace(tx=other.tx), where other is a new state of the same "
                "parameters."
            )
        key = key_of(state.tx)
        if key not in self._compiled:
            self._compiled[key] = _CompiledStep(self._options, state.tx, self._audits)
        return self._compiled[key]

    @property
    def audit(self) -> AuditResult | None:
        """The audit of the last step, with `audit_every`; None if it was not audited."""
        return None if self._audits is None else self._audits.current

    @property
    def audits(self) -> Audits:
        """The audits so far, with `audit_every`. To read it is to wait for the last one."""
        if self._audits is None:
            return Audits()
        self._audits.finish()
        return self._audits.found


@dataclasses.dataclass(frozen=True)
class Carried:
    """What steps carry on, without its arrays: those of the model, of the extra and of the rest."""

    model: Static | Graph
    count: int  # of the arrays of the model
    extra: Static
    first: int  # of the arrays of the rest, which come after those of the extra
    rest: Structure  # of (opt_state, step)

    def combine(self, arrays: Sequence[Any]) -> tuple[Any, Any]:
        """The model and the extra, with the first of these arrays."""
        model = self.model.combine(arrays[: self.count])
        return model, self.extra.combine(arrays[self.count : self.first])


class _Program:
    """The compiled program of all states that differ in the values of their arrays alone."""

    def __init__(
        self,
        run: Callable[..., Any],
        carried: Carried,
        donates: bool,
        shardings: tuple[Any, ...] | None,
        has_aux: bool,
    ):
        self.carried, self.donates, self.shardings = carried, donates, shardings
        self._fills = bool(carried.model.others)
        self.count = carried.first + carried.rest.num_leaves  # of the arrays
        opt_state, step = carried.rest.unflatten(range(carried.first, self.count))
        kept = {step, *jax.tree.leaves(without_scalars(opt_state)[1])}
        self.donated = [i for i in range(self.count) if i not in kept] if donates else []
        # The structure of (params, extra, (opt_state, step)) after a step; known when it is traced.
        self.result: Any = None
        self.repeats = False  # whether that is the structure before it too
        options: dict[str, Any] = {"donate_argnums": self.donated}
        if shardings is not None:
            options["out_shardings"] = (list(shardings), *[None] * (3 + has_aux))
        self.run = jax.jit(functools.partial(run, self), **options)

    def returns(self, rest: PyTree) -> list[Any]:
        """Notes the structure of the (opt_state, step) that it returns; returns their arrays."""
        leaves, structure = jax.tree.flatten(rest)
        parts = self.carried.model.structure, self.carried.extra.structure, structure
        self.result, self.repeats = treedef_tuple(parts), structure == self.carried.rest
        return leaves

    def leaves(self, arrays: list[Any]) -> list[Any]:
        """The leaves of what it returns, with these arrays and all that is no array."""
        if not self._fills:
            return arrays
        count = self.carried.count
        return [*self.carried.model.placed(arrays[:count]), *arrays[count:]]

    def shares(self, arrays: Sequence[Any], others: Sequence[Any]) -> bool:
        """Whether one of the arrays that it donates is among others too."""
        found = {*map(id, others)}
        return not found.isdisjoint(map(id, arrays)) and any(
            id(arrays[i]) in found for i in self.donated
        )


class _Returned(NamedTuple):
    """What a step has returned as a state, which is noted in that state."""

    step: "_CompiledStep"
    program: _Program
    leaves: list[Any]  # of (params, extra, (opt_state, step))
    arrays: list[Any]  # those of the leaves that the program takes


_KINDS = (*ARRAYS, jax.ShapeDtypeStruct)


class _CompiledStep:
    """The compiled step of all states with one transformation."""

    def __init__(
        self,
        options: _Options,
        tx: optax.GradientTransformationExtraArgs,
        audits: AuditedRun | None,
    ):
        scaled = transformation_of(tx)  # None for one of another library
        self.options = options
        self._loss_fn, self._has_aux, self._using, self._donates, self._retries = options
        self._tx, self._audits = tx, audits
        if self._retries and scaled and scaled.is_fixed:
            warn(NO_RETRY)
        self._over = scaled.over if scaled else ()  # the mesh axes of `shard_state_over`
        self._is_fixed = scaled is not None and scaled.is_fixed
        self._watch = DeadRunWatch(_lowest_of(scaled.rule) if scaled else 0.0)
        self._told = False  # of a loss that varies by device
        self._is_known = False  # whether the first program and its batch were looked at
        self._programs: dict[Any, _Program] = {}

    def take(self, state: TrainState[Any], batch: tuple[PyTree, ...]) -> tuple[Any, ...]:
        """Takes a step."""
        opt_state, inside = state.opt_state, is_inside()
        self._watch.look(lambda: _scale_in(opt_state))
        donates = self._donates and not reruns() and not inside
        try:
            if self._audits is not None and inside:
                self._audits.tell_inside()
            elif self._audits is not None:
                self._audits.before(lambda: _given(state, batch))
            known = None if inside else self._known(state, batch, donates)
            program, arrays = known or self._prepared(state, batch, donates, inside)
            arrays, loss, *aux, changed, spoiled = program.run(*arrays, *batch)
        except (TypeError, ValueError, RuntimeError) as error:
            explain_step(error, state, batch)
            raise
        if changed:
            nnx_objects.change(batch, changed)
        leaves = program.leaves(arrays)
        params, extra, (opt_state, step) = program.result.unflatten(leaves)
        params = program.carried.model.built(params)
        state = TrainState(params, opt_state, extra, step, self._tx)
        if not inside:
            scaled = states_in(opt_state)[0]
            self._watch.see(scaled.applied, loss, scale=scaled.rule_state.scale, spoiled=spoiled)
            vars(state)["_returned"] = _Returned(self, program, leaves, arrays)
        return state, loss, *aux

    def _known(
        self, state: TrainState[Any], batch: tuple[PyTree, ...], donates: bool
    ) -> tuple[_Program, list[Any]] | None:
        """The program and the arrays of a state that this step has returned, if nothing of it was
        changed in place, and the batch has none of its arrays and no other mesh; else None."""
        if state._returned is None:
            return None
        step, program, known, arrays = state._returned
        if step is not self or program.donates is not donates or not program.repeats:
            return None
        whole = state.params, state.extra, (state.opt_state, state.step)
        leaves, structure = default_registry.flatten(whole)
        if structure != program.result or not all(map(operator.is_, leaves, known)):
            return None
        others, _ = default_registry.flatten(batch)
        moves = program.shardings is None and any(map(on_mesh, others))
        return None if moves or program.shares(arrays, others) else (program, arrays)

    def _prepared(
        self, state: TrainState[Any], batch: tuple[PyTree, ...], donates: bool, inside: bool
    ) -> tuple[_Program, list[Any]]:
        """The program for any state, and its arrays, on one mesh and none of them donated twice."""
        opt_state = state.opt_state
        if inside:
            self._warn_inside()
        elif self._over and state._returned is None:
            opt_state = self._divided(state.params, opt_state, batch)
        given, carried = self._split(state, (opt_state, jnp.asarray(state.step)))
        arrays, shardings = on_one_mesh(given, batch)
        program = self._program_for(carried, donates, shardings)
        if donates:
            arrays = _unshared(program, arrays, jax.tree.leaves(batch), state._returned)
        if not (self._is_known or inside):  # in the first call
            self._is_known = True
            traced = program.run.trace(*arrays, *batch).jaxpr
            needless = None if self._is_fixed else needless_scale(traced)
            if needless:
                warn(needless)
            if shardings is not None:
                tell_if_whole(given[: carried.first], batch, traced)
        return program, arrays

    def _warn_inside(self) -> None:
        """Warns of a call inside of another trace that is hardly what was meant."""
        if not knows_what_varies(jax.sharding.get_abstract_mesh()):
            warn(DRIFTS)

    def lowered(self, state: TrainState[Any], batch: tuple[PyTree, ...]) -> jax.stages.Lowered:
        """The lowered program, for arrays or for `jax.ShapeDtypeStruct`s."""
        arrays, carried = self._split(state, (state.opt_state, state.step))
        arrays, shardings = on_one_mesh(arrays, batch)
        return self._program_for(carried, self._donates, shardings).run.lower(*arrays, *batch)

    def _program_for(
        self, carried: Carried, donates: bool, shardings: tuple[Any, ...] | None
    ) -> _Program:
        """The program that returns the parameters and the state with these shardings."""
        key = carried, donates, shardings
        if key not in self._programs:
            self._programs[key] = _Program(self._run, *key, self._has_aux)
        return self._programs[key]

    def _divided(self, params: PyTree, opt_state: OptState, batch: PyTree) -> OptState:
        """A state of `shard_state_over`, divided as by `init` where its arrays are whole."""
        everywhere = replicated_like((params, opt_state, batch))
        if everywhere is None or not isinstance(opt_state, LossScaledState):
            return opt_state
        params = models.trainable(params)
        inner = divided_state(opt_state.inner, params, self._over, everywhere)
        return opt_state._replace(inner=inner)

    def _split(self, state: TrainState[Any], rest: PyTree) -> tuple[list[Any], Carried]:
        """The arrays of a state with this (opt_state, step), and what steps carry on of it."""
        arrays, model = partition_model(state.params, _KINDS)
        is_plain = self._using in (None, jax.value_and_grad)
        if is_plain and (others := model.others) and not models.library(state.params):
            raise TypeError(
                f"Expected arrays in params; got {others[0]!r}. Make it an array, or use a "
                f"function that skips such leaves: using=equinox.filter_value_and_grad."
            )
        more, extra = partition(state.extra, _KINDS)
        if extra.others:
            raise TypeError(
                f"Expected arrays in extra; got {extra.others[0]!r}. Make it an array, or bind it "
                f"to the loss: functools.partial(loss_fn, name=value)."
            )
        structure: Structure
        leaves, structure = jax.tree.flatten(rest)
        first = len(arrays) + len(more)
        return [*arrays, *more, *leaves], Carried(model, len(arrays), extra, first, structure)

    def _run(self, program: _Program, *given: Any) -> tuple[Any, ...]:
        carried, batch = program.carried, given[program.count :]
        arrays, rest = list(given[: carried.first]), given[carried.first :]
        states = carried.rest.unflatten(rest[: carried.rest.num_leaves])
        shardings = (program.shardings or ())[: carried.count]  # those of the model
        if not all(isinstance(sharding, NamedSharding) for sharding in shardings):
            shardings = ()
        arrays, states, *results = self._tried(shardings, carried, arrays, states, batch)
        return [*arrays, *program.returns(states)], *results

    def _tried(
        self,
        shardings: Sequence[Any],
        carried: Carried,
        arrays: list[Any],
        states: tuple[OptState, jax.Array],
        batch: Sequence[PyTree],
    ) -> tuple[Any, ...]:
        """Takes a step, with its retries."""
        first = self._take(shardings, carried, arrays, states, batch)
        if not self._retries:
            return first

        def tried(taken: tuple[Any, ...], before: OptState) -> Attempt:
            old, new = (loss_scaled_state(state) for state in (before, taken[1][0]))
            scales = old.rule_state.scale, new.rule_state.scale
            return Attempt(may_help(new.applied, taken[2], *scales), taken)

        def again(skipped: tuple[Any, ...]) -> Attempt:
            arrays, (before, step) = skipped[:2]
            before = retried(before)
            return tried(self._take(shardings, carried, arrays, (before, step), batch), before)

        taken = tried(first, states[0])
        _, (arrays, (last, step), *results) = try_again(taken, again, self._retries)
        last = with_first_scale_if_skipped(last, first[1][0])
        return arrays, (last, step), *results

    def _take(
        self,
        shardings: Sequence[Any],
        carried: Carried,
        arrays: list[Any],
        states: tuple[OptState, jax.Array],
        batch: Sequence[PyTree],
    ) -> tuple[Any, ...]:
        (params, extra), (opt_state, step) = carried.combine(arrays), states
        before = None
        if nnx_objects.nodes_in(batch):
            batch = jax.tree.map(lambda x: x, batch)  # a copy, which this trace changes
            before = nnx_objects.values_in(batch)
        scale = state_to_scale_by(opt_state).rule_state.scale
        # A copy of the extra: Equinox refuses a `State` that was used once.
        own = [] if extra is None else [jax.tree.map(lambda x: x, extra)]
        given = (params, *own, *batch)
        loss_fn = with_parts(self._loss_fn, extra is not None, self._has_aux)
        differentiate = scaled_value_and_grad(loss_fn, scale, True, self._using, given)
        (_, (loss, (new_extra, aux))), grads = differentiate(*given)
        divides = isinstance(opt_state, LossScaledState)  # else others get the gradients first
        more: dict[str, Any] = {"loss_scale": scale} if divides else {}
        if not divides:
            grads = gradients.unscale(grads, scale)
        trainable = models.chosen(params, grads)
        over = "" if self._told else summed_over(loss, trainable)
        if over:
            self._told = True
            warn(SUMMED.format(at="of gainstage.train_step", over=over))
        if shardings and divides:
            found = leaves_and_none(models.chosen(carried.model.combine(shardings), grads))
            if None not in found:
                more["param_shardings"] = found
                if not all(sharding.is_fully_replicated for sharding in shardings):
                    more["shardings"] = found
        updates, opt_state = self._tx.update(grads, opt_state, trainable, value=loss, **more)
        applied = loss_scaled_state(opt_state).applied
        params = updated(params, updates, applied)
        new, after = partition_model(params)
        if after != carried.model:
            raise ValueError(
                "Expected a loss_fn that does not change the structure of the model; got one that "
                "does. Create all variables of the model before the first step."
            )
        # Also arrays that the loss itself changed, such as running means of batch normalisation.
        if extra is not new_extra:
            check_like("extra", new_extra, "extra", extra)
        new = [*new, *jax.tree.leaves(new_extra), step + 1]
        *arrays, step = selected(new, [*arrays, step], applied)
        changed = {} if before is None else nnx_objects.changes(batch, before)
        if before is not None and changed:
            old = nnx_objects.values_of(changed, before)
            changed = selected(changed, old, applied)
        results = [aux] if self._has_aux else []
        beside = {"extra": new_extra, "aux": aux if self._has_aux else None}
        spoiled = self._spoiled(beside, {"extra": extra}, applied)
        return arrays, (opt_state, step), loss, *results, changed, spoiled

    def _spoiled(self, beside: PyTree, before: PyTree, applied: jax.Array) -> jax.Array | None:
        """The number of the first array beside the loss that has a NaN or an inf after an applied
        step, and had none before, or -1; None if there is no array."""
        found, known = (
            {
                joined(path): _is_spoiled(x)
                for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]
                if jnp.issubdtype(jnp.result_type(x), jnp.floating)
            }
            for tree in (beside, before)
        )
        if not found:
            return None
        self._watch.beside = list(found)
        is_new = [x if name not in known else x & ~known[name] for name, x in found.items()]
        each = jnp.stack(is_new)
        return jnp.where(applied & each.any(), jnp.argmax(each), -1)


def _is_spoiled(x: jax.Array) -> jax.Array:
    """Whether an array has a NaN or an inf; a negative one may be that of a mask."""
    return (jnp.isnan(x) | (x == jnp.inf)).any()


def _unshared(
    program: _Program, arrays: list[Any], others: list[Any], returned: _Returned | None
) -> list[Any]:
    """The arrays of a program, without a buffer that is donated and there twice, also in others."""
    known = [] if returned is None else returned.arrays  # which share none with each other
    is_known = len(known) == len(arrays) and all(map(operator.is_, known, arrays))
    if is_known and not program.shares(arrays, others):
        return arrays
    donated = set(program.donated)
    kept = [x for i, x in enumerate(arrays) if i not in donated]
    free = iter(unshared([arrays[i] for i in program.donated], [*kept, *others]))
    return [next(free) if i in donated else x for i, x in enumerate(arrays)]


def _given(state: TrainState[Any], batch: PyTree) -> Given:
    """What an audit takes of a step."""
    scale = state_to_scale_by(state.opt_state).rule_state.scale
    return Given(state.params, state.extra, batch, scale, state.step)


def _scale_in(opt_state: OptState) -> Any:
    return loss_scaled_state(opt_state).rule_state.scale


def _lowest_of(rule: LossScale) -> float:
    """The scale to which a rule falls from a higher one; 0 if it does not."""
    first = getattr(rule, "initial_loss_scale", None) or 0.0
    lowest = getattr(rule, "min_scale", None) or 0.0
    return lowest if lowest < first else 0.0
