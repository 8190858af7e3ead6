# pyright: standard, reportUnnecessaryTypeIgnoreComment=true
"""What type checkers know of the public names, and which mistakes they find: read, never run."""

import functools
from typing import Any, assert_type

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import gainstage as gs
from gainstage.diagnostics import JsonLines, Run, read_run, telemetry
from gainstage.optimizers import SGD, Adam, LossScaleOptimizer, Variable, functionalize, schedules
from gainstage.transforms import locally_scaled

Weights = dict[str, jax.Array]

w = Variable([1.0, 2.0], name="w")
assert_type(w.value(), jax.Array)
assert_type(w * 2, jax.Array)
assert_type((2.0 - w) @ w, jax.Array)
assert_type(-w[0], jax.Array)
assert_type(w >= 0, jax.Array)
assert_type(w.shape, tuple[int, ...])
assert_type({w: 1}, dict[Variable, int])

opt = LossScaleOptimizer(Adam(1e-3, beta_1=0.8), 2.0**10, clipnorm=1.0, telemetry=True)
assert_type(opt.loss_scale, jax.Array)
assert_type(opt.scale_loss(1.0), jax.Array)
assert_type(opt.inner_optimizer, gs.optimizers.Optimizer)
assert_type(opt.rule, gs.LossScale)
assert_type(opt.minimize(lambda: w.value().sum(), [w]), jax.Array)
assert_type(
    opt.minimize(lambda: (w[0], {"x": 1}), [w], has_aux=True), tuple[jax.Array, dict[str, int]]
)
assert_type(opt.apply_gradients([(jnp.ones(2), w)]), Variable)
assert_type(opt.variables, list[Variable])
assert_type(opt.learning_rate, Variable)
assert_type(opt.clipnorm, float | None)
assert_type(opt.use_ema, bool)
assert_type(opt.telemetry, bool)
assert_type(opt.state(), dict[str, jax.Array])
assert_type(telemetry(opt), gs.typing.StepInfo)
assert_type(gs.diagnostics.report(opt).underflow, gs.diagnostics.Underflow | None)
assert_type(gs.diagnostics.read_run("run.jsonl"), Run)
assert_type(gs.compat.tf2.LossScaleOptimizer(SGD()).lr, Variable)
assert_type(telemetry(opt).finite, jax.Array)
assert_type(LossScaleOptimizer.from_config(opt.get_config()), LossScaleOptimizer)
assert_type(gs.DynamicLossScale.from_config({}), gs.DynamicLossScale)
opt.learning_rate = 0.5
opt.apply([jnp.ones(2), None, [1.0, 2.0], w], loss=0.5, apply_if=np.bool_(True))
for rate in (0.1, w, lambda: 0.1, schedules.CosineDecay(0.1, 10), optax.constant_schedule(0.1)):
    SGD(rate)

adam = Adam()
assert_type(adam.scale_loss(w.value()), jax.Array)
assert_type(adam.momentums, list[Variable])
assert_type(adam.add_optimizer_variables([w], "slot"), list[Variable])
assert_type(adam.add_optimizer_variables([w], ("a", "b")), tuple[list[Variable], ...])

tx = gs.with_loss_scale(optax.sgd(0.1), gs.DynamicLossScale(8.0, hysteresis=2), telemetry=True)
assert_type(tx, optax.GradientTransformationExtraArgs)
gs.with_loss_scale(optax.MultiSteps(optax.sgd(0.1), 2), gs.compat.experimental.FixedLossScale(2))
state: Any = tx.init({"w": w.value()})
assert_type(gs.transforms.current_scale(state), jax.Array)
assert_type(gs.transforms.step_was_applied(state), jax.Array)
assert_type(gs.transforms.select_if_applied(w * 2, w.value(), state), jax.Array)


def loss_fn(params: Weights, x: jax.Array, power: float = 2.0) -> jax.Array:
    return ((params["w"] * x) ** power).sum()


def with_aux(params: Weights, *batch: jax.Array) -> tuple[jax.Array, list[int]]:
    return loss_fn(params, batch[0]), [1]


params: Weights = {"w": jnp.ones(2)}
x = jnp.ones(2)
value_and_grad, aux_and_grad = (
    gs.value_and_grad(loss_fn, state),
    gs.value_and_grad(with_aux, state, has_aux=True),
)
assert_type(value_and_grad(params, x, power=3.0), tuple[jax.Array, Any])
assert_type(aux_and_grad(params, x, x), tuple[tuple[jax.Array, list[int]], Any])
assert_type(gs.value_and_grad(lambda w: w**2, state)(x), tuple[jax.Array, Any])
for using in (jax.value_and_grad, nnx.value_and_grad, equinox.filter_value_and_grad):
    gs.value_and_grad(loss_fn, state, using=using)
assert_type(gs.transforms.apply_updates(params, params, state), Weights)

train_state = gs.TrainState.create(params, optax.sgd(0.1), telemetry=True)
assert_type(train_state.params, Weights)
assert_type(train_state.loss_scale, jax.Array)
assert_type(train_state.applied, jax.Array)
assert_type(train_state.info, gs.typing.StepInfo)
assert_type(train_state.replace(step=x), gs.TrainState[Weights])
assert_type(train_state.apply_gradients(params), gs.TrainState[Weights])
step, aux_step = gs.train_step(loss_fn), gs.train_step(with_aux, has_aux=True)
assert_type(step(train_state, x), tuple[gs.TrainState[Weights], jax.Array])
assert_type(aux_step(train_state, x, x), tuple[gs.TrainState[Weights], jax.Array, list[int]])
assert_type(step.lower(train_state, x), jax.stages.Lowered)
audited = gs.train_step(gs.autocast(loss_fn), audit_every=9, audit_bounds=(0.1, 0.2, 0.3))
assert_type(audited(train_state, x), tuple[gs.TrainState[Weights], jax.Array])
assert_type(audited.audit, gs.typing.AuditResult | None)
assert_type(audited.audits, gs.typing.Audits)
assert_type(gs.audit(loss_fn, params, x, scale=1.0).worst, tuple[str, float])
gs.train_step(lambda w: w**2)(gs.TrainState.create(x, tx))
partial_step: Any = functools.partial(gs.train_step, donate=False)


def choose(has_aux: bool) -> None:
    gs.value_and_grad(loss_fn, state, has_aux=has_aux)
    gs.train_step(loss_fn, has_aux=has_aux)


compiled = gs.optimizers.jit(loss_fn, [w, *opt.variables], donate=True)
assert_type(compiled(params, x, power=3.0), jax.Array)
assert_type(functionalize(loss_fn, {"w": w})({"w": x}, params, x), tuple[jax.Array, Any])
assert_type(locally_scaled(loss_fn, 2.0)(params, x), jax.Array)

with JsonLines("run.jsonl", every=10, rule=opt.rule) as run:
    assert_type(run, JsonLines)
    run.write(0, telemetry(opt), loss=0.5, audit=audited.audit)
assert_type(read_run("run.jsonl"), Run)

# Mistakes: each is found by pyright and by mypy, or its comments would be errors.
_ = gs.typo  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
LossScaleOptimizer(Adam(), clipnrom=1.0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
LossScaleOptimizer()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
gs.DynamicLossScale("high")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
SGD(0.1).minimize(w.value(), [w])  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
gs.LossScale()  # type: ignore[abstract]  # pyright: ignore[reportAbstractUsage]
_ = SGD(0.1).learing_rate  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
SGD("fast")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
SGD(lambda step, epoch: 0.1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
SGD(0.1).clipnorm = "large"  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
_ = w + "2"  # type: ignore[arg-type]  # pyright: ignore[reportOperatorIssue]
opt.apply({"w": x})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
opt.apply([x], apply_if="yes")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
opt.minimize(lambda: (w[0], x), [w])  # type: ignore[arg-type, return-value]  # pyright: ignore[reportArgumentType]
opt.minimize(lambda: w[0], [w], has_aux=True)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
gs.with_loss_scale(SGD(0.1))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
gs.with_loss_scale(optax.sgd, gs.DynamicLossScale())  # pyright: ignore[reportArgumentType]
live = gs.compat.experimental.DynamicLossScale()
gs.with_loss_scale(optax.sgd(0.1), live)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
gs.with_loss_scale(optax.sgd(0.1), "fixed")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
value_and_grad(params, x, pwoer=3.0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
value_and_grad(x, x)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
gs.value_and_grad(with_aux, state)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
gs.value_and_grad(loss_fn, state, using=jax.jit)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
step(params, x)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
gs.train_step(loss_fn, SGD(0.1))  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
gs.TrainState.create(params, SGD(0.1))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
gs.TrainState.create(params, optax.sgd(0.1), loss_scale="fixed")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
compiled(params)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
gs.optimizers.jit(loss_fn, opt)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
gs.optimizers.jit(loss_fn)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
functionalize(loss_fn, [w])([x], x, x)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
locally_scaled(loss_fn, 2.0)(x)  # type: ignore[call-arg, arg-type]  # pyright: ignore[reportCallIssue]
locally_scaled(loss_fn, "2")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
