"""A step of 148 small tensors takes at most 1.6 times as long as the same step of optax.

On tensors of 16 numbers, with Adam: what is measured is mostly the dispatch, in Python and in JAX.
The baseline is a loop of optax in `jax.jit`, which donates. Each step of ours also checks its
gradients, and has some scalars more: with two tensors, that is most of what it computes.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import gainstage as gs

from . import harness

OPTAX, ADAM, X = "optax", optax.adam(1e-3), jnp.ones(16)


def loss_fn(params: list[Any], x: Any) -> Any:
    """A loss of all tensors."""
    return 1e-3 * sum(((w * x) ** 2).sum() for w in params)


def tensors(count: int) -> list[jax.Array]:
    """The parameters, which are donated."""
    return [jnp.full(16, 0.01 * i, jnp.float32) for i in range(count)]


def plain(count: int, grads: list[jax.Array] | None = None) -> harness.Variant:
    """The loop of optax, or its update alone, for given gradients."""

    def step(params: Any, state: Any, x: Any, grads: Any) -> Any:
        loss = None
        if grads is None:
            loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, state = ADAM.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    program, params = jax.jit(step, donate_argnums=(0, 1)), tensors(count)

    def call(carry: Any, _: Any) -> Any:
        return program(*carry[:2], X, grads)

    return call, (params, ADAM.init(params), None)


def train_step(count: int) -> harness.Variant:
    """`gs.train_step`."""
    step = gs.train_step(loss_fn)

    def call(carry: Any, _: Any) -> Any:
        return None, *step(carry[1], X)

    return call, (None, gs.TrainState.create(tensors(count), ADAM), None)


def own_step(count: int) -> harness.Variant:
    """A step of one's own of a `TrainState`."""

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, x: Any) -> Any:
        loss, extra, grads = state.value_and_grad(loss_fn)(x)
        return state.apply_gradients(grads, extra), loss

    def call(carry: Any, _: Any) -> Any:
        return None, *step(carry[1], X)

    return call, (None, gs.TrainState.create(tensors(count), ADAM), None)


def optimizer_for(count: int) -> tuple[Any, list[Any]]:
    """A `LossScaleOptimizer`, and the variables that it was built for."""
    variables = [gs.optimizers.Variable(value) for value in tensors(count)]
    optimizer = gs.optimizers.LossScaleOptimizer(gs.optimizers.Adam(1e-3))
    optimizer.build(variables)
    return optimizer, variables


def minimize(count: int) -> harness.Variant:
    """`gs.optimizers.jit` of `minimize`."""
    optimizer, variables = optimizer_for(count)

    def step(x: Any) -> Any:
        return optimizer.minimize(lambda: loss_fn(variables, x), variables)

    program = gs.optimizers.jit(step, (variables, optimizer.variables), donate=True)
    return lambda _, inputs: (None, program(X)), (None, None)


def eager_apply(count: int) -> harness.Variant:
    """`apply` by itself, for given gradients of a loss that was scaled."""
    optimizer, variables = optimizer_for(count)
    optimizer.scale_loss(jnp.float32(1))

    def call(_: Any, grads: Any) -> Any:
        optimizer.apply(grads)
        return None, variables[-1]._value  # not `value()`, after which it is not donated

    return call, (None, None)


def training(count: int) -> tuple[harness.Builders, Any]:
    """Steps that differentiate."""
    steps = {OPTAX: plain, "ours, gs.train_step": train_step, "ours, own step": own_step}
    steps["ours, minimize"] = minimize
    return {name: partial(step, count) for name, step in steps.items()}, None


def updating(count: int) -> tuple[harness.Builders, Any]:
    """Steps for given gradients."""
    grads = tensors(count)
    return {OPTAX: partial(plain, count, grads), "ours, eager": partial(eager_apply, count)}, grads


def cases(count: int) -> list[harness.Case]:
    """Both kinds of steps, each variant in a process with the baseline alone."""
    found = []
    for what, make in (("loss and update", training), ("update", updating)):
        pairs = [name for name in make(1)[0] if name != OPTAX]
        labels = {"tensors": str(count), "step": what}
        found.append(harness.Case(labels, partial(make, count), [OPTAX], pairs=pairs))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measures as many tensors as GPT-2 has, and two."""
    options = harness.arguments(__doc__, argv, counts=("148 2", "2"))
    found = [case for count in options.counts for case in cases(int(count))]
    harness.run(Path(__file__).stem, __doc__, found, options)


if __name__ == "__main__":
    main()
