"""Audits: the loss and gradients of a step in half precision, beside those in float32."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from gainstage._base import checks
from gainstage._base.arrays import Static, joined
from gainstage._base.checks import as_power
from gainstage._scaling import gradients
from gainstage._variables.types import PyTree, Scalar, Using
from gainstage.precision.autocast import plan_of
from gainstage.transforms.models import (
    Changeable,
    Partition,
    kind_of,
    map_outside_models,
    outside_models,
    split,
    traced_of,
)
from gainstage.transforms.needs_scale import needs_scale
from gainstage.transforms.retrace import IS_KEPT
from gainstage.transforms.step_gradients import StateParts, check_arguments, compute_gradients
from gainstage.transforms.train_state import TrainState
from gainstage.transforms.value_and_grad import LossFunction

# The largest errors that are within the bounds: of the loss, of all gradients together, and of the
# gradient of one tensor.
BOUNDS = 0.01, 0.1, 0.5
COUNTS = 1e-3  # a tensor counts if its gradient has this share of the norm of all
FAR_OFF = 3.0  # times the bound of the loss or of all gradients: no chance of one batch
ROUNDINGS = 4  # of each parameter, by which a difference may be explained
CANCELS = 1e-2  # of a gradient: if a rounding of the parameters moves more, its examples cancel
SAME_LOSS = 1e-3  # the largest relative difference of two losses of one batch
PARTS = 2, 4, 8  # of the batch, where the float32 side does not fit into memory
Found = TypeVar("Found")  # of what is measured
XRAY_IT = (
    "gs.mend(loss_fn, state, *batch) on such a batch takes the lines that spoil it back into "
    "float32, as train_step does with mend=True. gs.xray(loss_fn, state, *batch) names the "
    "operation, for `with gs.keep_float32():`."
)
NOT_LINEAR = (
    " The loss itself is right, so look at its backward pass too: a jax.custom_vjp that clips, "
    "normalises or takes the sign of its cotangents depends on the loss scale, which "
    "gs.lint(step, state, *batch) finds; a gradient inside of the loss needs a scale of its own: "
    "jax.grad(gs.transforms.locally_scaled(part, 2.0**n)), with the n that "
    "gs.xray(loss_fn, state, *batch) names."
)


class Measured(NamedTuple):
    """What an audit measures: float32 scalars."""

    loss: Any  # in half precision
    float32_loss: Any
    difference: Any  # of the losses, relative to that in float32
    is_rounding: Any  # whether roundings of the parameters explain that difference
    gradient_error: Any  # of all gradients together, relative to their norm in float32
    worst_error: Any  # the largest error of a tensor that counts
    worst_index: Any
    are_roundings: Any  # whether roundings of the parameters explain all errors of gradients
    is_finite: Any  # whether loss and gradients are finite in half precision
    is_float32_finite: Any
    is_alike: Any  # whether two float32 losses of the batch agree
    scale: Any  # the loss scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class AuditResult:
    """How far loss and gradients in half precision are off those in float32; `print` it.

    It is a pytree, so a compiled function may return it. To read an attribute is to wait for it.

    Args:
        numbers: what was measured, one float32 array.
        step: the `step` of the state, None if there was no state.
        names: the names of the gradients.
        bounds: the largest errors of the loss, of all gradients together and of one tensor that
            are `ok`.
        part: it used the first `1 / part` of the batch, because the whole did not fit into memory.
    """

    numbers: Any
    step: Any
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    bounds: tuple[float, float, float] = dataclasses.field(
        default=BOUNDS, metadata={"static": True}
    )
    part: int = dataclasses.field(default=1, metadata={"static": True})

    @functools.cached_property
    def measured(self) -> Measured:
        """All that was measured, as Python numbers."""
        return Measured(*jax.device_get(self.numbers).tolist())

    @property
    def loss(self) -> float:
        """The loss in half precision."""
        return self.measured.loss

    @property
    def float32_loss(self) -> float:
        """The loss in float32."""
        return self.measured.float32_loss

    @property
    def loss_difference(self) -> float:
        """The loss in half precision minus that in float32, relative to the latter."""
        return self.measured.difference

    @property
    def loss_error(self) -> float:
        """The absolute value of `loss_difference`."""
        return abs(self.loss_difference)

    @property
    def gradient_error(self) -> float:
        """The norm of the error of all gradients, relative to their norm in float32; inf if a
        gradient overflows in half precision."""
        return self.measured.gradient_error

    @property
    def worst(self) -> tuple[str, float]:
        """The tensor with the largest relative error of its gradient: its name and that error.
        Tensors with less than a thousandth of the norm of all gradients do not count."""
        return self.names[int(self.measured.worst_index)], self.measured.worst_error

    @property
    def ok(self) -> bool:
        """Whether all errors are within the bounds. So are a loss or gradients that are off by no
        more than roundings of the parameters change them: at a minimum, the gradients of the
        examples cancel to almost 0, and their roundings do not."""
        return self.is_comparable and self._is_finite and not self._is_past

    @property
    def is_off(self) -> bool:
        """Whether half precision is at fault: an error is past its bound, or the loss itself
        overflows. After a gradient that overflows the loss scale falls, which is no fault."""
        if not self.is_comparable:
            return False
        return self._is_past if self._is_finite else not math.isfinite(self.loss)

    @property
    def is_far_off(self) -> bool:
        """Whether it is off by much more than the bounds, so that one audit is enough. Gradients
        are so only if the loss is off too: at a kink of the loss, one batch may have any."""
        of_loss, of_all, _ = self.bounds
        is_loss_off = self.loss_error > FAR_OFF * of_loss and not self.measured.is_rounding
        are_off = self.gradient_error > FAR_OFF * of_all and self.loss_error > of_loss
        return self.is_off and (not self._is_finite or is_loss_off or are_off)

    @property
    def overflows(self) -> bool:
        """Whether only the gradients overflow, at this loss scale: the step is skipped."""
        return self.is_comparable and not self._is_finite and not self.is_off

    @property
    def is_comparable(self) -> bool:
        """Whether there is a float32 reference: it is finite, and the same in two calls."""
        return bool(self.measured.is_float32_finite and self.measured.is_alike)

    @property
    def _is_finite(self) -> bool:
        return bool(self.measured.is_finite)

    @property
    def _is_past(self) -> bool:
        of_loss, of_all, of_tensor = self.bounds
        is_loss_off = self.loss_error > of_loss and not self.measured.is_rounding
        are_off = self.gradient_error > of_all or self.worst[1] > of_tensor
        return is_loss_off or (are_off and not self.measured.are_roundings)

    @property
    def _said(self) -> str:
        """What was found, as text."""
        loss, exact = self.measured[:2]
        if not self.measured.is_float32_finite:
            return (
                f"loss or gradients are not finite in float32 either (the loss is {exact:.4g}), so "
                f"it is not the precision: look at the data and the weights."
            )
        if not self.measured.is_alike:
            return (
                "two float32 calls of the loss with the same batch return different losses, so "
                "there is nothing to compare with. Draw random numbers from a key in the batch or "
                "the state, and leave out what changes from call to call."
            )
        if self.overflows:
            return (
                f"a gradient overflows at the loss scale {as_power(self.measured.scale)}, so the "
                f"step is skipped, and the scale falls unless it is at its lowest. Audit the next "
                f"step."
            )
        if not self._is_finite:
            return (
                f"the loss is {loss:.4g} in half precision, and {exact:.4g} in float32: a number "
                f"overflows before the backward pass, which no loss scale mends. {XRAY_IT}"
            )
        name, error = self.worst
        errors = (
            f"the loss is off by {percentage(self.loss_error)} from float32, all gradients by "
            f"{percentage(self.gradient_error)}, the worst tensor {name!r} by {percentage(error)}"
        )
        if self.ok:
            of_all, of_tensor = self.bounds[1:]
            if self.gradient_error > of_all or error > of_tensor:
                return f"{errors}, which is no more than roundings of the parameters explain."
            return f"{errors}, within the bounds."
        is_backward = self.loss_error <= self.bounds[0]
        return (
            f"{errors}, past the bounds of {', '.join(map(percentage, self.bounds))}. {XRAY_IT}"
            f"{NOT_LINEAR if is_backward else ''}"
        )

    def record(self) -> dict[str, Any]:
        """What a recording keeps, by name: errors, `ok`, whether they are far off, and the name of
        the worst tensor. Without a reference, errors are NaN."""
        nothing = math.nan if not self.is_comparable else 1.0
        return {
            "audit_loss_error": self.loss_error * nothing,
            "audit_gradient_error": self.gradient_error * nothing,
            "audit_tensor_error": self.worst[1] * nothing,
            "audit_ok": self.ok,
            "audit_far_off": self.is_far_off,
            "audit_tensor": self.worst[0],
        }

    def __str__(self) -> str:
        when = "Audit" if self.step is None else f"Audit of step {int(jax.device_get(self.step))}"
        when += f" on 1/{self.part} of the batch" if self.part > 1 else ""
        return f"{when}: {self._said}"

    __repr__ = __str__


def audit(
    fun: Callable[..., Any],
    *args: PyTree,
    scale: Scalar | None = None,
    has_aux: bool = False,
    using: Using | None = None,
    bounds: Sequence[float] = BOUNDS,
) -> AuditResult:
    """Compares the loss and gradients of a batch in half precision with those in float32.

    Rules and plans say what is safe in general and at one point of training; an audit measures it
    on this batch at these weights. The float32 side is the function as it was written, in true
    float32 on a GPU too, and without a loss scale. `train_step(loss_fn, audit_every=1000)` does so
    in a run; this is for loops of your own. `mend` takes back into float32
    what spoils a step. Nothing that the function changes is changed.

    Args:
        fun: what `autocast` returned for a loss. Create it once: an audit is compiled for each.
        *args: a `TrainState` and the batch, or the parameters and the batch.
        scale: the loss scale, > 0. By default it is 1.0 if nothing in the loss is in float16 or
            float8, or `fun` has a `loss_scale` of its own, and else that of the `TrainState`,
            without which it is needed.
        has_aux: whether `fun` returns aux.
        using: the function that differentiates, by default as for `gainstage.value_and_grad`.
        bounds: the largest errors of the loss, of all gradients together, and of the gradient of
            one tensor that are `ok`: three numbers > 0, `math.inf` for no bound.

    Returns:
        An `AuditResult` with `loss_error`, `gradient_error`, `worst` and `ok`; `print` it. Its
        numbers stay on the device until they are read.

    Raises:
        TypeError: there is neither a state nor a scale, or the loss is not a scalar.
        ValueError: `fun` is not from `autocast`, or `scale` or `bounds` are out of range.

    Examples:
        >>> import gainstage as gs
        >>> import jax, jax.numpy as jnp
        >>> def loss_fn(w, x, y):
        ...     return jnp.mean((x @ w + 300.0 - y) ** 2)
        >>> half = gs.autocast(loss_fn)
        >>> x = jax.random.normal(jax.random.key(0), (64, 8))
        >>> y = x @ jnp.ones(8) + 300.0
        >>> print(gs.audit(half, jnp.zeros(8), x, y, scale=2.0**10).ok)
        True

    Source: Micikevicius et al., 2018, arXiv:1710.03740, for float32 as the reference.
    """
    loss, given, limits = given_to("audit", fun, args, scale, has_aux, using, bounds)
    return audited(loss, given, limits)[0]


def given_to(
    caller: str,
    fun: Callable[..., Any],
    args: Sequence[PyTree],
    scale: Scalar | None,
    has_aux: bool,
    using: Using | None,
    bounds: Sequence[float],
) -> tuple[LossFunction, "Given", "Bounds"]:
    """The loss, its arguments and the bounds, from the arguments of `audit` or `mend`."""
    check_cast("fun", fun, f"gs.{caller}(gs.autocast(fun), ...)")
    state = args[0] if args and isinstance(args[0], TrainState) else None
    first = args[0] if args else None
    params, extra = (first, None) if state is None else (state.params, state.extra)
    own = [params] if extra is None else [params, extra]
    if scale is None and (
        getattr(fun, "is_self_scaled", False) or not needs_scale(fun, (*own, *args[1:]))
    ):
        scale = 1.0
    elif scale is None and state is not None:
        scale = state.loss_scale
    if scale is None or not args:
        raise TypeError(
            "Expected a TrainState, or parameters and a scale; got neither. Write "
            f"gainstage.{caller}(fun, state, *batch), or gainstage.{caller}(fun, params, *batch, "
            f"scale=scale)."
        )
    if not isinstance(scale, jax.Array):
        scale = checks.loss_scale("scale", scale)
    limits = checked_bounds("bounds", bounds)
    loss = LossFunction(fun, checks.flag("has_aux", has_aux), using)
    if extra is None:
        check_arguments(loss, (params, *args[1:]), call=f"gainstage.{caller}(fun, state")
    step = None if state is None else state.step
    return loss, Given(params, extra, tuple(args[1:]), scale, step), limits


def audited(
    loss: LossFunction, given: "Given", bounds: "Bounds", part: int = 1
) -> tuple[AuditResult, int]:
    """The audit of a batch, or of a part of it that fits into memory, and that part."""
    audit = functools.partial(of_batch, _compiled, loss, given, bounds)
    return on_a_part_that_fits(lambda part: (audit(part), part), given.batch, part)


def on_a_part_that_fits(measure: Callable[[int], Found], batch: PyTree, part: int = 1) -> Found:
    """What is measured on a batch, or on a smaller part of it if that does not fit into memory.

    Args:
        measure: `part -> result`, on the first `1 / part` of the batch.
        batch: the batch.
        part: the first that is tried.
    """
    for smaller in (part, *(p for p in PARTS if p > part)):
        try:
            return measure(smaller)
        except jax.errors.JaxRuntimeError as error:
            is_last = smaller == PARTS[-1] or not shares_axis(batch)
            if is_last or not is_out_of_memory(error):
                raise
    raise AssertionError  # the last part has returned or raised


def check_cast(name: str, fun: Any, advice: str) -> None:
    """Raises a ValueError for a function that has no half precision to compare with float32."""
    if not callable(fun):
        raise TypeError(f"Expected a function for {name}; got {checks.brief(fun)}.")
    if plan_of(fun) is None:
        raise ValueError(
            f"Expected a loss that gainstage.autocast returned for {name}, as an audit compares it "
            f"with the same function in float32; got {checks.brief(fun)}. Write {advice}."
        )


Bounds = tuple[float, float, float]  # as `audit` takes them


def checked_bounds(name: str, bounds: Sequence[float]) -> Bounds:
    """The bounds, if they are three numbers > 0."""
    try:
        of_loss, of_all, of_tensor = bounds
    except (TypeError, ValueError):
        raise TypeError(
            f"Expected three numbers for {name}, the largest errors of the loss, of all gradients "
            f"and of a tensor, such as {BOUNDS}; got {bounds!r}."
        ) from None
    low, mid, high = (
        math.inf if each == math.inf else checks.real(name, each, above=0.0)
        for each in (of_loss, of_all, of_tensor)
    )
    return low, mid, high


class Given(NamedTuple):
    """The arguments of an audited step."""

    params: PyTree
    extra: PyTree
    batch: PyTree
    scale: ArrayLike
    step: Any = None  # its number
    lowest: float = 0.0  # below which the loss scale does not fall; 0 if it does not fall

    @property
    def floor(self) -> float:
        """The scale at which a gradient that overflows is one that no loss scale helps."""
        return self.lowest or 1.0


def _rounding_in(loss: LossFunction) -> float:
    """The largest relative error of rounding a number to half precision once."""
    plan = plan_of(loss.fun)
    is_short = plan is not None and plan.dtype == "bfloat16"
    return float(jnp.finfo("bfloat16" if is_short else "float16").eps) / 2


def of_batch(
    compiled: Callable[..., Any],
    loss: LossFunction,
    arguments: Given,
    bounds: Bounds,
    part: int,
) -> AuditResult:
    """The audit of a batch.

    Args:
        compiled: what `compiled_audit` returned.
        loss: a loss under autocast.
        arguments: those of the step.
        bounds: as for `audit`.
        part: use the first `1 / part` of the batch.
    """
    arrays, partition = split(arguments.params, arguments.extra)
    scale, limits = jnp.float32(arguments.scale), np.asarray(bounds, np.float32)
    batch, models = traced_of(arguments.batch)
    found = compiled(loss, partition, part, models, arrays, batch, scale, limits)
    return dataclasses.replace(found, step=arguments.step, bounds=bounds)


def compiled_audit() -> Callable[..., Any]:
    """What `of_batch` takes: a compiled function, with a cache of its own."""
    return jax.jit(functools.partial(_compare), static_argnums=(0, 1, 2, 3))


def shares_axis(batch: PyTree) -> bool:
    """Whether all arrays of a batch have a leading axis of one size, which has an eighth. Those of
    models are not of the batch."""
    sizes = {np.shape(leaf)[0] for _, leaf in outside_models(batch) if np.ndim(leaf)}
    return len(sizes) == 1 and min(sizes) >= PARTS[-1]


def first_part(batch: PyTree, part: int) -> PyTree:
    """The first `1 / part` of a batch."""
    if part == 1:
        return batch
    return map_outside_models(lambda x: x[: len(x) // part] if jnp.ndim(x) else x, batch)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that there is not enough memory."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def _compare(
    loss_fn: LossFunction,
    partition: Partition,
    part: int,
    models: Static | None,
    arrays: list[Any],
    batch: PyTree,
    scale: jax.Array,
    bounds: jax.Array,
) -> AuditResult:
    rounding = _rounding_in(loss_fn)
    batch = first_part(batch if models is None else models.combine(*batch), part)

    def side(scale: jax.Array, arrays: list[Any]) -> tuple[jax.Array, PyTree, PyTree]:
        params, extra, _ = partition.combine(arrays)
        state = StateParts(params, None, extra, None)
        backward = compute_gradients(loss_fn, state, scale, Changeable(batch).tree)
        chosen = kind_of(params).chosen(params, backward.grads)
        return backward.loss, gradients.unscale(backward.grads, backward.scale), chosen

    # The loss as it was written: autocast changes nothing in `IS_KEPT`, at any depth of calls, and
    # no product is rounded to TF32 or bfloat16.
    with IS_KEPT(True), jax.default_matmul_precision("highest"):
        exact, true, params = side(jnp.float32(1.0), arrays)
        model, extra, _ = partition.combine(arrays)
        args = (model, *([] if extra is None else [extra]), *Changeable(batch).tree)
        # XLA computes it once, if it is the same.
        whole = loss_fn._replace(has_extra=extra is not None)
        again = gradients.upcast(whole.parts(whole.fun(*args))[0])
    loss, grads, _ = side(scale, arrays)

    named = [
        (joined(path) if joined(path)[:1].isalpha() else joined(path, "params"), g, t, w)
        for (path, t), g, w in zip(
            jax.tree_util.tree_flatten_with_path(true)[0],
            jax.tree.leaves(grads),
            jax.tree.leaves(params),
            strict=True,
        )
        if jnp.issubdtype(t.dtype, jnp.inexact)
    ]
    if not named:
        raise TypeError(f"Expected floating parameters; got {checks.brief(params)}.")
    size = functools.reduce(jnp.maximum, (jnp.abs(t).max(initial=0.0) for _, _, t, _ in named))
    unit = jnp.where(size > 0, size, 1.0)  # squares of gradients neither overflow nor vanish

    def square(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(jnp.abs(x / unit)), dtype=jnp.float32)

    norms = jnp.stack([square(t) for _, _, t, _ in named])
    errors = jnp.stack([square(g - t) for _, g, t, _ in named])
    counts = norms >= COUNTS**2 * norms.sum()
    each = jnp.where(counts & (errors > 0), jnp.sqrt(errors / norms), 0.0)
    worst = jnp.argmax(each)
    gradient_error = jnp.sqrt(_ratio(errors.sum(), norms.sum()))
    is_past, are_past = gradient_error > bounds[1], each > bounds[2]

    def moved(size: jax.Array) -> jax.Array:
        """The squares of the changes of the gradients if each parameter is rounded."""
        with IS_KEPT(True), jax.default_matmul_precision("highest"):
            _, other, _ = side(
                jnp.float32(1.0), _with_roundings(arrays, partition.params.count, size)
            )
        other = [t for t in jax.tree.leaves(other) if jnp.issubdtype(t.dtype, jnp.inexact)]
        return jnp.stack([square(o - t) for o, (_, _, t, _) in zip(other, named, strict=True)])

    # Two gradients more, only where there is an error to be explained. At a kink of the loss, such
    # as that of a maximum, one of the two directions may be on the other side of it.
    both = rounding * jnp.array([1.0, -1.0], jnp.float32)
    shifts = jax.lax.cond(
        is_past | are_past.any(),
        lambda: jax.lax.map(moved, both).max(axis=0),
        lambda: jnp.zeros_like(norms),
    )
    explained = jnp.where(shifts >= CANCELS**2 * norms, ROUNDINGS**2 * shifts, 0.0)
    are_explained = (~are_past | (errors <= explained)).all()
    are_explained &= ~is_past | (errors.sum() <= explained.sum())
    # The largest change of the loss, to first order, if each parameter is rounded.
    change = sum(jnp.sum(jnp.abs(t * w), dtype=jnp.float32) for *_, t, w in named)
    slack = ROUNDINGS * rounding * change
    off, half = loss - exact, (loss, *(g for _, g, *_ in named))
    difference = _ratio(off, jnp.abs(exact))
    true_finite = jnp.isfinite(exact) & jnp.isfinite(norms).all()
    measured = Measured(
        loss=loss,
        float32_loss=exact,
        difference=difference,
        is_rounding=jnp.abs(off) <= slack,
        gradient_error=gradient_error,
        worst_error=each[worst],
        worst_index=worst,
        are_roundings=are_explained & (jnp.abs(difference) <= bounds[0]),
        is_finite=jnp.stack([jnp.isfinite(x).all() for x in half]).all(),
        is_float32_finite=true_finite,
        is_alike=jnp.abs(again - exact) <= SAME_LOSS * jnp.abs(exact) + slack,
        scale=scale,
    )
    numbers = jnp.stack([jnp.asarray(number, jnp.float32) for number in measured])
    return AuditResult(numbers, None, tuple(name for name, *_ in named), part=part)


def _with_roundings(arrays: list[Any], count: int, size: jax.Array) -> list[Any]:
    """The first arrays, each number off by a relative `size`, up or down; the rest as they are."""

    def off(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        # The last bit of a number decides, which is as good as chance and placed as the number is.
        bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
        return x + x * (size.astype(x.dtype) * (1 - 2 * (bits & 1).astype(x.dtype)))

    return [*map(off, arrays[:count]), *arrays[count:]]


def _ratio(part: jax.Array, whole: jax.Array) -> jax.Array:
    """A quotient; 0 where both are 0."""
    return jnp.where(part == 0, 0.0, part / jnp.where(part == 0, 1.0, whole))


def percentage(share: float) -> str:
    """An error as text."""
    return f"{100 * share:.2g} %"


_compiled = compiled_audit()  # of all functions that `audit` is given
