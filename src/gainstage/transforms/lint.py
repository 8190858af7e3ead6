"""What is wrong with a step, as its program shows it: the loss scale once in, and once out."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from gainstage._base._jax import JaxprEqn
from gainstage._base.arrays import ARRAYS
from gainstage._programs import degrees, jaxprs
from gainstage._programs.degrees import (
    FREE,
    NO_SCALE,
    ONE,
    OWN,
    THROWN_AWAY,
    Mark,
    Seen,
    degree_of_product,
    scale_power,
)
from gainstage._programs.in_dtype import has_small_floats
from gainstage._programs.jaxprs import AnyJaxpr
from gainstage._programs.places import line_of
from gainstage._variables.bridge import recorded
from gainstage._variables.sharding import SUMMED
from gainstage.transforms.models import traced_of

SOME_LINE = "an unknown line"
_INSIDE = "Put it behind the check: gainstage.with_loss_scale(optax.chain({inner}, tx))."
_LEAVE_OUT = "Leave it out: such a step is skipped."
_REMEDIES = {
    "jnp.nan_to_num": _LEAVE_OUT,
    degrees.WHERE: _LEAVE_OUT,
    degrees.CLIP: _INSIDE.format(inner="optax.clip(limit)"),
    "jax.lax.clamp": _INSIDE.format(inner="optax.clip(limit)"),
    "jnp.sign": _INSIDE.format(inner="optax.scale_by_sign()"),
}
_TEXTS = {
    "not scaled": (
        "No loss was multiplied by the loss scale before the update at {update}, so small "
        "gradients are lost as without it. They are computed at {line}. Write "
        "loss, extra, grads = state.value_and_grad(loss_fn)(*batch), or, without a TrainState, "
        "gainstage.value_and_grad(loss_fn, opt_state)(params, *batch)."
    ),
    "not divided": (
        "The gradients that the update at {update} takes for true ones still have the loss scale "
        "in them: {line} multiplies by it, and nothing divides. Write tx.update(grads, opt_state, "
        "params, loss_scale=gainstage.transforms.current_scale(opt_state))."
    ),
    "multiplied twice": (
        "The loss scale is in the gradients of the update at {update} once too often: {line} "
        "multiplies by it, which value_and_grad and train_step do themselves. Leave this factor "
        "out."
    ),
    "divided twice": (
        "The gradients of the update at {update} are divided by the loss scale once too often, at "
        "{line}. value_and_grad returns true gradients: leave this division out."
    ),
    "divided again": (
        "The update at {update} divides gradients that are true already, as value_and_grad "
        "returns them. Leave loss_scale= out."
    ),
    "hidden": (
        "{name} at {line} makes an overflow a finite number, so the update at {update} takes the "
        "step, and the loss scale never falls. {remedy}"
    ),
    "narrow": (
        "{line} casts true gradients to float16, which loses the small ones again, before the "
        "update at {update}. Pass them on in float32. To send fewer bytes, cast them to bfloat16."
    ),
    "constant": (
        "The state of the update at {update} is a constant of the compiled function, or of the "
        "loop around it, so its loss scale never changes. Make it an argument and a result; in "
        "jax.lax.scan, a part of the carry."
    ),
    "other state": (
        "The gradients of the update at {update} were computed with the scale of another state. "
        "Compute them with the state that the update gets."
    ),
    "constant divisor": (
        "The loss_scale= of the update at {update} is a constant, so the rule changes a scale "
        "that no loss is multiplied by. Compute gradients with gainstage.value_and_grad(loss_fn, "
        "opt_state), and leave loss_scale= out; for a fixed scale, write "
        "gainstage.with_loss_scale(tx, gainstage.FixedLossScale(scale))."
    ),
    "old state": (
        "{line} asks by the state that the update at {update} got whether its step was applied, "
        "which tells of the step before. Pass the state that the update returned: updates, "
        "opt_state = tx.update(grads, opt_state, params)."
    ),
    "one not scaled": (
        "A gradient without the loss scale is added to one that had it, at {line}, before the "
        "update at {update}: what is small in it is lost. Compute it by the same state, as in "
        "state.value_and_grad(other_loss)(*batch)."
    ),
    "scale thrown away": (
        "{line} chooses between the state before the update at {update} and that after it, so a "
        "lower loss scale is thrown away with the step, and the next one overflows again. Let the "
        "update choose: state.apply_gradients(grads, extra, apply_if=condition), or, without a "
        "TrainState, tx.update(grads, opt_state, params, apply_if=condition)."
    ),
    "extra dropped": (
        "What the loss changes at {line}, such as statistics and keys, is dropped before the next "
        "batch: each part starts from the same, and the step keeps those of one part alone. Write "
        "state, loss = gainstage.train_step(loss_fn, microbatches=n)(state, *batch); in a loop of "
        "your own, part = part.replace(extra=extra) after each part, from part = state on, and "
        "state.apply_gradients(grads, extra) at the end."
    ),
    "summed": SUMMED.format(at="that is differentiated at {line}", over="{over}"),
    "no use": (
        "The rule of the update at {update} has no effect: the loss of gainstage.autocast has a "
        "loss_scale of its own. Leave the rule out, and for another scale write "
        "gainstage.autocast(loss_fn, loss_scale=scale)."
    ),
    "plain grad_fn": (
        "The gradients of grad_fn, computed at {line}, have no loss scale, so small ones are lost. "
        "Write grad_fn=lambda params, i: gainstage.value_and_grad(loss_fn, opt_state)(params, "
        "*batch)[1]."
    ),
    "not in proportion": (
        "{name} at {line} does not keep the loss scale of the gradients that pass through it: "
        "twice the scale is not twice the result, so the update at {update} gets other gradients "
        "than those of the loss. Give this part true ones, with loss_scale=state.loss_scale as an "
        "argument: part = gainstage.transforms.locally_scaled(part, 1 / loss_scale)."
    ),
}

# What is no fault in a step without float16 and float8.
_OF_SMALL_FLOATS = {
    "not scaled",
    "one not scaled",
    "plain grad_fn",
    "constant divisor",
    "no use",
    "scale thrown away",
}
# The same for an optimizer of `gainstage.optimizers`, where another line is to be written.
_OF_OPTIMIZERS = {
    "not scaled": (
        "No loss was multiplied by the loss scale before the step at {update}, so small gradients "
        "are lost as without it. They are computed at {line}. Use optimizer.minimize(loss, "
        "variables), or differentiate optimizer.scale_loss(loss)."
    ),
    "not divided": (
        "The gradients of the step at {update} still have the loss scale in them: {line} "
        "multiplies by it, and nothing divides. Write grads = "
        "optimizer.get_unscaled_gradients(grads)."
    ),
    "multiplied twice": (
        "The loss scale is in the gradients of the step at {update} once too often: {line} "
        "multiplies by it. Multiply once; minimize and compute_gradients do so themselves: leave "
        "scale_loss, or get_scaled_loss, out of their loss."
    ),
    "divided twice": (
        "The gradients of the step at {update} are divided by the loss scale once too often, at "
        "{line}. Write optimizer.apply_gradients(optimizer.compute_gradients(loss, variables)), "
        "and no other division."
    ),
    "divided again": (
        "The step at {update} divides gradients by the loss scale that are divided already. Leave "
        "your own division out."
    ),
}


class Fault(NamedTuple):
    """Something that is wrong with a step; `print` it."""

    kind: str  # in two words, such as "not scaled"
    line: str  # of the user's code, as "train.py:12"
    text: str  # what is wrong, and the line to write

    def __str__(self) -> str:
        return self.text


def lint(step: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Fault]:
    """Finds what is wrong with the loss scale in a training step. It computes nothing.

    It traces the step and follows the loss scale through its program: each gradient that an update
    gets must have been multiplied by it once, and divided once, with nothing on the way that hides
    an overflow. A step without float16 and float8 needs no scale, so a missing one is no fault
    there. What it cannot know, as of a kernel or a callback, it says nothing about. A
    `train_step` scales and divides by itself; this is for steps of your own.

    Args:
        step: a function that takes a step, compiled or not. It may read and assign variables of
            `gainstage.optimizers`, which keep their values.
        *args, **kwargs: its arguments: arrays, a `TrainState`, models, or `jax.ShapeDtypeStruct`.

    Returns:
        A list of faults, each with `kind`, `line` and `text`; empty if nothing is found.

    Raises:
        TypeError: `step` is not a function; what JAX raises if it cannot be traced.

    Examples:
        >>> import gainstage as gs
        >>> import jax, jax.numpy as jnp, optax
        >>> tx = gs.with_loss_scale(optax.adam(0.1))
        >>> def step(w, opt_state, x):
        ...     half = gs.autocast(lambda w: jnp.mean((x @ w) ** 2))
        ...     grads = jax.grad(half)(w)  # not of a scaled loss
        ...     return tx.update(grads, opt_state, w)
        >>> w, x = jnp.ones((64, 64)), jnp.ones((64, 64))
        >>> print([fault.kind for fault in gs.lint(step, w, tx.init(w), x)])
        ['not scaled']

    Source: units of measure in programs, Kennedy, 1994.
    """
    return read_program(step, *args, **kwargs).faults


class Reading(NamedTuple):
    """What `lint` has read of a step."""

    faults: list[Fault]
    has_scale: bool  # whether there is a loss scale of the library in it
    unknown: int  # the gradients of which nothing is known, such as those of a kernel


def read_program(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Reading:
    """Reads a step, as `lint` does."""
    if not callable(step):
        raise TypeError(f"Expected a function for step; got {step!r}.")

    values, models = traced_of((args, kwargs), (*ARRAYS, jax.ShapeDtypeStruct))

    def run(*values: Any) -> list[jax.Array]:
        args, kwargs = values if models is None else models.combine(*values)
        with recorded(runs_now=True):  # what it assigns to variables is undone
            results = jax.tree.leaves(step(*args, **kwargs))
            return [x for x in results if isinstance(x, jax.Array)]

    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # which it tells
            program = jax.make_jaxpr(run)(*values)
    except (TypeError, AttributeError) as error:
        if any(hasattr(x, "apply_gradients") for x in args):
            error.add_note(
                "gainstage.lint takes a step, which gets a state and returns a new one, and not a "
                "loss: gainstage.lint(step, state, *batch)."
            )
        raise
    marks = degrees.marks_of(program)
    found = faults_in(marks)
    if not has_small_floats(program):  # it needs no scale
        found = [fault for fault in found if fault.kind not in _OF_SMALL_FLOATS]
    found += dropped_extras(program, marks)
    unknown = sum(m.name == "gradient" and m.value.degree is None for m in marks)
    return Reading(found, any(m.name in ("state", "scale") for m in marks), unknown)


def dropped_extras(program: AnyJaxpr, marks: Sequence[Mark]) -> list[Fault]:
    """The faults of a loop over parts of a batch that starts each of them from the same extra."""
    kept = {
        eqn.params["name"]
        for eqn in jaxprs.equations(jaxprs.without_dead_code(program))
        if eqn.primitive.name == "name"
    }
    of_states = dict[str, dict[str, Mark]]()  # by the state, then by the batch
    for mark in marks:
        if mark.name == "extra":
            state, batch = mark.options
            of_states.setdefault(state, {}).setdefault(batch, mark)
    faults = dict[Fault, None]()
    for parts in of_states.values():
        dropped = [mark for mark in parts.values() if mark.eqn.params["name"] not in kept]
        if 0 < len(dropped) < len(parts):
            line = dropped[0].line or SOME_LINE
            faults[Fault("extra dropped", line, _TEXTS["extra dropped"].format(line=line))] = None
    return list(faults)


def faults_in(marks: Sequence[Mark]) -> list[Fault]:
    """The faults in the marks of a program, each once."""
    faults = dict[Fault, None]()
    state: Mark | None = None
    by: Mark | None = None
    grads = list[Mark]()
    taken: dict[Any, Mark] = {}  # the update that got each decision
    for mark in marks:
        origin = mark.value.origin
        if mark.name == "taken" and state and origin is not None:
            taken[origin] = state
        elif mark.name == "decision" and origin in taken:
            faults[_fault("old state", taken[origin], mark.eqn)] = None
        elif mark.name == "state":
            faults |= dict.fromkeys(_of_update(state, by, grads))
            state, by, grads = mark, mark if "divides" in mark.options else None, []
        elif mark.name == THROWN_AWAY and state:
            if "fixed" not in state.options:
                faults[_fault("scale thrown away", state, mark.eqn)] = None
        elif mark.name == "by":
            by = mark
        elif mark.name == "gradient":
            grads.append(mark)
            summed = mark.value.summed
            if state and summed and summed.times > 0.99:  # not divided, but for rounding
                faults[_fault("summed", state, summed.eqn, over=summed.over)] = None
        elif state and (fault := _of_function(mark, state)):
            faults[fault] = None
    return list(faults | dict.fromkeys(_of_update(state, by, grads)))


def _fault(kind: str, state: Mark, at: JaxprEqn | None = None, **names: str) -> Fault:
    update = state.line or SOME_LINE
    line = (line_of(at) if at else "") or update
    text = _TEXTS[kind]
    if "variable" in state.options:
        text = _OF_OPTIMIZERS.get(kind, text)
    return Fault(kind, line, text.format(update=update, line=line, **names))


def _of_function(mark: Mark, state: Mark) -> Fault | None:
    """What is wrong with what `grad_fn` has returned to an update."""
    if mark.name == "grad_fn" and _is_plain(mark.value):
        return _fault("plain grad_fn", state, mark.value.last or mark.eqn)
    return None


def _is_plain(x: Seen) -> bool:
    """Whether a backward pass of this program has made a gradient, and no scale was in it."""
    return x.derived and not x.through and x.degree == ONE


def _of_update(state: Mark | None, by: Mark | None, grads: Sequence[Mark]) -> Iterator[Fault]:
    """What is wrong with the gradients of an update."""
    if state is None:
        return
    unit, moves = _unit(state.value), "fixed" not in state.options
    kind = unit[0] if isinstance(unit, tuple) else ""
    # One that is made in the program is no argument of it, and need not be; nor is it known where
    # else its number stands.
    is_number = _is_written_out(unit)
    is_held = kind == "constant" or (state.value.still and kind != "made")
    if moves and is_held and "variable" not in state.options:
        yield _fault("constant", state)
        return
    divisor = by.value.degree if by else ONE
    if by and moves and not scale_power(divisor, unit) and _is_written(by.value):
        yield _fault("constant divisor", state)
        return
    values = [mark.value for mark in grads if mark.value.degree != FREE]
    if values and not any(x.through for x in values) and is_number:
        return
    if values and not any(x.through for x in values):
        plain = next((mark for mark in grads if _is_plain(mark.value)), None)
        if plain and moves and (by is None or scale_power(divisor, unit)):
            yield _fault("not scaled", state, plain.value.last or plain.eqn)
        return
    for x in values:
        yield from _of_gradient(x, state, by)


def _is_written(x: Seen) -> bool:
    return x.still or x.number is not None


def _of_gradient(x: Seen, state: Mark, by: Mark | None) -> Iterator[Fault]:
    """What is wrong with one gradient of an update."""
    unit, moves = _unit(state.value), "fixed" not in state.options
    scales = x.through - {OWN, NO_SCALE}
    if moves and not scales and OWN in x.through and "ruled" in state.options:
        yield _fault("no use", state)
    if moves and scales and OWN not in x.through and unit is not None and unit not in scales:
        yield _fault("other state", state)
        return
    inside = next((flaw for flaw in x.flaws if flaw.is_inside), None)
    degree = (
        None
        if x.degree is None
        else degree_of_product(x.degree, by.value.degree if by else ONE, -1)
    )
    n = 0 if _is_written_out(unit) else scale_power(degree, unit)
    rounds = inside is not None and inside.name in degrees.ROUNDS.values()
    if inside is not None and (n or degree is None or rounds):
        yield _fault("not in proportion", state, inside.eqn, name=inside.name)
        return
    if n > 0:
        yield _fault("multiplied twice" if x.divided or by else "not divided", state, x.last)
    elif n < 0 and x.degree == ONE and by and x.through:
        yield _fault("divided again", state)
    elif n < 0 and x.through:
        yield _fault("divided twice", state, x.last)
    for flaw in x.flaws if "chosen" not in state.options else ():
        if flaw.is_inside:
            continue
        if flaw.name == degrees.WITHOUT_SCALE:
            yield _fault("one not scaled", state, flaw.eqn)
        elif flaw.name == degrees.TO_FLOAT16:
            yield _fault("narrow", state, flaw.eqn)
        else:
            remedy = _REMEDIES.get(flaw.name, _INSIDE.format(inner="your transformation"))
            yield _fault("hidden", state, flaw.eqn, name=flaw.name, remedy=remedy)


def _is_written_out(unit: Any) -> bool:
    """Whether a loss scale is a number that is written out in the program."""
    return isinstance(unit, tuple) and unit[0] == "made" and isinstance(unit[1], float)


def _unit(x: Seen) -> Any:
    """The loss scale that a value is; None if it is not known."""
    return x.degree[0][0] if x.degree not in (FREE, ONE, None) and len(x.degree) == 1 else None
