"""Any optax transformation as an optimizer."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from gainstage._base.arrays import is_key
from gainstage._base.checks import brief
from gainstage._scaling.gradients import Gradients, upcast
from gainstage._variables.bridge import read
from gainstage._variables.sharding import replicate
from gainstage._variables.types import OptState, PyTree, Rate, Transformation
from gainstage._variables.variable import Variable
from gainstage.optimizers._step.options import WrapperOptions
from gainstage.optimizers.optimizer import Optimizer
from gainstage.transforms.optax_checks import check_transformation


def from_optax(
    tx: Transformation,
    name: str | None = None,
    learning_rate: Rate = 1.0,
    *,
    master_weights: bool = False,
    **options: Unpack[WrapperOptions],
) -> Optimizer:
    """Makes an optax transformation an optimizer, with all that an `Optimizer` adds: loss scaling,
    averaging, accumulation, clipping.

    The transformation gets all variables at once, as a list, in float32 or wider. A missing
    gradient is passed as zeros. Its variable does not change, nor does its element of any list in
    the state that has one for each variable. Typed random keys in the state are stored
    as integers, so that they can be saved. Masks and labels are lists in the order of the
    variables, or functions of such a list.

    `minimize`, and `apply(..., loss=loss)`, pass the true loss as `value`, for transformations such
    as `optax.polyak_sgd`; with accumulation, the loss of the last microbatch. A transformation that
    needs other arguments, such as `optax.lbfgs` with its line search, needs `with_loss_scale`.

    Args:
        tx: the transformation, usually with its own learning rate.
        name: the prefix of the names of the optimizer's variables.
        learning_rate: a factor of the updates: a number, schedule or callable.
        master_weights: whether half-precision variables have a float32 copy in the state.
        **options: options of every `Optimizer`, except `shard_state_over`: `tx` decides the
            sharding of its state.

    Raises:
        TypeError: `tx` is not a transformation, an argument has the wrong type or is unknown.
        ValueError: an argument is out of range.

    Examples:
        >>> import gainstage as gs, optax
        >>> var = gs.optimizers.Variable(10.0)
        >>> opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.from_optax(optax.adamw(0.1)))
        >>> loss = opt.minimize(lambda: (var ** 2) / 2.0, [var])
        >>> print(round(float(var), 4))
        9.8999

    Source: `optax.GradientTransformation`.
    """
    return Optax(tx, name, learning_rate, master_weights=master_weights, **options)


class Optax(Optimizer):
    """What `from_optax` returns."""

    def __init__(
        self,
        tx: Transformation,
        name: str | None = None,
        learning_rate: Rate = 1.0,
        *,
        master_weights: bool = False,
        **options: Unpack[WrapperOptions],
    ):
        check_transformation("tx", tx)
        if unknown := options.keys() - WrapperOptions.__annotations__.keys():
            raise TypeError(f"Expected no {sorted(unknown)[0]} for from_optax; got {options}.")
        super().__init__(learning_rate, name=name, master_weights=master_weights, **options)
        self.tx = tx
        self._state: OptState = None
        self._key_kinds: list[Any] = []  # for each leaf: the implementation of its key, or None

    def build(self, var_list: Sequence[Variable]) -> None:
        if self._undecayed and self._store.options.weight_decay is None:
            undecayed = self._undecayed
            mask = [variable not in undecayed for variable in var_list]
            raise ValueError(
                f"Expected a weight_decay of {self.name!r} for exclude_from_weight_decay, which "
                f"does not reach the decay of its tx. Write the mask there, a list in the order of "
                f"the variables: optax.adamw(..., weight_decay=..., mask={brief(mask)})."
            )
        super().build(var_list)
        if self._state is not None:
            return
        variables = list(var_list)
        planned = any(variable._is_planned for variable in variables)
        init = self._planned if planned else self._init
        try:
            state = init(read(variables))
        except ValueError as error:
            if "pytree" not in str(error):
                raise
            raise ValueError(
                f"The tx of {self.name!r} gets the variables as a list, "
                f"{brief([v.name for v in variables])}: write its masks and labels as lists in "
                f"this order, or as functions of such a list. {str(error)[:200]}"
            ) from error
        paths, structure = jax.tree_util.tree_flatten_with_path(state)
        slots = [
            Variable(value, name=f"{self.name}/{jax.tree_util.keystr(path)}", trainable=False)
            for path, value in paths
        ]
        self._state = jax.tree.unflatten(structure, slots)
        self._slots.all.extend(slots)
        replicate(self.name, self.mesh, [slot for slot in slots if slot.ndim == 0], variables)

    def _planned(self, values: list[jax.Array]) -> OptState:
        """The state as shapes and dtypes; a slot of a variable has its sharding."""
        state = jax.eval_shape(self._init, values)
        alone = jax.tree.map(lambda slot: slot.update(sharding=None), state)
        if all(value.sharding is None for value in values):
            return alone
        return optax.tree_utils.tree_map_params(
            self.tx,  # pyright: ignore[reportArgumentType]
            lambda slot, value: slot.update(sharding=value.sharding),
            alone,
            values,
        )

    def _init(self, values: list[jax.Array]) -> OptState:
        state = self.tx.init(upcast(values))
        self._key_kinds = [
            jax.random.key_impl(leaf) if is_key(leaf) else None for leaf in jax.tree.leaves(state)
        ]
        return jax.tree.map(_without_key, state)

    def _state_with_keys(self) -> OptState:
        values, structure = jax.tree.flatten(read(self._state))
        leaves = [
            value if kind is None else jax.random.wrap_key_data(value, impl=kind)
            for value, kind in zip(values, self._key_kinds, strict=True)
        ]
        return jax.tree.unflatten(structure, leaves)

    def _wants_loss(self) -> bool:
        return isinstance(self.tx, optax.GradientTransformationExtraArgs)

    def _updated(
        self, grads: PyTree, state: OptState, values: PyTree, loss: jax.Array | None
    ) -> tuple[PyTree, OptState]:
        """Returns `tx.update(...)`, or raises an error that names the missing argument."""
        update: Callable[..., tuple[PyTree, OptState]] = functools.partial(
            self.tx.update, grads, state, values
        )
        try:
            if loss is None:
                return update()
            try:
                return update(value=loss)
            except TypeError as error:
                if "unexpected keyword argument 'value'" not in str(error):
                    raise
                return update()
        except (TypeError, ValueError) as error:
            if (explained := self._explained(error)) is None:
                raise
            raise explained from error

    def _explained(self, error: Exception) -> TypeError | None:
        """The error in our own words, if an extra argument is missing."""
        missing = r"required keyword-only arguments?: (.+)|(\w+) must be provided"
        needs = re.search(missing, str(error))
        if needs is None:
            return None
        if needs[1] == "'value'":
            return TypeError(
                f"The tx of {self.name!r} needs the loss, as 'value'; call minimize, or "
                f"apply(..., loss=loss)."
            )
        return TypeError(
            f"The tx of {self.name!r} needs {needs[1] or needs[2]}; from_optax passes only the "
            f"loss, as 'value'. Use gainstage.with_loss_scale(tx): it passes all arguments."
        )

    def _update_weights(self, grads: Gradients, rate: jax.Array, loss: jax.Array | None) -> None:
        values = [variable.value() for variable in self._store.index]
        pairs = zip(grads, values, strict=True)
        given = [jnp.zeros_like(v) if g is None else g.value() for g, v in pairs]
        old = self._state_with_keys()
        updates, new = self._updated(given, old, values, loss)

        def is_of_variables(node: object) -> bool:
            return type(node) is list and len(node) == len(grads)

        def kept(new: OptState, old: OptState) -> OptState:
            if not is_of_variables(new):
                return new
            return [o if g is None else n for g, n, o in zip(grads, new, old, strict=True)]

        new = jax.tree.map(kept, new, old, is_leaf=is_of_variables)
        jax.tree.map(Variable.assign, self._state, jax.tree.map(_without_key, new))
        for variable, gradient, update in zip(self._store.index, grads, updates, strict=True):
            if gradient is not None:
                self.assign_add(variable, rate * update)


def _without_key(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if is_key(leaf) else leaf
