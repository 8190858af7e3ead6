"""The loss-scale rules of other libraries as machines, through their own code, where installed."""

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .rules_machines import W, batches
from .rules_search import Machine, changed, network

START, PERIOD = 2.0**15, 3
INPUTS = batches(2.0**0, 2.0**13)


def of_flax(row: str) -> Machine:
    """`flax.training.dynamic_scale.DynamicScale`, whose `value_and_grad` takes the whole step."""
    kind = importlib.import_module("flax.training.dynamic_scale").DynamicScale

    def step(leaves: list[Any], batch: Any) -> Any:
        before = kind(growth_interval=PERIOD, scale=leaves[0], fin_steps=leaves[1])
        after, finite, _, _ = before.value_and_grad(network)(jnp.float32(W), *batch)
        return [after.scale, after.fin_steps], finite

    return peer(row, step, [np.float32(START), np.int32(0)])


def of_jmp(row: str) -> Machine:
    """`jmp.DynamicLossScale`, in the loop of its documentation."""
    jmp: Any = importlib.import_module("jmp")

    def step(leaves: list[Any], batch: Any) -> Any:
        before = jmp.DynamicLossScale(leaves[0], leaves[1], PERIOD)
        scaled = jax.grad(lambda w: before.scale(network(w, *batch)))(jnp.float32(W))
        finite = jmp.all_finite(before.unscale(scaled))
        after = before.adjust(finite)
        return [after.loss_scale, after.counter], finite

    return peer(row, step, [np.float32(START), np.int32(0)], low=1.0)


def of_keras(row: str) -> Machine:
    """`keras.optimizers.LossScaleOptimizer`, through `stateless_apply`."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras: Any = importlib.import_module("keras")
    weight = keras.Variable(np.float32(W))
    opt = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.25, momentum=0.5), START, PERIOD
    )
    opt.build([weight])
    own = opt.dynamic_scale, opt.step_counter
    places = [i for v in own for i, other in enumerate(opt.variables) if other is v]
    fresh = [v.value + np.asarray(3, v.dtype) for v in opt.variables]
    others = [place for place in range(len(fresh)) if place not in places]

    def step(leaves: list[Any], batch: Any) -> Any:
        state = list(fresh)
        for place, leaf in zip(places, leaves, strict=True):
            state[place] = leaf
        scaled = jax.grad(lambda w: network(w, *batch) * leaves[0])(jnp.float32(W))
        (new,), after = opt.stateless_apply(state, [scaled], [jnp.float32(W)])
        kept = [[x[place] for place in others] for x in (state, after)]
        return [after[place] for place in places], changed((W, kept[0]), (new, kept[1]))

    return peer(row, step, [np.float32(START), np.int32(0)])


def of_torch(row: str) -> Machine:
    """`torch._amp_update_scale_`, the rule of `torch.amp.GradScaler`, on the CPU."""
    torch: Any = importlib.import_module("torch")

    def update(scale: float, count: int, finite: bool) -> tuple[float, int]:
        tensors = torch.tensor(scale), torch.tensor(count, dtype=torch.int32)
        found = torch.tensor([float(not finite)])
        torch._amp_update_scale_(*tensors, found, 2.0, 0.5, PERIOD)
        return tensors[0].item(), tensors[1].item()

    return on_host(row, update)


def of_tf_keras(row: str) -> Machine:
    """The rule of `tf_keras.mixed_precision.LossScaleOptimizer`, which is `tf.keras`'s too."""
    tf: Any = importlib.import_module("tensorflow")
    name = "tf_keras.src.mixed_precision.loss_scale_optimizer"
    state = importlib.import_module(name)._DynamicLossScaleState(START, PERIOD, 2)

    def update(scale: float, count: int, finite: bool) -> tuple[float, int]:
        state.current_loss_scale.assign(scale)
        state.counter.assign(count)
        state.update([tf.constant(0.0 if finite else np.inf)])
        return state.current_loss_scale.numpy(), state.counter.numpy()

    return on_host(row, update, low=1.0)


def on_host(row: str, update: Callable[[float, int, bool], tuple[float, int]], **how: Any) -> Any:
    """A rule that is no JAX: each state and finding that differs is one call of it."""

    def all_of(scale: Any, count: Any, finite: Any) -> Any:
        rows = np.stack([np.asarray(scale).view(np.int32), count, finite], axis=1)
        some, places = np.unique(rows.astype(np.int32), axis=0, return_inverse=True)
        new = [update(s.view(np.float32).item(), c.item(), bool(f)) for s, c, f in some]
        scales, counts = zip(*new, strict=True)
        places = places.reshape(-1)
        return np.array(scales, np.float32)[places], np.array(counts, np.int32)[places]

    def step(leaves: list[Any], batch: Any) -> Any:
        scaled = jax.grad(lambda w: network(w, *batch) * leaves[0])(jnp.float32(W))
        finite = jnp.isfinite(scaled / leaves[0])
        shapes = [jax.ShapeDtypeStruct((), leaf.dtype) for leaf in leaves]
        return jax.pure_callback(
            all_of, shapes, *leaves, finite, vmap_method="broadcast_all"
        ), finite

    return peer(row, step, [np.float32(START), np.int32(0)], **how)


def peer(row: str, step: Any, first: list[Any], low: float = 0.0) -> Machine:
    """A rule of another library, with a period of three and the other settings its own."""
    arrays, bounds = [np.asarray(x) for x in first], (low, np.inf)
    return Machine(
        row, "its own settings", step, arrays, INPUTS,
        start=START, bounds=bounds, period=PERIOD, ours=False,
    )  # fmt: skip


PEERS: dict[str, tuple[str, Callable[[str], Machine]]] = {
    "flax `DynamicScale`": ("flax", of_flax),
    "jmp `DynamicLossScale`": ("jmp", of_jmp),
    "Keras `LossScaleOptimizer`": ("keras", of_keras),
    "tf_keras `LossScaleOptimizer`": ("tf_keras", of_tf_keras),
    "torch `_amp_update_scale_`": ("torch", of_torch),
}


def installed() -> Iterator[Machine]:
    """The rules of the libraries that are installed."""
    for row, (package, make) in PEERS.items():
        if importlib.util.find_spec(package):
            yield make(row)


def versions() -> dict[str, str | None]:
    """The version of each library; None if it is not installed."""
    names = [package for package, _ in PEERS.values()]
    found = {name: importlib.util.find_spec(name) for name in names}
    return {name: spec and importlib.metadata.version(name) for name, spec in found.items()}
