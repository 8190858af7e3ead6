"""Steps lowered for devices that are not there: optimizer steps and whole train steps.

Each variant takes a step of its own and returns what `jax.jit(...).lower` does. Weights and state
are donated, in the order of the results.
"""

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

import gainstage as gs
from gainstage._scaling.gradients import unscale
from gainstage.optimizers import SGD, LossScaleOptimizer, Variable

from . import models, parameters

DEVICES = Path(__file__).parent / "devices"
GPUS = sorted(path.stem for path in DEVICES.glob("*.txtpb"))
TPUS = {"tpu4": "v5e:2x2", "tpu256": "v5e:16x16"}
TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # in several processes at once
}
PACKAGES = {"gpu": ("jax_plugins.xla_cuda12", "nvidia.cuda_nvcc"), "tpu": ("libtpu",)}
RATE, MOMENTUM, EPSILON, SCALE = 1e-3, 0.9, 1e-7, 2.0**10
ROWS = 32  # of a batch, on each device of a mesh

Weights = list[jax.ShapeDtypeStruct]


# ── devices ──────────────────────────────────────────────────────────────────────────────────


class Target(NamedTuple):
    """One device, or a mesh of some."""

    everywhere: Sharding  # of what is whole on each device
    batch: Sharding  # divided over the batch
    sharded: Sequence[Any]  # the shardings of the weights, in turns

    @property
    def size(self) -> int:
        """The number of devices."""
        return len(self.everywhere.device_set)


def missing(device: str) -> str:
    """What has to be installed before XLA can compile for a device; empty if nothing."""
    for package in PACKAGES["gpu" if device in GPUS else "tpu"]:
        parent = package.partition(".")[0]
        if not importlib.util.find_spec(parent) or not importlib.util.find_spec(package):
            return f"Compiling for {device} needs {package}: pip install --group programs"
    return ""


@functools.cache  # the devices of two topologies are not the same
def target(device: str) -> Target:
    """A device by name: one of `devices/`, or a number of TPUs.

    Raises:
        ModuleNotFoundError: XLA's compiler for it is not installed.
    """
    if message := missing(device):
        raise ModuleNotFoundError(message)
    if device in GPUS:
        config = (DEVICES / f"{device}.txtpb").read_text()
        described = topologies.get_topology_desc(
            device, platform="cuda", target_config=config, topology="1x1x1"
        )
        alone = SingleDeviceSharding(described.devices[0])
        return Target(alone, alone, [alone])
    os.environ.update(TPU_ENVIRONMENT)
    described = topologies.get_topology_desc(platform="tpu", topology_name=TPUS[device])
    devices = np.array(described.devices)
    mesh = Mesh(devices.reshape(-1, 2 if devices.size == 4 else 4), ("data", "model"))
    specs = [("data", "model"), (None, "model"), ("data",), ()]
    whole, rows, *sharded = (
        NamedSharding(mesh, PartitionSpec(*spec)) for spec in [(), (("data", "model"),), *specs]
    )
    return Target(whole, rows, sharded)


def planned(x: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
    """An array that only has shape, dtype and place."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def planned_everywhere(tree: Any, target: Target) -> Any:
    """The arrays of a pytree, each whole on every device."""
    return jax.tree.map(lambda x: planned(x, target.everywhere), tree)


# ── optimizers ───────────────────────────────────────────────────────────────────────────────


def transformation(kind: str) -> optax.GradientTransformation:
    """SGD with momentum, or Adam, in optax."""
    return optax.sgd(RATE, MOMENTUM) if kind == "sgd" else optax.adam(RATE, eps=EPSILON)


def counted(kind: str) -> optax.GradientTransformation:
    """The same, with a count of its steps, as every loop keeps one."""
    tx = transformation(kind)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        updates, inner = tx.update(grads, state[0], params)
        return updates, (inner, state[1] + 1)

    return optax.GradientTransformation(lambda params: (tx.init(params), jnp.int32(0)), update)


def checked(kind: str) -> optax.GradientTransformation:
    """The same, with optax's own check."""
    return optax.apply_if_finite(transformation(kind), 1000)


def scaled(kind: str) -> optax.GradientTransformationExtraArgs:
    """The same, with our loss scaling."""
    return gs.with_loss_scale(transformation(kind), gs.DynamicLossScale(SCALE))


def optimizer_of(kind: str, variables: list[Variable]) -> LossScaleOptimizer:
    """Our optimizer, built for variables."""
    inner = SGD(RATE, MOMENTUM) if kind == "sgd" else gs.optimizers.Adam(RATE, epsilon=EPSILON)
    optimizer = LossScaleOptimizer(inner, initial_scale=SCALE)
    optimizer.build(variables)
    return optimizer


def state_of(optimizer: gs.optimizers.Optimizer, target: Target) -> list[jax.ShapeDtypeStruct]:
    """The state of a built optimizer, planned."""
    return [planned(v, v._sharding or target.everywhere) for v in optimizer.variables]


def state_in_optax(tx: optax.GradientTransformation, params: Any, target: Target) -> Any:
    """The state of a transformation, planned; a list in it has an element for each weight."""

    def one(x: Any) -> Any:
        if not isinstance(x, list):
            return planned(x, target.everywhere)
        return [planned(slot, weight.sharding) for slot, weight in zip(x, params, strict=True)]

    return jax.tree.map(one, jax.eval_shape(tx.init, params), is_leaf=lambda x: type(x) is list)


def on_mesh(weights: Weights) -> list[Any]:
    """The shardings of the weights on a mesh; of one device, none."""
    return [w.sharding for w in weights if isinstance(w.sharding, NamedSharding)]


def donating(step: Callable[..., Any]) -> Any:
    """A step `(weights, state, rest)`, compiled for use in a loop."""
    return jax.jit(step, donate_argnums=(0, 1), keep_unused=True)


# ── optimizer steps, gradients given ─────────────────────────────────────────────────────────


def in_optax(
    tx: optax.GradientTransformation, target: Target, weights: Weights, grads: Weights
) -> Any:
    """A transformation without scaling."""

    def step(weights: Any, state: Any, grads: Any) -> Any:
        grads = [g.astype(jnp.float32) for g in grads]
        updates, state = tx.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state

    return donating(step).lower(weights, state_in_optax(tx, weights, target), grads)


def stateless(kind: str, target: Target, weights: Weights, grads: Weights) -> Any:
    """`LossScaleOptimizer.stateless_apply`."""
    optimizer = optimizer_of(kind, [Variable(weight) for weight in weights])

    def step(weights: Any, state: Any, grads: Any) -> Any:
        return optimizer.stateless_apply(state, grads, weights)

    return donating(step).lower(weights, state_of(optimizer, target), grads)


def optax_loop(kind: str, target: Target, weights: Weights, grads: Weights) -> Any:
    """The two calls of an optax loop; the gradients are divided as by `gs.value_and_grad`."""
    tx, shardings = scaled(kind), on_mesh(weights)

    def step(weights: Any, state: Any, grads: Any) -> Any:
        grads = unscale(grads, state.rule_state.scale)
        updates, state = tx.update(grads, state, weights, shardings=shardings)
        return optax.apply_updates(weights, updates), state

    return donating(step).lower(weights, state_in_optax(tx, weights, target), grads)


def behind_backward(kind: str, target: Target, weights: Weights, grads: Weights) -> Any:
    """What `gs.train_step` does with the gradients."""
    tx, shardings = scaled(kind), on_mesh(weights)

    def step(weights: Any, state: Any, grads: Any) -> Any:
        scale = state.rule_state.scale
        updates, state = tx.update(grads, state, weights, loss_scale=scale, shardings=shardings)
        return gs.transforms.apply_updates(weights, updates, state), state

    return donating(step).lower(weights, state_in_optax(tx, weights, target), grads)


OPTIMIZER_STEPS: dict[str, Callable[..., Any]] = {
    "optax": lambda kind, *rest: in_optax(counted(kind), *rest),
    "optax.apply_if_finite": lambda kind, *rest: in_optax(checked(kind), *rest),
    "ours, stateless_apply": stateless,
    "ours, optax loop": optax_loop,
    "ours, train_step": behind_backward,
}


def optimizer_step(variant: str, device: str, tensors: str, kind: str, dtype: str) -> Any:
    """The lowered step of a variant, on a set of parameters, with gradients of a dtype.

    The set `sharded` has large matrices and small vectors, divided in several ways.
    """
    where = target(device)
    shapes = [(4096, 8192)] * 4 + [(1024,)] * 4 if tensors == "sharded" else None
    shapes = shapes or parameters.shapes(tensors)
    shardings = [where.sharded[i % len(where.sharded)] for i in range(len(shapes))]
    if where.size > 1:  # a vector has one dimension to divide
        shardings = [
            s.update(spec=s.spec[: len(shape)]) for s, shape in zip(shardings, shapes, strict=True)
        ]
    weights, grads = (
        [
            jax.ShapeDtypeStruct(shape, kind, sharding=sharding)
            for shape, sharding in zip(shapes, shardings, strict=True)
        ]
        for kind in (jnp.float32, jnp.dtype(dtype))
    )
    return OPTIMIZER_STEPS[variant](kind, where, weights, grads)


# ── whole train steps ────────────────────────────────────────────────────────────────────────


def train_in_optax(
    tx: optax.GradientTransformation, target: Target, model: models.Model, batch: Any
) -> Any:
    """A transformation without scaling."""

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(model.loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = planned_everywhere(tx.init(model.params), target)
    return donating(step).lower(planned_everywhere(model.params, target), state, batch)


def train_in_loop(kind: str, target: Target, model: models.Model, batch: Any) -> Any:
    """The calls of an optax loop."""
    tx = scaled(kind)

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = gs.value_and_grad(model.loss, state)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = planned_everywhere(tx.init(model.params), target)
    return donating(step).lower(planned_everywhere(model.params, target), state, batch)


def train_in_one_call(kind: str, target: Target, model: models.Model, batch: Any) -> Any:
    """`gs.train_step`."""
    state = gs.TrainState.create(model.params, scaled(kind))
    return gs.train_step(model.loss).lower(planned_everywhere(state, target), batch)


def minimize(kind: str, target: Target, model: models.Model, batch: Any) -> Any:
    """`LossScaleOptimizer.minimize`."""
    params = jax.tree.map(Variable, planned_everywhere(model.params, target))
    variables = jax.tree.leaves(params)
    optimizer = optimizer_of(kind, variables)

    def step(batch: Any) -> jax.Array:
        def loss() -> jax.Array:
            return model.loss(jax.tree.map(lambda v: v.value(), params), batch)

        return optimizer.minimize(loss, variables)

    return gs.optimizers.jit(step, (variables, optimizer.variables), donate=True).lower(batch)


TRAIN_STEPS: dict[str, Callable[..., Any]] = {
    "optax": lambda kind, *rest: train_in_optax(counted(kind), *rest),
    "optax.apply_if_finite": lambda kind, *rest: train_in_optax(checked(kind), *rest),
    "ours, minimize": minimize,
    "ours, optax loop": train_in_loop,
    "ours, train_step": train_in_one_call,
}


def train_step(variant: str, device: str, name: str, kind: str, dtype: str) -> Any:
    """The lowered step of a variant, of a model that computes in a dtype."""
    where, model = target(device), models.model(name, dtype)

    def one(x: jax.Array) -> jax.ShapeDtypeStruct:
        rows = ROWS * where.size if where.size > 1 else len(x)
        return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype, sharding=where.batch)

    return TRAIN_STEPS[variant](kind, where, model, jax.tree.map(one, model.batch))
