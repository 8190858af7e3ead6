"""The machines of `rules_never_die`: each rule of ours, with the steps through which users run it.

Every machine takes the step that a user takes: `with_loss_scale(...).update`, `train_step`,
`minimize`, `stateless_apply`, or what `compat` has. Periods are small, so that all states can be
visited.
"""

import functools
import io
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gainstage as gs
from gainstage.compat import experimental, tf2, v1
from gainstage.optimizers import SGD, Variable, functionalize
from gainstage.rules import adaptive as measured

from .rules_search import Input, Machine, changed, network

W = 1.5  # the weight before each step
RETRIES = 16  # more than there are powers of two between the bounds of a small rule
SMALL = {"min_scale": 2.0**-4, "max_scale": 2.0**8}


# Of `AdaptiveLossScale`: its gradients are just above the smallest float32, so that the largest one
# fades to 0 within a few steps. `TINY` wants the largest scale, `LARGE` one between the bounds.
NAMES = {"scale": "dynamic_scale", "good_steps": "step_counter"}  # of an optimizer's variables
TINY, LARGE = 2.0**-124, 2.0**-119
ADAPTIVE = gs.AdaptiveLossScale(
    2.0**4, 2, memory=1, min_scale=1.0, max_scale=2.0**6, largest_number=2.0**-114 - 2.0**-125
)


def power(x: float) -> str:
    """A power of two as it is written in code."""
    return f"2**{math.log2(x):g}"


def batches(*thresholds: float, adaptive: bool = False) -> list[Input]:
    """Every kind of batch: finite, without gradients, overflowing, and with a non-finite loss."""
    gradient = LARGE if adaptive else 1.0
    tiny = [Input("tiny gradients", TINY, rises=True)] if adaptive else []
    return [
        *tiny,
        Input("finite", gradient, rises=not adaptive),
        Input("zero gradients", 0.0, rises=True),
        Input("overflow", gradient, limit=0.0),
        *(Input(f"overflow above {power(t)}", gradient, gradient * t) for t in thresholds),
        Input("NaN data", np.nan, loss=np.nan),
        Input("infinite loss", np.inf, loss=np.inf),
    ]


def about(rule: gs.LossScale, retries: int = 0) -> Any:
    """What the invariants need to know of a rule."""
    facts: dict[str, Any] = {"retries": retries}
    if isinstance(rule, gs.FixedLossScale):
        value = rule.loss_scale_value
        return facts | {"start": value, "bounds": (value, value)}
    facts |= {"start": rule.initial_loss_scale, "period": rule.increment_period}
    facts["bounds"] = min(rule.initial_loss_scale, rule.min_scale), rule.max_scale
    if isinstance(rule, gs.DynamicLossScale):
        down = rule.backoff_factor or 1 / rule.multiplier
        facts["factors"] = min(down, rule.multiplier), max(down, rule.multiplier)
        facts["mixes"] = rule.hysteresis == 1
        if rule.multiplier <= 1:
            return facts | {"period": 0}
        undone = math.ceil(math.log(rule.multiplier) / -math.log(down) - 1e-9)
        facts["allowed"] = rule.hysteresis * undone
    return facts | ({"allowed": 0.0} if retries else {})


# ── optax loops ──────────────────────────────────────────────────────────────────────────────


def in_optax_loop(
    rule: gs.LossScale, given: Sequence[Input], row: str, setting: str, **how: Any
) -> Machine:
    """A rule in the loop of a user: `value_and_grad`, `update` and `apply_updates`, or, with
    `retries`, `train_step`."""
    tx = gs.with_loss_scale(optax.adam(0.25), rule)
    weight = jnp.float32(W)
    start = gs.TrainState.create(weight, tx)
    state = start.opt_state
    inner = jax.tree.map(lambda x: x + 3, state.inner)
    first, tree = jax.tree.flatten(state.rule_state)
    retries, value = how.get("retries", 0), how.get("value", True)
    whole = gs.train_step(network, retries=retries, donate=False)

    def step(leaves: list[Any], batch: tuple[Any, ...]) -> tuple[list[Any], jax.Array]:
        before = state._replace(rule_state=tree.unflatten(leaves), inner=inner)
        if retries:
            taken, _ = whole(start.replace(opt_state=before), *batch)
            params, after = taken.params, taken.opt_state
        else:
            loss, grads = gs.value_and_grad(network, before)(weight, *batch)
            extra = {"value": loss} if value else {}
            updates, after = tx.update(grads, before, weight, **extra)
            params = gs.transforms.apply_updates(weight, updates, after)
        moved = changed((weight, inner), (params, after.inner))
        return folded(rule, jax.tree.leaves(after.rule_state)), moved

    def reload(leaves: list[np.ndarray]) -> list[np.ndarray]:
        file = io.BytesIO()
        np.savez(file, *leaves)
        file.seek(0)
        read = np.load(file)
        put = jax.device_put(tree.unflatten([read[name] for name in read.files]))
        return [np.asarray(x) for x in jax.tree.leaves(put)]

    arrays = [np.asarray(x) for x in first]
    return Machine(row, setting, step, arrays, given, reload=reload, **about(rule, retries))


def folded(rule: gs.LossScale, leaves: list[Any]) -> list[Any]:
    """A state without what makes it one of infinitely many: after ten retries of
    `AdaptiveLossScale` only the rest of the count of bad steps decides."""
    if not isinstance(rule, gs.AdaptiveLossScale):
        return leaves
    state, most = measured.AdaptiveState(*leaves), 10 * measured.RETRY
    count = most + state.bad_steps % measured.RETRY
    return list(state._replace(bad_steps=jnp.where(state.bad_steps > most, count, state.bad_steps)))


# ── optimizers ───────────────────────────────────────────────────────────────────────────────


def in_optimizer(
    make: Callable[[], "Live"], given: Sequence[Input], row: str, setting: str, **facts: Any
) -> Machine:
    """An optimizer whose step is a function of the values of its variables."""
    one, other = make(), make()
    kept = [v for v in one.variables if v not in one.searched]
    fresh = {v: v.value() + (3 if v.dtype == jnp.int32 else 0.5) for v in kept}
    places = [one.variables.index(v) for v in one.searched]

    def step(leaves: list[Any], batch: tuple[Any, ...]) -> tuple[list[Any], jax.Array]:
        held = fresh | dict(zip(one.searched, leaves, strict=True))
        before = [held[v] for v in one.variables]
        after = one.take(before, batch)
        moved = changed(one.watched(before), one.watched(after))
        return one.folded([after[place] for place in places]), moved

    def reload(leaves: list[np.ndarray]) -> list[np.ndarray]:
        found = []
        for row in zip(*leaves, strict=True):
            held = fresh | dict(zip(one.searched, row, strict=True))
            other.load([np.asarray(held[v]) for v in one.variables])
            found.append([other.variables[place].numpy() for place in places])
        return [np.array(column) for column in zip(*found, strict=True)]

    first = [v.numpy() for v in one.searched]
    place = one.searched.index(one.scale)
    return Machine(row, setting, step, first, given, scale=place, reload=reload, **facts)


class Live(NamedTuple):
    """An optimizer as its variables and a pure step of their values."""

    variables: list[Variable]
    searched: list[Variable]  # those that decide on the next scale
    scale: Variable
    take: Callable[[list[Any], Any], list[Any]]
    load: Callable[[list[np.ndarray]], None]
    watched: Callable[[list[Any]], list[Any]]  # of all values, those that a skipped step keeps
    folded: Callable[[list[Any]], list[Any]] = list


def scaled_optimizer(
    rule: gs.LossScale, window: int = 0, retries: int = 0, pure: bool = False
) -> Live:
    """A `LossScaleOptimizer` through `stateless_apply` if `pure`, else through `minimize`."""
    options: dict[str, Any] = {}
    if window:
        options = {"gradient_accumulation_steps": window}
    weight = Variable(W, name="weight")
    opt = gs.optimizers.LossScaleOptimizer(SGD(0.25, momentum=0.5, **options), loss_scale=rule)
    opt.build([weight])
    inner = opt.inner_optimizer.variables
    own = [v for v in opt.variables if v not in inner]
    counts = [v for v in inner if v.dtype == jnp.int32] if window else []
    variables = [weight, *opt.variables]
    scaled = functionalize(lambda loss: opt.scale_loss(loss), opt.variables)
    whole = functionalize(
        lambda batch: opt.minimize(lambda: network(weight.value(), *batch), [weight],
                                   retries=retries), variables
    )  # fmt: skip

    def take(values: list[Any], batch: Any) -> list[Any]:
        if not pure:
            return whole(values, batch)[1]
        first, *state = values
        gradient = jax.grad(lambda w: scaled(state, network(w, *batch))[0])(first)
        (new,), state = opt.stateless_apply(state, [gradient], [first])
        return [new, *state]

    def watched(values: list[Any]) -> list[Any]:
        held = dict(zip(variables, values, strict=True))
        kept = {v: held[v] for v in variables if v not in own and v not in counts}
        if not window:
            return list(kept.values())
        return [*kept.values(), held[counts[0]]]

    def folded_(leaves: list[Any]) -> list[Any]:
        new = leaves[: len(own)]
        if isinstance(rule, gs.AdaptiveLossScale):
            names = [v.name.rpartition("/")[2] for v in own]
            order = [
                names.index(NAMES.get(field, field)) for field in measured.AdaptiveState._fields
            ]
            state = folded(rule, [new[place] for place in order])
            for place, leaf in zip(order, state, strict=True):
                new[place] = leaf
        if counts:
            return [*new, leaves[len(own)] % window, *leaves[len(own) + 1 :]]
        return new

    def load(values: list[np.ndarray]) -> None:
        weight.assign(values[0])
        opt.set_weights(values[1:])

    return Live(variables, [*own, *counts], opt.dynamic_scale, take, load, watched, folded_)


def scale_alone(make: Callable[[], Any]) -> Live:
    """A loss scale of `compat.experimental` in a loop that asks it whether to apply a step."""
    weight, scale = Variable(W), make()
    variables = [weight, *scale.variables]

    def one(batch: Any) -> None:
        scaled = jax.grad(lambda w: network(w, *batch) * scale())(weight.value())
        _, should_apply = scale.update([scaled / scale()])
        weight.assign(jnp.where(should_apply, weight + 1, weight.value()))

    return Live(
        variables, scale.variables, scale.variables[0], only_values(one, variables),
        lambda values: list(map(Variable.assign, variables, values)), lambda values: values[:1],
    )  # fmt: skip


def tf2_optimizer(dynamic: bool, **scale: Any) -> Live:
    """`compat.tf2.LossScaleOptimizer`. As in TensorFlow, a skipped step counts in `iterations`."""
    weight = Variable(W, name="weight")
    opt = tf2.LossScaleOptimizer(SGD(0.25, momentum=0.5), dynamic, **scale)
    opt.build([weight])
    variables = [weight, *opt.variables]
    own = [v for v in opt.variables if v not in opt.inner_optimizer.variables]
    watched = [v not in own and v is not opt.iterations for v in variables]

    def one(batch: Any) -> None:
        opt.minimize(lambda: network(weight.value(), *batch), [weight])

    def load(values: list[np.ndarray]) -> None:
        weight.assign(values[0])
        opt.set_weights(values[1:])

    return Live(
        variables, own, opt.dynamic_scale, only_values(one, variables), load,
        lambda values: list(itertools.compress(values, watched)),
    )  # fmt: skip


def v1_optimizer(make: Callable[[], Any]) -> Live:
    """`compat.v1.MixedPrecisionLossScaleOptimizer`, with a global step."""
    weight, count = Variable(W, name="weight"), Variable(0, name="global_step")
    opt = v1.MixedPrecisionLossScaleOptimizer(v1.MomentumOptimizer(0.25, 0.5), make())
    opt.build([weight])
    variables = [weight, count, *opt.variables()]
    own = [v for v in variables if v.name in ("current_loss_scale", "good_steps")]
    scale = next(v for v in own if v.name == "current_loss_scale")
    watched = [v not in own for v in variables]

    def one(batch: Any) -> None:
        opt.minimize(lambda: network(weight.value(), *batch), count, [weight])

    def load(values: list[np.ndarray]) -> None:
        weight.assign(values[0])
        count.assign(values[1])
        opt.set_weights(values[2:])

    return Live(
        variables, own, scale, only_values(one, variables), load,
        lambda values: list(itertools.compress(values, watched)),
    )  # fmt: skip


def only_values(one: Callable[[Any], None], variables: list[Variable]) -> Any:
    """A step on variables as a function of their values."""
    whole = functionalize(one, variables)
    return lambda values, batch: whole(values, batch)[1]


# ── all of them ──────────────────────────────────────────────────────────────────────────────

FACTORS = [(2.0, None), (2.0, 0.25), (4.0, 0.5), (1.0, None), (0.5, None)]
FIXED = gs.FixedLossScale(8.0)
USUAL = gs.DynamicLossScale(8.0, 3, **SMALL)
PATIENT = gs.DynamicLossScale(8.0, 3, hysteresis=2, **SMALL)
FEW, WIDE = batches(2.0**-4, 2.0**0, 2.0**4), batches(2.0**0, 2.0**13)
MEASURED = batches(2.0**0, 2.0**3, adaptive=True)


def given_to(rule: gs.LossScale) -> list[Input]:
    """The batches for a rule with narrow bounds."""
    return MEASURED if isinstance(rule, gs.AdaptiveLossScale) else FEW


def settings() -> Iterator[tuple[str, gs.DynamicLossScale]]:
    """`DynamicLossScale` over its options, each with words for it."""
    for period, hysteresis, (up, down) in itertools.product((1, 2, 3), (1, 2, 3), FACTORS):
        rule = gs.DynamicLossScale(
            8.0, period, up, backoff_factor=down, hysteresis=hysteresis, **SMALL
        )
        words = f"period {period}, hysteresis {hysteresis}, multiplier {up:g}"
        yield words + (f", backoff {down:g}" if down else ""), rule
    yield "starts below the minimum", gs.DynamicLossScale(2.0**-6, 2, **SMALL)
    yield "starts at the maximum", gs.DynamicLossScale(2.0**8, 2, **SMALL)
    yield "one scale", gs.DynamicLossScale(8.0, 2, min_scale=8.0, max_scale=8.0)


def machines() -> Iterator[Machine]:
    """Each rule of ours, with each step that it is used in."""
    yield in_optax_loop(FIXED, FEW, "`FixedLossScale`, `with_loss_scale`", "8")
    row = "`DynamicLossScale`, `with_loss_scale`"
    for words, rule in settings():
        yield in_optax_loop(rule, FEW, row, words)
    yield in_optax_loop(gs.DynamicLossScale(2.0**15, 3), WIDE, row, "usual bounds")
    row = "`AdaptiveLossScale`, `with_loss_scale`"
    yield in_optax_loop(ADAPTIVE, MEASURED, row, "loss known")
    row += " without a loss"
    yield in_optax_loop(ADAPTIVE, MEASURED, row, "loss unknown", value=False)

    row = "`DynamicLossScale`, `LossScaleOptimizer.stateless_apply`"
    for words, rule in (("usual", USUAL), ("hysteresis 2", PATIENT)):
        yield optimizer(rule, row, words, pure=True)
    row = "`gradient_accumulation_steps`"
    for window in (2, 3):
        words = f"windows of {window}"
        yield optimizer(USUAL, f"`DynamicLossScale`, {row}", words, window=window, pure=True)
    # three microbatches make a million states
    yield optimizer(ADAPTIVE, f"`AdaptiveLossScale`, {row}", "windows of 2", window=2)

    for name, rule in (("Fixed", FIXED), ("Dynamic", USUAL), ("Adaptive", ADAPTIVE)):
        row = f"`{name}LossScale`, retries"
        how = {"retries": RETRIES}
        yield in_optax_loop(rule, given_to(rule), row, "`train_step`", **how)
        yield optimizer(rule, row, "`minimize`", **how)
        yield optimizer(rule, row, "`minimize`, windows of 2", window=2, **how)
    row = "`DynamicLossScale(hysteresis=2)`, retries"
    yield in_optax_loop(PATIENT, FEW, row, "`train_step`", retries=RETRIES)
    yield optimizer(PATIENT, row, "`minimize`", retries=RETRIES)
    yield from of_compat()


def optimizer(rule: gs.LossScale, row: str, words: str, **how: Any) -> Machine:
    """A rule in a `LossScaleOptimizer`."""
    facts = about(rule, how.get("retries", 0))
    return in_optimizer(lambda: scaled_optimizer(rule, **how), given_to(rule), row, words, **facts)


def of_compat() -> Iterator[Machine]:
    """The rules of `compat`."""
    row = "`compat.experimental.DynamicLossScale`"
    for period, up in ((0, 2.0), (3, 2.0), (2, 4.0)):
        make = functools.partial(experimental.DynamicLossScale, 8.0, period, up)
        words, facts = f"period {period}, multiplier {up:g}", about(make().rule)
        yield in_optimizer(functools.partial(scale_alone, make), WIDE, row, words, **facts)
    floored = about(gs.DynamicLossScale(8.0, 3, min_scale=1.0))
    rows = [
        ("dynamic", {"dynamic_growth_steps": 3}, floored),
        ("fixed", {}, about(FIXED)),
    ]
    for words, how, facts in rows:
        make = functools.partial(tf2_optimizer, words == "dynamic", initial_scale=8.0, **how)
        row = f"`compat.tf2.LossScaleOptimizer`, {words}"
        yield in_optimizer(make, WIDE, row, words, **facts)
    scales = [
        ("dynamic", functools.partial(experimental.DynamicLossScale, 8.0, 3), floored),
        ("fixed", functools.partial(experimental.FixedLossScale, 8.0), about(FIXED)),
    ]
    for words, make, facts in scales:
        row = f"`compat.v1.MixedPrecisionLossScaleOptimizer`, {words}"
        yield in_optimizer(functools.partial(v1_optimizer, make), WIDE, row, words, **facts)
