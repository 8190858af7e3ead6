"""A whole step of a train state as one compiled program."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypedDict, TypeVarTuple, Unpack, overload

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.tree_util import default_registry

from gainstage._base import checks
from gainstage._base.arrays import ARRAYS, Static, buffers, unshared
from gainstage._base.dead_run import DeadRunWatch
from gainstage._base.lost_steps import LostStepsWatch, what_helps
from gainstage._base.warn import warn
from gainstage._scaling.retry_loop import NO_RETRY, UNTIL_IT_FITS, checked_retries
from gainstage._variables.bridge import reruns
from gainstage._variables.sharding import (
    SUMMED,
    knows_what_varies,
    on_mesh,
    on_one_mesh,
    replicated_like,
    tell_if_whole,
)
from gainstage._variables.types import Aux, OptState, Params, PyTree, Scalar, Using
from gainstage._variables.variable import is_inside
from gainstage._variables.zero_sharding import divided_state
from gainstage.precision.autocast import plan_of
from gainstage.precision.plan import Plan
from gainstage.rules.loss_scale import FixedLossScale, LossScale
from gainstage.training.audit import BOUNDS, AuditResult, Given, check_cast, checked_bounds
from gainstage.training.audited_run import AuditedRun, Audits
from gainstage.transforms.loss_scale_state import (
    LossScaleState,
    state_to_scale_by,
    states_in,
    used_scale,
    without_scalars,
)
from gainstage.transforms.microbatches import Microbatches
from gainstage.transforms.models import Partition, apply_changes, kind_of, split, traced_of
from gainstage.transforms.refusals import explain_step
from gainstage.transforms.step import Step, Taken
from gainstage.transforms.train_state import TrainState, forget_donated, key_of
from gainstage.transforms.value_and_grad import LossFunction, loss_function
from gainstage.transforms.with_loss_scale import transformation_of

DRIFTS = (
    "gainstage.train_step inside of jax.pmap, or of jax.shard_map with check_vma=False: each "
    "device takes a step with its own gradients, and nothing averages them. For one model on all "
    "devices, call it outside, with the batch sharded over a mesh: jax.device_put(batch, "
    'NamedSharding(mesh, PartitionSpec("data"))). For a model per device, silence this warning: '
    'warnings.filterwarnings("ignore", message="gainstage.train_step inside").'
)
More = TypeVarTuple("More")  # the type of aux, if there is one


class TrainStepOptions(TypedDict, total=False):
    """The options of `train_step` that do not change the type of a step."""

    using: Using | None
    donate: bool
    retries: bool | int
    microbatches: int
    weight: Callable[..., Scalar] | None
    audit_every: int | None
    audit_bounds: Sequence[float]
    mend: bool


@overload
def train_step(
    loss_fn: Callable[..., Scalar | tuple[Scalar, Any]],
    *,
    has_aux: Literal[False] = False,
    **options: Unpack[TrainStepOptions],
) -> "TrainStep[()]": ...


@overload
def train_step(
    loss_fn: Callable[..., tuple[Scalar, Aux]],
    *,
    has_aux: Literal[True],
    **options: Unpack[TrainStepOptions],
) -> "TrainStep[Aux]": ...


@overload
def train_step(
    loss_fn: Callable[..., tuple[Scalar, Any, Aux]],
    *,
    has_aux: Literal[True],
    **options: Unpack[TrainStepOptions],
) -> "TrainStep[Aux]": ...


@overload
def train_step(
    loss_fn: Callable[..., Any],
    *,
    has_aux: Literal[True],
    **options: Unpack[TrainStepOptions],
) -> "TrainStep[Any]": ...


@overload
def train_step(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool,
    **options: Unpack[TrainStepOptions],
) -> "TrainStep[*tuple[Any, ...]]": ...


@checks.explains(
    "Write state = gainstage.TrainState.create(params, tx), step = gainstage.train_step(loss_fn), "
    "and state, loss = step(state, *batch). A dtype is that of the loss: "
    "gainstage.train_step(gainstage.autocast(loss_fn, dtype)). Options are has_aux, microbatches, "
    "retries, audit_every and others."
)
def train_step(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    using: Using | None = None,
    donate: bool = True,
    retries: bool | int = 0,
    microbatches: int = 1,
    weight: Callable[..., Scalar] | None = None,
    audit_every: int | None = None,
    audit_bounds: Sequence[float] = BOUNDS,
    mend: bool = False,
) -> Any:
    """Returns a compiled step of a `TrainState`: scaled loss, gradients, check, update.

    It computes the same as `value_and_grad` and `apply_gradients` of a `TrainState` inside of
    `jax.jit`. On a CPU it is faster than that, because it stores no unscaled gradients; on a GPU
    both move the same bytes. If an argument is on a mesh, parameters and state keep their
    shardings, and those without one are replicated.

    Args:
        loss_fn: a function `(params, *batch)` that returns a scalar loss, or (loss, aux). `params`
            may be an NNX or Equinox model, and so may an argument of the batch. For a state with
            `extra` it is `(params, extra, *batch)`, and returns (loss, extra), or (loss, extra,
            aux).
        has_aux: whether `loss_fn` returns aux.
        using: the function that differentiates, by default as for `value_and_grad`.
        donate: whether a step donates its state, which is then deleted. An array
            that is there twice, or also in the batch, is copied first. The loss scale, `step` and
            the numbers of the telemetry are not donated, so you may read them later; `report` needs
            the newest state. Nothing is donated under `jax_debug_nans` and `jax_debug_infs`. If a
            step is interrupted before its results are assigned, they are lost: restart from a
            checkpoint.
        retries: whether a step with a non-finite gradient is taken again with the same batch, at
            the scale that the rule has lowered: True repeats it until it fits, or until the rule
            does not lower the scale any more; an integer >= 0 is the largest number of tries, if a
            step must not take long. There is no retry if the loss is not finite, or the rule keeps
            its scale. If none is applied, the scale is that after one skipped step. The telemetry
            counts `retried_steps`. No copy of parameters or batch is made for it. With retries, the
            host reads one bit at each step on a GPU.
        microbatches: in how many parts the batch is computed, an integer >= 1 that divides its
            leading axis. They are computed one after the other, in the memory of one part, and
            followed by one check and one update. Part `i` has the examples `i`, `i + microbatches`
            and so on, so each device keeps its own. The loss and its gradients are means over the
            parts, in float32. What a part changes of `extra`, of an NNX model or of a model in the
            batch is what the next one starts from. Scalars and models of the batch go to each part
            whole; a typed key is split. Aux has a leading axis of the parts. Audits compare the
            first part.
        weight: a function `(*part)` of a microbatch that returns what it counts in the mean, such
            as its number of tokens, a scalar >= 0; None for parts that count alike. A part of
            weight 0 counts nothing and changes nothing, even if its loss is NaN. A batch of which
            no part counts is skipped, and the loss scale stays.
        audit_every: an integer >= 1: the steps after 0, 1, 3, 10, 30, 100 and so on, and then each
            that many, are compared with float32 before they are taken, as by `gainstage.audit`;
            None for no audits. An audit is a program of its own, so other steps are what they are
            without it, and no step waits for a result. An error past the bounds is a warning at a
            later step, once, with the name of the tensor. Unless the loss itself is off, and an
            error is past three times its bound, two of the next steps are audited too, and must be
            past a bound as well. `step.audit` is the audit of the last step, or None; `step.audits`
            has their `count`, the mean difference of the loss (`bias`) and its `spread`, and the
            `last`. `loss_fn` must be from `autocast`. If float32 does not fit into memory, half, a
            quarter or an eighth of the batch is used.
        audit_bounds: the largest errors of the loss, of all gradients together and of one tensor,
            by default 1 %, 10 % and 50 %: three numbers > 0.
        mend: whether the lines that spoil a step go back to float32, as by `gainstage.mend`, when
            an audit is past a bound, or steps are skipped at each loss scale; needs `audit_every`.
            One warning says which lines, what for, and what is left in half precision. The step is
            compiled again; other steps are what they are without it. An audited step waits for its
            audit. `step.plan` is the plan in force, to save for the next run.

    Returns:
        A function `step(state, *batch)` that returns the new `TrainState`, the true loss in
        float32, and `aux` if there is one. It takes any state. `step.lower(state, *batch)` lowers
        the program, also for `jax.ShapeDtypeStruct` arguments.

    Raises:
        TypeError: `loss_fn` or `weight` is not callable, or `loss_fn` has a `loss_scale` of its
            own, `donate` or `mend` is not a bool, or `retries`, `microbatches` or `audit_every` not
            a number; from `step`, the first argument is no `TrainState`, or the loss or a parameter
            no array.
        ValueError: `retries` is no bool and no integer >= 0, or `microbatches` or `audit_every` no
            integer >= 1, or `audit_bounds` are out of range; `mend` without `audit_every`;
            `audit_every` is given, and `loss_fn` is not from `autocast`; from `step`, a
            transformation around `with_loss_scale` could hide an overflow, or `microbatches` does
            not divide the batch.

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
    advice = " The optimizer is part of the state: gainstage.TrainState.create(params, tx)."
    loss = loss_function("loss_fn", loss_fn, has_aux, using, "train_step", advice)
    donates = checks.flag("donate", donate)
    retries = checked_retries("retries", retries)
    count = checks.integer("microbatches", microbatches, low=1)
    if weight is not None and not callable(weight):
        raise TypeError(
            f"Expected a function of a microbatch for weight, such as weight=lambda x, y, mask: "
            f"mask.sum(); got {checks.brief(weight)}."
        )
    bounds = checked_bounds("audit_bounds", audit_bounds)
    audits, mends = None, checks.flag("mend", mend)
    if mends and audit_every is None:
        raise ValueError(
            "Expected audit_every with mend=True, as an audit finds what is to be mended; got "
            "None. Write train_step(gs.autocast(loss_fn), audit_every=1000, mend=True)."
        )
    if audit_every is not None:
        every = checks.integer("audit_every", audit_every, low=1)
        check_cast("loss_fn", loss_fn, "train_step(gs.autocast(loss_fn), audit_every=...)")
        audits = AuditedRun(loss, every, bounds, mends=mends)
    step: Any = TrainStep(_Options(loss, donates, retries, Microbatches(count, weight)), audits)
    return step


class _Options(NamedTuple):
    """The arguments of `train_step`."""

    loss: LossFunction
    donates: bool
    retries: int
    microbatches: Microbatches
    is_mended: bool = False  # whether the loss is another one than at first


class TrainStep(Generic[*More]):
    """The compiled step that `train_step` returns."""

    is_train_step = True  # what `autocast` refuses, which is below this

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
        step = self._of(state)
        step.look(state, batch)
        if self._audits is not None and self._audits.loss is not self._options.loss:  # mended
            self._options = self._options._replace(loss=self._audits.loss, is_mended=True)
            self._compiled.clear()
            step = self._of(state)
        found: Any = step.take(state, batch)
        return found

    def lower(self, state: TrainState[Any], *batch: PyTree) -> jax.stages.Lowered:
        """Returns the lowered program, for arrays or for `jax.ShapeDtypeStruct`s."""
        return self._of(state).lowered(state, batch)

    def _of(self, state: object) -> "_CompiledStep":
        """The step of the transformation of a state."""
        returned: Any = getattr(state, "_returned", None)
        if returned is not None and returned.step.options is self._options:
            own: _CompiledStep = returned.step
            return own
        if not isinstance(state, TrainState):
            raise TypeError(
                f"Expected a TrainState first, as in state, loss = step(state, *batch); got "
                f"{checks.brief(state)}. Write state = gainstage.TrainState.create(params, tx)."
            )
        tx = state._transformation
        key = key_of(tx)
        if key not in self._compiled:
            self._compiled[key] = _CompiledStep(self._options, tx, self._audits)
        return self._compiled[key]

    @property
    def plan(self) -> Plan | None:
        """The plan in force, with what `mend=True` has taken back; None without `autocast`."""
        return plan_of(self._options.loss.fun)

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


class _Program:
    """The compiled program of all states that differ in the values of their arrays alone."""

    def __init__(
        self,
        step: Step,
        partition: Partition,
        donates: bool,
        shardings: tuple[Any, ...] | None,
        models: Static | None,
    ):
        self.partition, self.donates, self.shardings = partition, donates, shardings
        self.models = models  # of the batch: what of them is no array
        lists = partition.lists(range(partition.count))
        opt_state, number = partition.rest.combine(lists.rest)
        kept = {number, *jax.tree.leaves(without_scalars(opt_state)[1])}
        self.donated = [i for i in range(partition.count) if i not in kept] if donates else []
        options: dict[str, Any] = {"donate_argnums": self.donated}
        of_model = partition.lists(shardings).params if shardings else []
        if not all(isinstance(sharding, NamedSharding) for sharding in of_model):
            of_model = []
        if shardings is not None:
            options["out_shardings"] = Taken._make([list(shardings), None])

        def _run(*given: Any) -> Taken:
            arrays, batch = given[: partition.count], given[partition.count :]
            if models is not None:
                batch = models.combine(*batch)
            return step.take(partition, arrays, batch, of_model)

        self.run = jax.jit(_run, **options)

    def kinds_of(self, arrays: Sequence[Any]) -> frozenset[Any]:
        """The shapes and dtypes of the arrays that it donates, by which `shares` is quick."""
        return frozenset(_kind_of_array(arrays[i]) for i in self.donated)

    def shares(self, arrays: Sequence[Any], others: Sequence[Any], kinds: frozenset[Any]) -> bool:
        """Whether the memory of one of the arrays that it donates is that of another one too."""
        alike = [x for x in others if isinstance(x, jax.Array) and _kind_of_array(x) in kinds]
        taken = {address for x in alike for address in buffers(x)}
        kinds = frozenset(map(_kind_of_array, alike))
        donated = (arrays[i] for i in self.donated) if taken else ()
        return any(not taken.isdisjoint(buffers(x)) for x in donated if _kind_of_array(x) in kinds)


class _Returned(NamedTuple):
    """What a step has returned as a state, which is noted in that state."""

    step: "_CompiledStep"
    program: _Program
    partition: Partition
    leaves: list[Any]  # of (params, extra, (opt_state, step))
    arrays: list[Any]  # those of the leaves that the program takes
    kinds: frozenset[Any]  # of those that it donates


def _kind_of_array(x: Any) -> tuple[Any, ...]:
    return getattr(x, "shape", ()), getattr(x, "dtype", None)


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
        self._tx, self._audits = tx, audits
        if options.retries and scaled and scaled.is_fixed:
            warn(NO_RETRY)
        self._over = scaled.over if scaled else ()  # the mesh axes of `shard_state_over`
        self._lowest = _lowest_of(scaled.rule) if scaled else 0.0
        self._watch = DeadRunWatch(self._lowest)
        self._lost = _watch_of_lost_steps(options.retries, scaled.rule if scaled else None)
        self._is_known = options.is_mended  # whether the first program and its batch were looked at
        self._programs: dict[Any, _Program] = {}

    def look(self, state: TrainState[Any], batch: tuple[PyTree, ...]) -> None:
        """Looks at the steps before this one, and audits it, if that is due."""
        opt_state, audits = state.opt_state, self._audits

        def given() -> Given:
            scale = state_to_scale_by(opt_state).rule_state.scale
            part = self.options.microbatches.part(batch, 0)
            return Given(state.params, state.extra, part, scale, state.step, self._lowest)

        try:
            self._lost.look()
            if audits is None:
                self._watch.look(lambda: used_scale(opt_state))
                return
            self._watch.look(lambda: used_scale(opt_state), lambda: audits.mend_now(given))
            if is_inside():
                audits.tell_inside()
            else:
                audits.before(given)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            explain_step(error, state, batch)
            raise

    def take(self, state: TrainState[Any], batch: tuple[PyTree, ...]) -> tuple[Any, ...]:
        """Takes a step."""
        opt_state, inside = state.opt_state, is_inside()
        donates = self.options.donates and not reruns() and not inside
        try:
            values, models = traced_of(batch)
            known = None if inside else self._known(state, values, models, donates)
            prepared = known or self._prepared(state, values, models, donates, inside)
            program, arrays, kinds = prepared
            arrays, outcome = program.run(*arrays, *values)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            explain_step(error, state, batch)
            raise
        if program.donated:
            forget_donated(state)
        if outcome.changes:
            apply_changes(batch, outcome.changes)
        if outcome.summed:
            warn(SUMMED.format(at="of gainstage.train_step", over=outcome.summed))
        partition = outcome.partition
        leaves = partition.leaves(arrays)
        params, extra, (opt_state, step) = partition.structure.unflatten(leaves)
        params = partition.params.built(params)
        state = TrainState(params, opt_state, extra, step, self._tx)
        if not inside:
            scaled = states_in(opt_state)[0]
            scale = scaled.rule_state.scale
            self._watch.see(
                scaled.applied, outcome.loss, True, scale, outcome.spoiled, outcome.beside
            )
            structure = default_registry.flatten(batch)[1]
            if outcome.is_scaled:  # else no lower scale helps
                self._lost.see(scaled.applied, outcome.loss, scale, step, structure)
            vars(state)["_returned"] = _Returned(self, program, partition, leaves, arrays, kinds)
        return state, outcome.loss, *outcome.aux

    def _known(
        self,
        state: TrainState[Any],
        batch: Sequence[PyTree],
        models: Static | None,
        donates: bool,
    ) -> tuple[_Program, list[Any], frozenset[Any]] | None:
        """The program and the arrays of a state that this step has returned, if nothing of it was
        changed in place, and the batch has none of its arrays and no other mesh; else None."""
        if state._returned is None:
            return None
        step, program, partition, before, arrays, kinds = state._returned
        # `Step.take` returns the partition that it was given, if it is the same.
        repeats = partition is program.partition and program.donates is donates
        if step is not self or not repeats or program.models != models:
            return None
        whole = state.params, state.extra, (state.opt_state, state.step)
        leaves, structure = default_registry.flatten(whole)
        if structure != partition.structure or not all(map(operator.is_, leaves, before)):
            return None
        others, _ = default_registry.flatten(batch)
        moves = program.shardings is None and any(map(on_mesh, others))
        return None if moves or program.shares(arrays, others, kinds) else (program, arrays, kinds)

    def _prepared(
        self,
        state: TrainState[Any],
        batch: Sequence[PyTree],
        models: Static | None,
        donates: bool,
        inside: bool,
    ) -> tuple[_Program, list[Any], frozenset[Any]]:
        """The program for any state, and its arrays, on one mesh and none of them donated twice."""
        opt_state = state.opt_state
        if inside:
            self._warn_inside()
        elif self._over and state._returned is None:
            opt_state = self._divided(state.params, opt_state, batch)
        whole, partition = self._split(state, (opt_state, jnp.asarray(state.step)))
        arrays, shardings = on_one_mesh(whole, batch)
        program = self._program_for(partition, donates, shardings, models)
        kinds = program.kinds_of(arrays)
        if donates:
            arrays = _unshared(program, arrays, jax.tree.leaves(batch), state._returned)
        if not (self._is_known or inside):  # in the first call
            self._is_known = True
            if shardings is not None:
                traced = program.run.trace(*arrays, *batch).jaxpr
                of_params, of_extra, _ = partition.lists(whole)
                tell_if_whole([*of_params, *of_extra], batch, traced)
        return program, arrays, kinds

    def _warn_inside(self) -> None:
        """Warns of a call inside of another trace that is hardly what was meant."""
        if not knows_what_varies(jax.sharding.get_abstract_mesh()):
            warn(DRIFTS)

    def lowered(self, state: TrainState[Any], batch: tuple[PyTree, ...]) -> jax.stages.Lowered:
        """The lowered program, for arrays or for `jax.ShapeDtypeStruct`s."""
        arrays, partition = self._split(state, (state.opt_state, state.step))
        values, models = traced_of(batch, _KINDS)
        arrays, shardings = on_one_mesh(arrays, values)
        program = self._program_for(partition, self.options.donates, shardings, models)
        return program.run.lower(*arrays, *values)

    def _program_for(
        self,
        partition: Partition,
        donates: bool,
        shardings: tuple[Any, ...] | None,
        models: Static | None,
    ) -> _Program:
        """The program that returns the parameters and the state with these shardings."""
        key = partition, donates, shardings, models
        if key not in self._programs:
            options = self.options
            step = Step(options.loss, self._tx, options.retries, options.microbatches)
            self._programs[key] = _Program(step, *key)
        return self._programs[key]

    def _divided(self, params: PyTree, opt_state: OptState, batch: PyTree) -> OptState:
        """A state of `shard_state_over`, divided as by `init` where its arrays are whole."""
        everywhere = replicated_like((params, opt_state, batch))
        if everywhere is None or not isinstance(opt_state, LossScaleState):
            return opt_state
        params = kind_of(params).trainable(params)
        inner = divided_state(opt_state.inner, params, self._over, everywhere)
        return opt_state._replace(inner=inner)

    def _split(self, state: TrainState[Any], rest: PyTree) -> tuple[list[Any], Partition]:
        """The arrays of a state with this (opt_state, step), and what else there is of it."""
        arrays, partition = split(state.params, state.extra, rest, _KINDS)
        is_plain = self.options.loss.using in (None, jax.value_and_grad)
        others = partition.params.others if is_plain else []
        if others and not kind_of(state.params).is_model:
            raise TypeError(
                f"Expected arrays in params; got {others[0]!r}. Make it an array, or use a "
                f"function that skips such leaves: using=equinox.filter_value_and_grad."
            )
        if partition.extra.others:
            raise TypeError(
                f"Expected arrays in extra; got {partition.extra.others[0]!r}. Make it an array, "
                f"or bind it to the loss: functools.partial(loss_fn, name=value)."
            )
        return arrays, partition


def _unshared(
    program: _Program, arrays: list[Any], others: list[Any], returned: _Returned | None
) -> list[Any]:
    """The arrays of a program, without a buffer that is donated and there twice, also in others."""
    known = [] if returned is None else returned.arrays  # which share none with each other
    is_known = len(known) == len(arrays) and all(map(operator.is_, known, arrays))
    if is_known and returned and not program.shares(arrays, others, returned.kinds):
        return arrays
    donated = set(program.donated)
    kept = [x for i, x in enumerate(arrays) if i not in donated]
    free = iter(unshared([arrays[i] for i in program.donated], [*kept, *others]))
    return [next(free) if i in donated else x for i, x in enumerate(arrays)]


def _watch_of_lost_steps(retries: int, rule: LossScale | None) -> LostStepsWatch:
    """The watch of a run with this rule, None for one of another library."""
    is_fixed = isinstance(rule, FixedLossScale)
    advice = what_helps(
        retries=None if 0 < retries < UNTIL_IT_FITS else bool(retries),
        is_fixed=is_fixed,
        hysteresis=getattr(rule, "hysteresis", 1),
    )
    return LostStepsWatch(advice, retries > 0 and not is_fixed)


def _lowest_of(rule: LossScale) -> float:
    """The scale to which a rule falls from a higher one; 0 if it does not."""
    first = getattr(rule, "initial_loss_scale", None) or 0.0
    lowest = getattr(rule, "min_scale", None) or 0.0
    return lowest if lowest < first else 0.0
