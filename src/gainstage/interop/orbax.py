"""Orbax checkpoints of variables and optimizer, from any number of processes, onto any mesh.

Needs the extra `orbax`.
"""

import contextlib
import functools
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from gainstage._base.checks import brief
from gainstage._base.configurable import readable
from gainstage._base.extras import missing
from gainstage._base.warn import warn
from gainstage._variables.arguments import is_planned
from gainstage._variables.bridge import read, write
from gainstage._variables.types import PyTree
from gainstage._variables.variable import Variable
from gainstage.distributed.agreement import hashes
from gainstage.optimizers._internals import assigned_by_losses, store_of, tell_if_left
from gainstage.optimizers._step.saving import check_names, unique_names
from gainstage.optimizers.optimizer import Optimizer

try:
    import orbax.checkpoint as ocp
except ModuleNotFoundError as _error:
    raise missing("orbax-checkpoint", "orbax", _error.name) from _error

__all__ = ["Checkpoints"]

CHECKPOINT_FORMAT = 2
SHOWN_FIELDS = 5  # fields that an error names


class Checkpoints:
    """A folder of checkpoints, by step.

    Arrays are stored whole, by name, and restored bit for bit on any mesh and with any
    `shard_state_over`. One device restores what two processes with four devices each saved. If a
    process is killed while it saves, the checkpoint before is the latest. Each array has a
    checksum, which detects a file that was damaged later. With several processes, all of them call
    every method, and see the same folder.

    Args:
        directory: the folder; created if missing.
        keep: the number of latest checkpoints to keep; None for all.

    Examples:
        >>> import gainstage as gs, tempfile
        >>> from gainstage.interop.orbax import Checkpoints
        >>> w = gs.Variable([1.0, 2.0], name="w")
        >>> opt = gs.LossScaleOptimizer(gs.optimizers.Adam(0.1))
        >>> loss = opt.minimize(lambda: (w ** 2).sum(), [w])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoints = Checkpoints(folder)
        ...     checkpoints.save(1, [w], opt)
        ...     w.assign([0.0, 0.0])
        ...     print(checkpoints.restore([w], opt), w.value().round(2))
        1 [0.9 1.9]
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int | None = 3):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=False, create=True
        )
        self._manager = ocp.CheckpointManager(Path(directory).absolute(), options=options)
        self._told = False  # whether it has warned of variables that were left out

    @property
    def latest(self) -> int | None:
        """The step of the latest complete checkpoint, None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, variables: Sequence[Variable], optimizer: Optimizer) -> None:
        """Saves the checkpoint of a step, and waits until it is written.

        Args:
            step: an integer that grows from one checkpoint to the next.
            variables: all variables of the model, trainable ones and others, and the learning
                rate if it is a variable of yours. A missing one is not saved; a warning names it.
            optimizer: the optimizer, built.

        Raises:
            TypeError: `optimizer` is not an optimizer, for example an optax state.
            ValueError: not built, or there is a checkpoint of this or a later step.
        """
        named = _named(variables, optimizer)
        for variable in [v for part in named.values() for v in part.values() if is_planned(v)]:
            variable.value()  # raises: a planned variable has no value
        self._tell_if_left_out(variables, optimizer)
        if step:  # a first checkpoint may be saved after a step was only compiled
            tell_if_left(optimizer)
        # `read` and `write` share no arrays; after `value()` or `assign` the next step would copy
        # them.
        values = read(named)
        arguments = ocp.args.Composite(
            arrays=ocp.args.StandardSave(values),
            manifest=ocp.args.JsonSave(
                _manifest(named, optimizer) | {"checksums": _checksums(values)}
            ),
        )
        if not self._manager.save(step, args=arguments):
            raise ValueError(f"Expected a step after {self.latest}; got {step}.")
        self._manager.wait_until_finished()

    def restore(
        self,
        variables: Sequence[Variable],
        optimizer: Optimizer,
        step: int | None = None,
        *,
        same_config: bool = True,
    ) -> int | None:
        """Restores variables and optimizer from a checkpoint; changes none if a value does not fit.

        Each value gets the sharding that its variable has here, on any mesh. A planned variable
        (made from a `jax.ShapeDtypeStruct`) gets its value by it.

        Args:
            variables: as for `save`: the same names, shapes and dtypes, in any order; variables
                that share a name keep their order.
            optimizer: an optimizer of the same class, built.
            step: the step, by default the latest.
            same_config: whether the optimizer's configuration must be the saved one, except for
                the learning rate, whose number is part of the state. The value of a variable
                of yours is restored only if it is among `variables`.

        Returns:
            The step; None if there is no checkpoint.

        Raises:
            TypeError: `optimizer` is not an optimizer, for example an optax state.
            ValueError: not built; no checkpoint of that step; another format, class or
                configuration; another name, shape or dtype (the first is named); a damaged file.
        """
        step = self.latest if step is None else step
        if step is None:
            return None
        if step not in self._manager.all_steps():
            raise ValueError(f"Expected one of the steps {self._manager.all_steps()}; got {step}.")
        named = _named(variables, optimizer)
        ours = _manifest(named, optimizer)
        wanted = {kind: {k: _plan(v) for k, v in part.items()} for kind, part in named.items()}
        with _whole(step):
            manifest = ocp.args.Composite(manifest=ocp.args.JsonRestore())
            saved = self._manager.restore(step, args=manifest)["manifest"]
            _check_manifest(saved, ours, same_config)
            arrays = ocp.args.Composite(arrays=ocp.args.StandardRestore(wanted))
            values = self._manager.restore(step, args=arrays)["arrays"]
            damaged = _differing(saved["checksums"], _checksums(values))
        if damaged:
            raise ValueError(
                f"Expected step {step} as it was saved; got {damaged[0]!r} damaged; try another."
            )
        self._tell_if_left_out(variables, optimizer)
        write(jax.tree.leaves(named), jax.tree.leaves(values))
        return step

    def _tell_if_left_out(self, variables: Sequence[Variable], optimizer: Optimizer) -> None:
        """Warns once if a checkpoint lacks what the optimizer trains, or reads as its rate, or what
        a loss of `minimize` has assigned."""
        rate, stored = store_of(optimizer).rate.source, {*variables, *optimizer.variables}
        needed = [*optimizer.trainable_variables, *([rate] if isinstance(rate, Variable) else [])]
        needed += assigned_by_losses(optimizer)
        left = [v.name for v in dict.fromkeys(needed) if v not in stored]
        if left and not self._told:
            self._told = True
            warn(
                f"The checkpoint has no value of {brief(left)}, which {optimizer.name!r} trains or "
                f"reads as its learning rate, or which a loss of its minimize assigns, so a "
                f"restored run has other values there. Add them "
                f"to the list: save(step, [*variables, ...], optimizer), and so for restore."
            )

    def close(self) -> None:
        """Closes the folder."""
        self._manager.close()


Named = dict[str, dict[str, Variable]]
Sums = dict[str, dict[str, list[int]]]


@contextlib.contextmanager
def _whole(step: int) -> Iterator[None]:
    """Turns all errors of Orbax, JSON and this module about damaged files into one kind."""
    try:
        yield
    except Exception as error:
        if str(error).startswith("Expected"):
            raise
        raise ValueError(
            f"Expected a complete checkpoint of step {step}; got {type(error).__name__}: {error}"
        ) from error


def _checksums(values: PyTree) -> Sums:
    """Two sums over each array, the same for every sharding."""
    sums = jax.tree.map(lambda x: _sum_on(_mesh_of(x))(x), values)
    return jax.tree.map(lambda x: x.tolist(), jax.device_get(sums))


def _mesh_of(array: jax.Array) -> Mesh | AbstractMesh | None:
    return array.sharding.mesh if isinstance(array.sharding, NamedSharding) else None


@functools.cache
def _sum_on(mesh: Mesh | AbstractMesh | None) -> Callable[[jax.Array], jax.Array]:
    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.jit(hashes, out_shardings=everywhere)


def _differing(saved: Sums, ours: Sums) -> list[str]:
    pairs = [(name, kind) for kind, sums in ours.items() for name in sums]
    return [name for name, kind in pairs if saved[kind][name] != ours[kind][name]]


def _named(variables: Sequence[Variable], optimizer: Optimizer) -> Named:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"Expected an optimizer of gainstage; got {type(optimizer).__name__}. An optax state "
            f"is a pytree of arrays: save it with orbax.checkpoint.StandardCheckpointer."
        )
    if not optimizer.built:
        raise ValueError(f"Expected {optimizer.name!r} to be built before its checkpoint.")
    parts = {"variables": list(variables), "optimizer": optimizer.variables}
    return {kind: dict(zip(unique_names(v), v, strict=True)) for kind, v in parts.items()}


def _plan(variable: Variable) -> jax.ShapeDtypeStruct:
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(variable.shape, variable.dtype, sharding=variable.sharding or here)


def _manifest(named: Named, optimizer: Optimizer) -> dict[str, Any]:
    leaves = {
        kind: {name: [list(v.shape), str(v.dtype)] for name, v in part.items()}
        for kind, part in named.items()
    }
    return {
        "format": CHECKPOINT_FORMAT,
        "class": type(optimizer).__name__,
        "config": _without_rate(readable(optimizer.get_config())),
        **leaves,
    }


def _without_rate(config: object) -> object:
    """A configuration without numeric learning rates, which may have changed since."""
    if not isinstance(config, dict):
        return config
    rate = config.get("learning_rate")
    left = {k: v for k, v in config.items() if k != "learning_rate" or isinstance(rate, dict)}
    return {key: _without_rate(value) for key, value in left.items()}


def _different_fields(saved: object, ours: object) -> tuple[object, object, str]:
    """The fields in which two descriptions differ, by their paths, and how many are left out."""
    known, found = _fields(saved), _fields(ours)
    paths = [p for p in known | found if p not in known or p not in found or known[p] != found[p]]
    # Another class has other options, which say nothing more.
    paths = [p for p in paths if p.endswith("class_name")] or paths
    shown, left = paths[:SHOWN_FIELDS], len(paths) - SHOWN_FIELDS
    before, here = ({p: of[p] for p in shown if p in of} for of in (known, found))
    return before.get("", before), here.get("", here), f" and {left} more" if left > 0 else ""


def _fields(tree: object, path: str = "") -> dict[str, Any]:
    """The values inside of dictionaries, by their paths."""
    if not isinstance(tree, dict) or not tree:
        return {path: tree}
    each = (_fields(value, f"{path}/{key}" if path else str(key)) for key, value in tree.items())
    return functools.reduce(operator.or_, each)


def _check_manifest(saved: dict[str, Any], ours: dict[str, Any], same_config: bool) -> None:
    for key in ["format", "class", *(["config"] if same_config else [])]:
        if saved[key] != ours[key]:
            before, here, more = _different_fields(saved[key], ours[key])
            anyway = " To restore it anyway, pass same_config=False." * (key == "config")
            raise ValueError(f"Expected {key} {before!r}, as saved; got {here!r}{more}.{anyway}")
    for kind in ("variables", "optimizer"):
        check_names(f"saved {kind}", ours[kind], saved[kind])
        for name, about in ours[kind].items():
            if about != saved[kind][name]:
                shape, dtype = saved[kind][name]
                raise ValueError(
                    f"Expected {name!r} of shape {tuple(shape)} and dtype {dtype}, as saved; got "
                    f"shape {tuple(about[0])} and dtype {about[1]}."
                )
