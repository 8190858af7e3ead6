# pyright: standard, reportUnnecessaryTypeIgnoreComment=true
"""What a type-checker knows of the public names, and which mistakes it finds: read, never run."""

from typing import Any, assert_type

import jax
import optax

import gainstage as gs
from gainstage import fp8
from gainstage.diagnostics import JsonLines, Run, read_run

w = gs.Variable([1.0, 2.0], name="w")
assert_type(w.value(), jax.Array)
assert_type(w * 2, jax.Array)
assert_type(w.shape, tuple[int, ...])

opt = gs.LossScaleOptimizer(gs.Adam(1e-3, beta_1=0.8), 2.0**10, clipnorm=1.0, telemetry=True)
assert_type(opt.loss_scale, jax.Array)
assert_type(opt.inner_optimizer, gs.Optimizer)
assert_type(opt.rule, gs.LossScale)
assert_type(opt.minimize(lambda: w.value().sum(), [w]), jax.Array)
assert_type(opt.variables, list[gs.Variable])
assert_type(opt.state(), dict[str, jax.Array])
assert_type(gs.telemetry(opt), gs.StepInfo)
assert_type(gs.report(opt).underflow, gs.Underflow | None)
assert_type(gs.diagnostics.read_run("run.jsonl"), Run)
assert_type(gs.compat.tf2.LossScaleOptimizer(gs.SGD()).lr, gs.Variable)
_ = gs.typo  # type: ignore[attr-defined]
assert_type(gs.telemetry(opt).finite, jax.Array)
assert_type(gs.LossScaleOptimizer.from_config(opt.get_config()), gs.LossScaleOptimizer)

tx = gs.loss_scaled(optax.sgd(0.1), gs.DynamicLossScale(8.0, hysteresis=2), telemetry=True)
assert_type(tx, optax.GradientTransformationExtraArgs)
assert_type(gs.to_optax(gs.SGD(0.1)), optax.GradientTransformationExtraArgs)
state: Any = tx.init({"w": w.value()})
assert_type(gs.loss_scale(state), jax.Array)
assert_type(gs.step_was_applied(state), jax.Array)

scalings = fp8.dot_scaling()
assert_type(fp8.dot(w.value(), w.value(), scalings), jax.Array)
assert_type(fp8.cast(w.value(), scalings.x.factor, "float8_e4m3fn")[1], fp8.Seen)

with JsonLines("run.jsonl", every=10) as run:
    assert_type(run, JsonLines)
    run.write(0, gs.telemetry(opt), loss=0.5)
assert_type(read_run("run.jsonl"), Run)

# Mistakes: each is found, or the comment would be an error.
gs.LossScaleOptimizer(gs.Adam(), clipnrom=1.0)  # pyright: ignore[reportCallIssue]
gs.LossScaleOptimizer()  # pyright: ignore[reportCallIssue]
gs.DynamicLossScale("high")  # pyright: ignore[reportArgumentType]
gs.SGD(0.1).minimize(w.value(), [w])  # pyright: ignore[reportArgumentType]
gs.LossScale()  # pyright: ignore[reportAbstractUsage]
gs.SGD(0.1).learing_rate  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018
