"""`gs.train_step` takes as long with loss scaling as without; a loop of your own, up to 1.3 times.

Scaling has to know of all gradients before the first update, and that alone changes what XLA fuses
with what. So there are two baselines: a step without scaling, and one whose update stands in a
conditional that is always true, though XLA cannot know. On a CPU the optimizer takes at least a
fifth of the step of the model gpt2; of the others, a small part.
"""

from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import gainstage as gs

from . import harness, models

RATE, EPSILON, SCALE = 1e-3, 1e-7, 2.0**10
PLAIN, BARRIER = "no scaling", "no scaling, in a conditional"
OPTAX, KERAS = "ours, in an optax loop", "ours, LossScaleOptimizer"
TRAIN_STEP, IF_FINITE = "ours, gs.train_step", "optax.apply_if_finite"


def case(name: str, dtype: str, make: Any, baselines: list[str], calls: int = 5) -> harness.Case:
    """Train steps of a model, several in a row, as in a loop that waits for none."""
    return harness.Case({"model": name, "computes in": dtype}, make, baselines, calls=calls)


def plain(model: models.Model, barrier: bool = False, checked: bool = False) -> harness.Variant:
    """Adam in optax, without scaling; with optax's own check where that is wanted."""
    tx = optax.adam(RATE, eps=EPSILON)
    tx = optax.apply_if_finite(tx, 1000) if checked else tx

    def step(params: Any, state: Any, batch: Any) -> Any:
        inner, count = state
        loss, grads = jax.value_and_grad(model.loss)(params, batch)

        def update(old: Any) -> Any:
            updates, inner = tx.update(grads, old[1], old[0])
            return optax.apply_updates(old[0], updates), inner

        if barrier:
            params, inner = jax.lax.cond(count >= 0, update, lambda old: old, (params, inner))
        else:
            params, inner = update((params, inner))
        return params, (inner, count + 1), loss

    return pure(step, model, (tx.init(model.params), jnp.int32(0)))


def in_optax(model: models.Model) -> harness.Variant:
    """Adam in optax, with `gs.with_loss_scale` and `gs.value_and_grad`."""
    tx = gs.with_loss_scale(optax.adam(RATE, eps=EPSILON), gs.DynamicLossScale(SCALE))

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = gs.value_and_grad(model.loss, state)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return pure(step, model, tx.init(model.params))


def train_step(model: models.Model) -> harness.Variant:
    """Adam in optax, with `gs.TrainState` and `gs.train_step`."""
    params, tx = jax.tree.map(jnp.copy, model.params), optax.adam(RATE, eps=EPSILON)
    state = gs.TrainState.create(params, tx, loss_scale=gs.DynamicLossScale(SCALE))
    return of_state(gs.train_step(model.loss), state)


def keras_style(model: models.Model, **options: Any) -> harness.Variant:
    """`gs.optimizers.jit` over `minimize`; with telemetry the step returns it."""
    params = jax.tree.map(gs.optimizers.Variable, model.params)
    variables = jax.tree.leaves(params)
    options = {"rule": gs.DynamicLossScale(SCALE), **options}
    optimizer = gs.optimizers.LossScaleOptimizer(
        gs.optimizers.Adam(RATE, epsilon=EPSILON), **options
    )
    optimizer.build(variables)

    def step(batch: Any) -> Any:
        def loss() -> jax.Array:
            return model.loss(jax.tree.map(lambda v: v.value(), params), batch)

        value = optimizer.minimize(loss, variables)
        return (value, gs.diagnostics.telemetry(optimizer)) if optimizer.telemetry else value

    program = gs.optimizers.jit(step, (variables, optimizer.variables), donate=True)
    return lambda _, batch: (variables, program(batch)), (variables, None)


def pure(step: Any, model: models.Model, state: Any) -> harness.Variant:
    """A variant out of `(params, state, batch) -> (params, state, loss)`, which donates both."""
    program = jax.jit(step, donate_argnums=(0, 1))

    def call(carry: Any, batch: Any) -> Any:
        params, state, loss = program(*carry[1:3], batch)
        return jax.tree.leaves(params)[:1], params, state, loss

    params = jax.tree.map(jnp.copy, model.params)
    return call, (jax.tree.leaves(params)[:1], params, state, None)


def of_state(step: Any, state: gs.TrainState[Any]) -> harness.Variant:
    """A variant out of a step of a train state, which is donated."""

    def call(carry: Any, batch: Any) -> Any:
        state, loss = step(carry[1], batch)
        return jax.tree.leaves(state.params)[:1], state, loss

    return call, (jax.tree.leaves(state.params)[:1], state, None)


def steps(name: str, dtype: str) -> tuple[harness.Builders, Any]:
    """The variants for one model and the dtype that it computes in."""
    return steps_of(models.model(name, dtype))


def steps_of(model: models.Model) -> tuple[harness.Builders, Any]:
    """The variants for a model."""
    return {
        PLAIN: partial(plain, model),
        BARRIER: partial(plain, model, barrier=True),
        OPTAX: partial(in_optax, model),
        TRAIN_STEP: partial(train_step, model),
        KERAS: partial(keras_style, model),
        IF_FINITE: partial(plain, model, checked=True),
    }, model.batch


def main(argv: Sequence[str] | None = None) -> None:
    """Measures Adam on each model, in each dtype to compute in."""
    options = harness.arguments(
        __doc__, argv, models=("mlp transformer gpt2", "mlp"), dtypes=("float32 float16",) * 2
    )
    cases = [
        case(name, dtype, partial(steps, name, dtype), [PLAIN, BARRIER])
        for name, dtype in product(options.models, options.dtypes)
    ]
    harness.run(Path(__file__).stem, __doc__, cases, options)


if __name__ == "__main__":
    main()
