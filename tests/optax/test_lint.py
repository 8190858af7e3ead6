"""`lint`: what a traced step shows of how its loss was scaled, and nothing of a right one."""

import functools
import re
import threading
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen
from jax.scipy.ndimage import map_coordinates
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from small_floats import SMALL

import gainstage as gs
from gainstage.compat import tf2
from gainstage.transforms import apply_updates, current_scale, locally_scaled, scale_loss

W, X, WIDE = jnp.ones(3), jnp.ones((8, 3)), jnp.ones((64, 48))
TX = gs.with_loss_scale(optax.adam(0.1))
STATE = TX.init(W)
WHOLE = gs.TrainState.create(W, optax.adam(0.1))
FIXED = gs.with_loss_scale(optax.sgd(0.1), gs.FixedLossScale(1.0))


def plain(w, *batch):
    return SMALL * jnp.sum(jnp.tanh(w) * w) * jnp.prod(jnp.asarray(batch, jnp.float32))


def grads_of(w, state, loss=plain):
    return gs.value_and_grad(loss, state)(w)[1]


@gs.autocast
def in_half(w):
    """A network in half precision."""
    hidden = jnp.tanh(WIDE @ jnp.outer(jnp.arange(48.0), jnp.tile(w, 16)))
    return jnp.mean((hidden @ jnp.tile(w, 16) - 1) ** 2)


def two_losses(other, weight=lambda first, second: 1.0):
    """A step of the sum of two gradients, of which the first one is scaled."""

    def step(w, state):
        first, second = grads_of(w, state, in_half), other(w, state)
        return TX.update(first + weight(first, second) * second, state, w)

    return step


def skipped_by(rule):
    """A step that is taken by a rule of one's own, which chooses between two states."""

    def step(w, state):
        grads = grads_of(w, state, in_half)
        updates, after = TX.update(grads, state, w)
        new, old = (apply_updates(w, updates, after), after), (w, state)
        return jax.tree.map(lambda a, b: jnp.where(rule(jnp.linalg.norm(grads)), a, b), new, old)

    return step


def by(change):
    """A loop whose gradients are changed before the update."""
    return lambda w, state: TX.update(change(grads_of(w, state), state), state, w)


def by_hand(w, state):
    return jax.grad(lambda w: scale_loss(plain(w), state))(w)


def of_backward(change):
    """A step of a loss with a part whose backward pass is written by hand."""

    @jax.custom_vjp
    def part(x):
        return x

    part.defvjp(lambda x: (x, None), lambda _, g: (change(g),))
    return part


def own(state, x=1.0):
    loss, extra, grads = state.value_and_grad(plain)(x)
    return state.apply_gradients(grads, extra), loss


def in_scan(change):
    """Steps in a `jax.lax.scan`, whose carry has the state."""

    def steps(w, state):
        def body(carry, x):
            w, state = carry
            grads = change(gs.value_and_grad(plain, state)(w, x)[1], state)
            updates, state = TX.update(grads, state, w)
            return (apply_updates(w, updates, state), state), current_scale(state)

        return jax.lax.scan(body, (w, state), jnp.ones(3))

    return steps


def in_while(w, state):
    def body(carry):
        n, w, state = carry
        updates, state = TX.update(grads_of(w, state), state, w)
        return n + 1, apply_updates(w, updates, state), state

    return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, w, state))


def in_cond(w, state):
    grads = jax.lax.cond(w[0] > 0, lambda: grads_of(w, state), lambda: 2 * grads_of(w, state))
    return TX.update(grads, state, w)


def microbatches(w, state):
    def body(total, x):
        return total + gs.value_and_grad(plain, state)(w, x)[1], None

    return TX.update(jax.lax.scan(body, 0.0 * w, jnp.ones(2))[0], state, w)


def on_devices(reduce, change=lambda g: g, **options):
    """A step on eight devices, of a loss of all of them."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def step(w, state, x):
        _, grads = gs.value_and_grad(lambda w: reduce(plain(w, x.sum())), state)(w)
        return TX.update(change(grads), state, w)

    specs = PartitionSpec(), PartitionSpec(), PartitionSpec("data")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), **options)
    return lambda w, state: mapped(w, state, jnp.ones(8))


def mean_of(x):
    return jax.lax.pmean(x, "data")


def sum_of(x):
    return jax.lax.psum(x, "data")


def two_states(w, state, other):
    return TX.update(grads_of(w, state), state, w), TX.update(grads_of(w, other), other, w)


def of_nnx():
    nnx = pytest.importorskip("flax.nnx")
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(16, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs))
    state = gs.TrainState.create(model, optax.adam(0.1))

    def step(state, x):
        loss_fn = gs.autocast(lambda model, x: jnp.mean(model(x) ** 2))
        _, extra, grads = state.value_and_grad(loss_fn)(x)
        return state.apply_gradients(grads, extra)

    return step, (state, jnp.ones((32, 16)))


def of_equinox():
    eqx = pytest.importorskip("equinox")
    state = gs.TrainState.create(eqx.nn.MLP(16, 1, 16, 1, key=jax.random.key(0)), optax.adam(0.1))

    def step(state, x):
        loss_fn = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)  # noqa: E731
        _, extra, grads = state.value_and_grad(gs.autocast(loss_fn))(x)
        return state.apply_gradients(grads, extra)

    return step, (state, jnp.ones((32, 16)))


def of_optimizer(step, compiled=False, wrap=gs.optimizers.LossScaleOptimizer):
    """A step of an optimizer with variables, eager or compiled."""
    w = gs.optimizers.Variable(W)
    opt = wrap(gs.optimizers.SGD(0.1))
    opt.build([w])
    take = lambda: step(opt, w)  # noqa: E731
    return gs.optimizers.jit(take, ([w], opt.variables)) if compiled else take


def minimized(opt, w):
    return opt.minimize(lambda: plain(w.value()), [w])


def computed(opt, w):
    opt.apply_gradients((2 * g, v) for g, v in opt.compute_gradients(lambda: plain(w.value()), [w]))


def grads_by_hand(opt, w):
    return jax.grad(lambda w: opt.scale_loss(plain(w)))(w.value())


def scaled_by_hand(opt, w):
    opt.apply([grads_by_hand(opt, w)], [w])


def unscaled_by_hand(opt, w):
    grads = [jax.grad(lambda w: opt.get_scaled_loss(plain(w)))(w.value())]
    opt.apply_gradients(zip(opt.get_unscaled_gradients(grads), [w], strict=True))


def pure():
    w, opt = gs.optimizers.Variable(W), gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(0.1))
    opt.build([w])
    scaled = gs.optimizers.functionalize(opt.scale_loss, opt.variables)

    def step(weights, state):
        grads = jax.grad(lambda w: scaled(state, plain(w[0]))[0])(weights)
        return opt.stateless_apply(state, grads, weights)

    return step, ([w.value()], [v.value() for v in opt.variables])


def squares(w):
    """A loss whose product is wide enough for half precision."""
    return jnp.sum((jnp.ones((64, 48)) @ jnp.tile(w, 16)) ** 2)


HALF = gs.autocast(squares, loss_scale=2.0**10)
NORM = of_backward(lambda g: g / jnp.linalg.norm(g))
SCALED = (W, STATE)


def line_search(w, state):
    tx = gs.with_loss_scale(optax.lbfgs())
    state, half = tx.init(w), gs.autocast(squares)
    loss, grads = gs.value_and_grad(half, state)(w)
    return tx.update(grads, state, w, value=loss, grad=grads, value_fn=half)


def of_two_tasks(state):
    """Two gradients, of which the second is 0 for a parameter, and weighted by a limited ratio."""
    one = lambda p: SMALL * jnp.sum(jnp.tanh(p["a"]) * p["b"])  # noqa: E731
    _, extra, grads = state.value_and_grad(one)()
    others = jax.grad(lambda p: jnp.sum(p["a"] ** 2))(state.params)
    ratio = optax.tree.norm(grads) / (optax.tree.norm(others) + 1e-20)
    weight = jnp.clip(ratio, 0, 1e8)
    return state.apply_gradients(jax.tree.map(lambda g, h: g + weight * h, grads, others), extra)


OF_TWO = gs.TrainState.create({"a": W, "b": W}, optax.adam(0.1), loss_scale=gs.FixedLossScale(2.0))
RIGHT = {
    "two tasks in float32": (of_two_tasks, (OF_TWO,)),
    "a line search in float16": (line_search, SCALED),
    "a loop": (by(lambda g, s: g), SCALED),
    "compiled": (jax.jit(by(lambda g, s: g)), SCALED),
    "clipped by their norm": (by(lambda g, s: g / jnp.maximum(optax.tree.norm(g), 1.0)), SCALED),
    "noise, decay and a mask": (
        by(lambda g, s: jnp.where(jnp.arange(3) < 2, 2 * g + 0.1 * W + jnp.sin(W), 0.0)),
        SCALED,
    ),
    "in bfloat16 over the wire": (
        by(lambda g, s: g.astype(jnp.bfloat16).astype(jnp.float32)),
        SCALED,
    ),
    "by hand, divided by the update": (
        lambda w, s: TX.update(by_hand(w, s), s, w, loss_scale=current_scale(s)),
        SCALED,
    ),
    "by hand, divided before": (
        lambda w, s: TX.update(by_hand(w, s) / current_scale(s), s, w),
        SCALED,
    ),
    "by the inverse": (
        lambda w, s: TX.update((1 / current_scale(s)) * by_hand(w, s), s, w),
        SCALED,
    ),
    "in a scan": (in_scan(lambda g, s: g), SCALED),
    "in a while loop": (in_while, SCALED),
    "in a cond": (in_cond, SCALED),
    "microbatches in a scan": (microbatches, SCALED),
    "on eight devices": (on_devices(lambda loss: jax.lax.pmean(loss, "data")), SCALED),
    "a sum of eight devices": (on_devices(lambda loss: jax.lax.psum(loss / 8, "data")), SCALED),
    "a sum that is divided": (on_devices(lambda loss: loss, lambda g: g / 8), SCALED),
    "a sum whose mean is divided": (
        on_devices(lambda loss: loss, lambda g: mean_of(g) / 8),
        SCALED,
    ),
    "a mean of what is divided": (on_devices(lambda loss: loss, lambda g: mean_of(g / 8)), SCALED),
    "a sum of what is divided": (on_devices(lambda loss: loss, lambda g: sum_of(g) / 64), SCALED),
    "a mean of mean gradients": (on_devices(mean_of, mean_of), SCALED),
    "a mean of gradients of each device": (
        on_devices(lambda loss: loss, mean_of, check_vma=False),
        SCALED,
    ),
    "a sum of gradients of each device": (
        on_devices(lambda loss: loss, lambda g: sum_of(g) / 8, check_vma=False),
        SCALED,
    ),
    "for each example": (
        lambda w, s: TX.update(
            jax.vmap(lambda x: gs.value_and_grad(plain, s)(w, x)[1])(jnp.ones(4)).mean(0), s, w
        ),
        SCALED,
    ),
    "gradients of another transformation around": (
        lambda w, s: TX.update(jax.jvp(lambda w: grads_of(w, s), (w,), (w,))[0], s, w),
        SCALED,
    ),
    "remat": (lambda w, s: TX.update(grads_of(w, s, jax.checkpoint(plain)), s, w), SCALED),
    "a scale for a part": (
        lambda w, s: TX.update(
            grads_of(w, s, lambda w: plain(locally_scaled(jnp.tanh, 2.0**10)(w))), s, w
        ),
        SCALED,
    ),
    "two states, each its own": (two_states, (W, STATE, TX.init(W))),
    "a state": (own, (WHOLE,)),
    "two losses of one state": (
        two_losses(lambda w, s: grads_of(w, s, in_half), lambda a, b: jnp.max(a) / jnp.max(b)),
        SCALED,
    ),
    "a second gradient in float32": (two_losses(lambda w, s: jax.grad(plain)(w)), SCALED),
    "a decay of weights": (two_losses(lambda w, s: 0.1 * w), SCALED),
    "a skip of finite steps alone": (
        skipped_by(lambda norm: (norm < 3) | ~jnp.isfinite(norm)),
        SCALED,
    ),
    "a sign with true cotangents": (lambda w, s: of_hidden_layer(jnp.sign)(w, s), SCALED),
    "a limit with true cotangents": (
        lambda w, s: of_hidden_layer(lambda g: jnp.clip(g, -0.1, 0.1))(w, s),
        SCALED,
    ),
    "a norm with true cotangents": (
        lambda w, s: of_hidden_layer(lambda g: g / (1e-8 + jnp.linalg.norm(g)))(w, s),
        SCALED,
    ),
    "a sign on each device with true cotangents": (
        lambda w, s: of_sharded_layer(jnp.sign)(w, s),
        SCALED,
    ),
    "an ensemble": (
        jax.vmap(own),
        (jax.vmap(lambda w: gs.TrainState.create(w, optax.adam(0.1)))(jnp.ones((2, 3))),),
    ),
    "a state made inside": (lambda w: own(gs.TrainState.create(w, optax.adam(0.1))), (W,)),
    "train_step": (gs.train_step(plain), (WHOLE,)),
    "train_step with retries": (gs.train_step(plain, retries=2), (WHOLE,)),
    "accumulation": (
        gs.train_step(plain),
        (gs.TrainState.create(W, optax.MultiSteps(optax.adam(0.1), 2)),),
    ),
    "schedule-free": (
        gs.train_step(plain),
        (gs.TrainState.create(W, optax.contrib.schedule_free_sgd(0.1)),),
    ),
    "a loss that scales itself": (
        lambda w: FIXED.update(jax.grad(HALF)(w), FIXED.init(w), w),
        (W,),
    ),
    "a part with true cotangents": (
        lambda w, s: TX.update(
            grads_of(w, s, lambda w: plain(locally_scaled(NORM, 1 / current_scale(s))(w))), s, w
        ),
        SCALED,
    ),
    "an update that is left out": (
        lambda w, s: TX.update(
            jnp.nan_to_num(grads_of(w, s)), s, w, apply_if=jnp.isfinite(w).all()
        ),
        SCALED,
    ),
    "minimize": (of_optimizer(minimized), ()),
    "minimize, compiled": (of_optimizer(minimized, compiled=True), ()),
    "minimize twice": (of_optimizer(lambda *a: (minimized(*a), minimized(*a))), ()),
    "minimize with retries": (
        of_optimizer(lambda opt, w: opt.minimize(lambda: plain(w.value()), [w], retries=2)),
        (),
    ),
    "compute_gradients": (of_optimizer(computed), ()),
    "compute_gradients of tf2": (of_optimizer(computed, wrap=tf2.LossScaleOptimizer), ()),
    "scale_loss of an optimizer": (of_optimizer(scaled_by_hand), ()),
    "get_scaled_loss of tf2": (of_optimizer(unscaled_by_hand, wrap=tf2.LossScaleOptimizer), ()),
    "stateless_apply": pure(),
    "shapes alone": (own, (jax.eval_shape(lambda: WHOLE),)),
}


@pytest.mark.parametrize("case", RIGHT)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_right_step_is_not_accused(case):
    """Scaled once and divided once, in any loop, transformation or model."""
    step, given = RIGHT[case]
    assert gs.lint(step, *given) == []


@pytest.mark.parametrize("make", [of_nnx, of_equinox])
def test_a_model_of_a_library_is_not_accused(make):
    """Models and their statistics are arguments like others."""
    step, given = make()
    assert gs.lint(step, *given) == []


def frozen_in_a_scan(w, state):
    def body(w, x):
        updates, after = TX.update(gs.value_and_grad(plain, state)(w, x)[1], state, w)
        return apply_updates(w, updates, after), x

    return jax.lax.scan(body, w, jnp.ones(3))


def of_backward_step(change):
    part = of_backward(change)
    return lambda w, s: TX.update(grads_of(w, s, lambda w: plain(part(w))), s, w)


def in_float16(change):
    """A change to cotangents that is computed in float16, and so keeps the loss scale."""
    return lambda g: change(g.astype(jnp.float16)).astype(jnp.float32)


def of_hidden_layer(change):
    """The same in a network under autocast, between two products."""
    part = of_backward(change)

    @gs.autocast
    def network(w):
        w = jnp.tile(w, 16)
        hidden = part(jnp.tanh(jnp.ones((64, 48)) @ jnp.outer(jnp.arange(48.0), w)))
        return jnp.mean((hidden @ w - 1) ** 2)

    return lambda w, s: TX.update(grads_of(w, s, network), s, w)


def of_sharded_layer(change):
    """The same on eight devices, of a loss that is sharded and an update that is not."""
    part = of_backward(change)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def network(w, x):
        hidden = part(jnp.tanh(x @ jnp.outer(jnp.arange(48.0), jnp.tile(w, 16))))
        return jax.lax.pmean(jnp.mean((hidden @ jnp.ones(48) - 1) ** 2), "data")

    specs = PartitionSpec(), PartitionSpec("data")
    mapped = jax.shard_map(network, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    half = gs.autocast(lambda w: mapped(w, jnp.ones((512, 48))))
    return lambda w, s: TX.update(grads_of(w, s, half), s, w)


def sam(w, state):
    tx = gs.with_loss_scale(optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True))
    state = tx.init(w)
    return tx.update(grads_of(w, state), state, w, grad_fn=lambda w, _: jax.grad(plain)(w))


RULED = gs.with_loss_scale(optax.sgd(0.1), gs.DynamicLossScale(2.0**10))
# What is wrong: (kind, part of the text, step, arguments).
WRONG = {
    "jax's gradients": (
        "not scaled", r"No loss was multiplied.*state\.value_and_grad\(loss_fn\)\(\*batch\)",
        lambda w, s: TX.update(jax.grad(plain)(w), s, w), SCALED,
    ),
    "an update that is compiled itself": (
        "not scaled", r"before the update at test_lint\.py:\d+,.*computed at test_lint\.py",
        lambda w, s: jax.jit(TX.update)(jax.grad(plain)(w), s, w), SCALED,
    ),
    "jax's gradients of a state": (
        "not scaled", "No loss was multiplied",
        lambda state: state.apply_gradients(jax.grad(plain)(state.params)), (WHOLE,),
    ),
    "not divided": (
        "not divided", r"loss_scale=gainstage\.transforms\.current_scale\(opt_state\)",
        lambda w, s: TX.update(by_hand(w, s), s, w), SCALED,
    ),
    "true ones divided by the update": (
        "divided again", "Leave loss_scale= out",
        lambda w, s: TX.update(grads_of(w, s), s, w, loss_scale=current_scale(s)), SCALED,
    ),
    "divided again": (
        "divided twice", "once too often.*leave this division out",
        by(lambda g, s: g / current_scale(s)), SCALED,
    ),
    "times the inverse": (
        "divided twice", "once too often.*leave this division",
        by(lambda g, s: (1 / current_scale(s)) * g), SCALED,
    ),
    "divided again in a scan": (
        "divided twice", "leave this", in_scan(lambda g, s: g / current_scale(s)), SCALED,
    ),
    "gradients of a state divided": (
        "divided twice", "once too often.*leave this",
        lambda state: state.apply_gradients(state.value_and_grad(plain)()[2] / state.loss_scale),
        (WHOLE,),
    ),
    "times the scale": (
        "multiplied twice", "Leave this factor out", by(lambda g, s: g * current_scale(s)), SCALED,
    ),
    "nan_to_num": (
        "hidden", r"jnp\.nan_to_num at.*Leave it out",
        by(lambda g, s: jnp.nan_to_num(g)), SCALED,
    ),
    "clip": (
        "hidden", r"jnp\.clip at.*optax\.clip\(limit\), tx",
        by(lambda g, s: jnp.clip(g, -1, 1)), SCALED,
    ),
    "where": (
        "hidden", r"jnp\.where\(jnp\.isfinite.*Leave it out",
        by(lambda g, s: jnp.where(jnp.isfinite(g), g, 0.0)), SCALED,
    ),
    "where not": (
        "hidden", r"jnp\.where\(jnp\.isfinite.*Leave it out",
        by(lambda g, s: jnp.where(~jnp.isfinite(g), jnp.zeros_like(g), g)), SCALED,
    ),
    "sign": ("hidden", r"jnp\.sign at.*scale_by_sign", by(lambda g, s: jnp.sign(g)), SCALED),
    "tanh": ("hidden", r"jnp\.tanh at", by(lambda g, s: jnp.tanh(g)), SCALED),
    "float16": (
        "narrow", "loses the small.*bfloat16",
        by(lambda g, s: g.astype(jnp.float16)), SCALED,
    ),
    "a closed-over state": (
        "constant", "an argument and a result",
        lambda w: TX.update(grads_of(w, STATE), STATE, w), (W,),
    ),
    "a closed-over train state": ("constant", "an argument", lambda: own(WHOLE), ()),
    "a state that a scan does not carry": (
        "constant", r"jax\.lax\.scan, a part of the carry", frozen_in_a_scan, SCALED,
    ),
    "another state": (
        "other state", "scale of another state.*the state that the update gets",
        lambda w, s, other: TX.update(grads_of(w, other), s, w), (W, STATE, TX.init(W)),
    ),
    "the loss of each device": (
        "summed", r"differentiated at .*varies over 'data'.*pmean\(loss, 'data'\) from loss_fn",
        on_devices(lambda loss: loss), SCALED,
    ),
    "the loss of each device, and a mean of the gradients": (
        "summed", r"jax\.lax\.pmean\(loss, 'data'\) from loss_fn",
        on_devices(lambda loss: loss, mean_of), SCALED,
    ),
    "the same in other words": (
        "summed", "varies over 'data'",
        on_devices(lambda loss: loss, lambda g: sum_of(g.astype(jnp.bfloat16)) * 0.125), SCALED,
    ),
    "a sum that is divided before": (
        "summed", "varies over 'data'",
        on_devices(lambda loss: loss, lambda g: sum_of(g / 8)), SCALED,
    ),
    "a sum of sums": (
        "summed", "varies over 'data'", on_devices(lambda loss: loss, sum_of), SCALED,
    ),
    "a divisor that is written out": (
        "constant divisor", r"is a constant, so the rule.*FixedLossScale\(scale\)",
        lambda w, s: TX.update(jax.grad(lambda w: 8.0 * plain(w))(w), s, w, loss_scale=8.0), SCALED,
    ),
    "a rule for a loss that scales itself": (
        "no use", r"Leave the rule out.*autocast\(loss_fn, loss_scale=scale\)",
        lambda w, s: RULED.update(jax.grad(HALF)(w), s, w), (W, RULED.init(W)),
    ),
    "an optimizer's true gradients": (
        "not scaled", r"optimizer\.scale_loss\(loss\)",
        of_optimizer(lambda opt, w: opt.apply([jax.grad(plain)(w.value())], [w])), (),
    ),
    "an optimizer's gradients, divided by hand": (
        "divided again", "your own division",
        of_optimizer(lambda opt, w: opt.apply([grads_by_hand(opt, w) / opt.loss_scale], [w])), (),
    ),
    "tf2's gradients, not divided": (
        "not divided", r"get_unscaled_gradients\(grads\)",
        of_optimizer(scaled_by_hand, wrap=tf2.LossScaleOptimizer), (),
    ),
    "nan_to_num before an optimizer": (
        "hidden", r"jnp\.nan_to_num at",
        of_optimizer(lambda opt, w: opt.apply([jnp.nan_to_num(grads_by_hand(opt, w))], [w])), (),
    ),
    "SAM without the scale": ("plain grad_fn", r"grad_fn=lambda params, i", sam, SCALED),
    "a norm in the backward pass": (
        "not in proportion", r"A division by .*locally_scaled\(part, 1 / loss_scale\)",
        of_backward_step(lambda g: g / jnp.linalg.norm(g)), SCALED,
    ),
    "a sign in the backward pass": (
        "not in proportion", r"jnp\.sign at", of_backward_step(jnp.sign), SCALED,
    ),
    "rounding in the backward pass": (
        "not in proportion", r"jnp\.round at", of_backward_step(jnp.round), SCALED,
    ),
    "a gradient from outside": (
        "not in proportion", "A sum with numbers", of_backward_step(lambda g: g + 0.1), SCALED,
    ),
    "a product in the backward pass": (
        "not in proportion", "A product of two", of_backward_step(lambda g: g * g), SCALED,
    ),
    "a sign between two layers": (
        "not in proportion", r"jnp\.sign at", of_hidden_layer(in_float16(jnp.sign)), SCALED,
    ),
    "a sign on each of eight devices": (
        "not in proportion", r"jnp\.sign at", of_sharded_layer(in_float16(jnp.sign)), SCALED,
    ),
    "a limit between two layers": (
        "not in proportion", "A sum with numbers",
        of_hidden_layer(in_float16(lambda g: jnp.clip(g, -0.1, 0.1))), SCALED,
    ),
    "a norm between two layers": (
        "not in proportion", "A division by",
        of_hidden_layer(in_float16(lambda g: g / (1e-8 + jnp.linalg.norm(g)))), SCALED,
    ),
    "one of two gradients without the scale": (
        "one not scaled", r"state\.value_and_grad\(other_loss\)",
        two_losses(lambda w, s: jax.grad(in_half)(w)), SCALED,
    ),
    "one of two gradients without the scale, with a weight": (
        "one not scaled", r"state\.value_and_grad\(other_loss\)",
        two_losses(lambda w, s: jax.grad(in_half)(w), lambda a, b: jnp.max(a) / jnp.max(b)), SCALED,
    ),
    "a skip of what is not finite": (
        "scale thrown away", r"apply_if=condition", skipped_by(jnp.isfinite), SCALED,
    ),
    "a skip of what is not finite or too large": (
        "scale thrown away", r"apply_if=condition",
        skipped_by(lambda norm: jnp.isfinite(norm) & (norm < 3)), SCALED,
    ),
    "a skip by a rule of one's own": (
        "scale thrown away", r"apply_if=condition", skipped_by(lambda norm: norm < 3), SCALED,
    ),
    "a norm in the backward pass of train_step": (
        "not in proportion", "A division by",
        gs.train_step(lambda w: plain(NORM(w))), (WHOLE,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_wrong_step_is_told_with_the_line_to_write(case):
    """The finding has its kind, the user's line, and what to write instead; it is the only one."""
    kind, words, step, given = WRONG[case]
    (found,) = gs.lint(step, *given)
    assert found.kind == kind
    assert re.search(words, str(found), re.S), found
    assert re.fullmatch(r"test_lint\.py:\d+", found.line), found.line
    assert found.line in found.text
    assert len(found.text) <= 500


ROWS, LABELS = jax.random.normal(jax.random.key(0), (8, 12)), jnp.arange(8) % 3
PARTS = {"w": jnp.eye(12) / 2, "table": jnp.ones((5, 12))}


def hidden(p, x):
    return jnp.tanh(x @ p["w"])


def image(p, x):
    return (x @ p["w"]).reshape(8, 2, 2, 3)


SQUARE = jnp.eye(12) * jnp.arange(1.0, 13)
LOSSES = {
    "labels": lambda p, x, y: optax.losses.softmax_cross_entropy_with_integer_labels(
        hidden(p, x), y
    ),
    "chosen": lambda p, x, y: jnp.take_along_axis(jax.nn.log_softmax(x @ p["w"]), y[:, None], 1),
    "an embedding": lambda p, x, y: jnp.square(p["table"][y] @ p["w"]),
    "a scatter": lambda p, x, y: jnp.square(jnp.zeros((8, 12)).at[y].set(hidden(p, x))),
    "a segment sum": lambda p, x, y: jnp.square(jax.ops.segment_sum(hidden(p, x), y, 3)),
    "a segment maximum": lambda p, x, y: jnp.square(jax.ops.segment_max(hidden(p, x), y, 3)),
    "the largest": lambda p, x, y: jax.lax.top_k(hidden(p, x), 3)[0],
    "sorted": lambda p, x, y: jnp.sort(hidden(p, x))[:, :3],
    "sorted by another": lambda p, x, y: jax.lax.sort((x, hidden(p, x)), num_keys=1)[1][:, :3],
    "products": lambda p, x, y: jnp.cumprod(hidden(p, x), 1),
    "sums of exponents": lambda p, x, y: jax.lax.cumlogsumexp(hidden(p, x), 1),
    "max pooling": lambda p, x, y: linen.max_pool(image(p, x), (2, 2)),
    "mean pooling": lambda p, x, y: linen.avg_pool(image(p, x), (2, 2)),
    "a recurrence": lambda p, x, y: jax.lax.scan(
        lambda c, row: (jnp.tanh(c @ p["w"] + row), c), jnp.zeros(12), x
    )[1],
    "branches": lambda p, x, y: jax.lax.cond(
        y[0] > 0, lambda: hidden(p, x), lambda: hidden(p, x) ** 2
    ),
    "remat": lambda p, x, y: jax.checkpoint(hidden)(p, x) ** 2,
    "a Cholesky factor": lambda p, x, y: jnp.linalg.cholesky(SQUARE + p["w"] @ p["w"].T),
    "a solution": lambda p, x, y: jnp.linalg.solve(SQUARE + p["w"], x.T),
    "a determinant": lambda p, x, y: jnp.linalg.slogdet(SQUARE + p["w"])[1],
    "eigenvalues": lambda p, x, y: jnp.linalg.eigh(SQUARE + p["w"] + p["w"].T)[0],
    "an orthogonal factor": lambda p, x, y: jnp.linalg.qr(SQUARE + p["w"])[1],
    "a Fourier transform": lambda p, x, y: jnp.abs(jnp.fft.rfft(hidden(p, x))) ** 2,
    "attention": lambda p, x, y: jax.nn.dot_product_attention(*[hidden(p, x[None, :, None])] * 3),
    "a window": lambda p, x, y: jax.lax.dynamic_slice(hidden(p, x), (y[0], 0), (2, 12)),
    "a sampled image": lambda p, x, y: map_coordinates(p["w"], [x[0] % 9, x[1] % 9], 1),
    "rows apart": lambda p, x, y: sum(row * row for row in jnp.unstack(hidden(p, x))),
    "a long convolution": lambda p, x, y: jnp.fft.irfft(
        jnp.fft.rfft(hidden(p, x), 32) * jnp.fft.rfft(p["w"][:8], 32), 32
    ),
    "an inner gradient": lambda p, x, y: jax.vmap(jax.grad(lambda t: hidden(p, t).sum()))(x) ** 2,
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_scale_is_followed_through_what_losses_do(loss):
    """Through gathers, scatters, pooling, sorting, loops and linear algebra nothing is said of a
    right step, and a scale that is there once too often, or divided twice, is found."""
    fun = gs.autocast(lambda *args: SMALL * LOSSES[loss](*args).mean())
    state = gs.TrainState.create(PARTS, optax.adam(0.1))

    def step(state, x, y, of=lambda _, loss: loss, change=lambda _, grads: grads):
        _, extra, grads = state.value_and_grad(lambda *args: of(state, fun(*args)))(x, y)
        return state.apply_gradients(change(state, grads), extra)

    def more(state, loss):
        return loss * state.loss_scale

    def less(state, grads):
        return jax.tree.map(lambda g: g / state.loss_scale, grads)

    each = [
        {fault.kind for fault in gs.lint(functools.partial(step, **options), state, ROWS, LABELS)}
        for options in ({}, {"of": more}, {"change": less})
    ]
    assert each[0] == set()
    assert all(each[1:])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_it_finds_does_not_depend_on_what_ran_before():
    """In both orders, again, and in two threads at once, each step has its own findings."""
    names = ["jax's gradients", "a loss that scales itself", "divided again", "a loop"]
    wanted = [["not scaled"], [], ["divided twice"], []]

    def kinds(name):
        step, given = WRONG[name][2:] if name in WRONG else RIGHT[name]
        return [fault.kind for fault in gs.lint(step, *given)]

    assert [kinds(name) for name in names] == wanted
    assert [kinds(name) for name in reversed(names)] == wanted[::-1]
    found = {}
    threads = [
        threading.Thread(target=lambda name=name: found.update({name: kinds(name)}))
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[name] for name in names] == wanted


def test_it_computes_nothing_and_names_what_cannot_be_traced():
    """Arrays stay as they are; what is no function, or cannot be traced, is an error."""
    seen = []

    def step(w, state):
        jax.debug.callback(lambda: seen.append(1))
        return TX.update(grads_of(w, state), state, w)

    assert gs.lint(step, W, STATE) == []
    assert seen == []
    with pytest.raises(TypeError, match="Expected a function for step"):
        gs.lint(W, STATE)
    with pytest.raises(jax.errors.ConcretizationTypeError):
        gs.lint(lambda w: float(w.sum()), W)


def test_the_variables_of_a_step_stay_as_they_are():
    """What a step assigns to variables, and to those of its optimizer, is undone."""
    w, opt = gs.optimizers.Variable(W), gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(0.1))
    opt.build([w])
    before = [v.numpy() for v in (w, *opt.variables)]
    assert gs.lint(lambda: minimized(opt, w)) == []
    for old, new in zip(before, (w, *opt.variables), strict=True):
        assert (old == new.numpy()).all()


def test_what_a_kernel_does_is_not_judged():
    """Of gradients that a callback returns nothing is known, so nothing is said."""

    def step(w, state):
        grads = grads_of(w, state)
        shape = jax.ShapeDtypeStruct(grads.shape, grads.dtype)
        grads = jax.pure_callback(lambda g: g, shape, grads)
        return TX.update(grads, state, w)

    assert gs.lint(step, W, STATE) == []


def test_a_sharded_state_is_not_accused():
    """On a mesh, with its state sharded, a step is as on one device."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    weights = jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, PartitionSpec()))
    state = gs.TrainState.create(weights, optax.adam(0.1), shard_state_over="data")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gs.lint(gs.train_step(lambda w: jnp.sum(w * w)), state) == []
