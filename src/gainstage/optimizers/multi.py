"""Several optimizers as one: each trains its own variables, all in one step."""

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import jax

from gainstage._base.checks import brief
from gainstage._scaling.gradients import Gradients
from gainstage._variables.arguments import variables_in
from gainstage._variables.types import Given, Rate
from gainstage._variables.variable import Variable
from gainstage.optimizers._internals import decays, rate_of_step, store_of
from gainstage.optimizers._step.options import DEFAULTS, WrapperOptions
from gainstage.optimizers._step.store import Store, Wrapper
from gainstage.optimizers.inner_checks import check_part
from gainstage.optimizers.optimizer import Optimizer
from gainstage.optimizers.wrapped_optax import Optax
from gainstage.transforms.loss_scaled_state import states_in


class _Whole(Wrapper):
    """A `MultiOptimizer`, around each of its optimizers."""

    trains_several = True

    def __init__(self, owner: str, over: Mapping[str, Any], store: Store):
        super().__init__(owner, over)
        self._store = store

    def changed(self) -> None:
        self._store.changed()


class MultiOptimizer(Optimizer):
    """Several optimizers as one, for the gradients of one loss: each trains its own variables.

    Inside a `LossScaleOptimizer` they share one loss scale and one skip decision: if any gradient
    overflows, none of them takes the step. Two `LossScaleOptimizer`s cannot do that for *one*
    loss. Their scales drift apart after the first overflow. The steps of one of them then become
    too large or too small.

    Each optimizer keeps its learning rate, schedule, weight decay, slots and `iterations`. Give all
    other options (clipping, averaging, accumulation) to this class or its wrapper; they act on all
    variables together.

    Args:
        optimizers_and_variables: pairs of an optimizer that is not built, and the variables that it
            trains. Each variable is in one pair. `Optax` may be one of the optimizers.
        name: the prefix of the names of the optimizer's own variables.
        learning_rate: a factor of each optimizer's learning rate: a number, schedule or callable.
        master_weights: whether half-precision variables have a float32 copy in the state.
        **options: options of every `Optimizer`, except `weight_decay` and `shard_state_over`.

    Raises:
        TypeError: an element is not an optimizer, has a loss scale, or overrides `apply` or
            another method that takes a step.
        ValueError: an optimizer is built, wrapped, or has options other than `weight_decay`; a
            variable is in two pairs; `build` gets other variables than those of the pairs.

    Examples:
        >>> import gainstage as gs
        >>> body, head = gs.Variable(1.0), gs.Variable(1.0)
        >>> from gainstage.optimizers import SGD, MultiOptimizer
        >>> parts = MultiOptimizer([(SGD(0.25, momentum=0.9), [body]), (SGD(0.5), [head])])
        >>> opt = gs.LossScaleOptimizer(parts)
        >>> loss = opt.minimize(lambda: body * head, [body, head])
        >>> print(loss, body.value(), head.value(), opt.loss_scale)
        1.0 0.75 0.5 32768.0
        >>> opt.apply([1.0, float("inf")])
        >>> print(body.value(), head.value(), opt.loss_scale)
        0.75 0.5 16384.0

    Source: `optax.multi_transform`; `tfa.optimizers.MultiOptimizer`; parameter groups of torch.
    """

    def __init__(
        self,
        optimizers_and_variables: Sequence[tuple[Optimizer, Sequence[Variable]]],
        name: str | None = None,
        learning_rate: Rate = 1.0,
        *,
        master_weights: bool = False,
        **options: Unpack[WrapperOptions],
    ):
        if unknown := options.keys() - WrapperOptions.__annotations__.keys():
            raise TypeError(f"Expected no {sorted(unknown)[0]} for MultiOptimizer; got {options}.")
        super().__init__(learning_rate, name=name, master_weights=master_weights, **options)
        pairs = [
            (optimizer, variables_in(v, "optimizers_and_variables"))
            for optimizer, v in optimizers_and_variables
        ]
        if not pairs:
            raise ValueError("Expected at least one pair of an optimizer and its variables.")
        for optimizer, _ in pairs:
            check_part(optimizer)
        if len({id(optimizer) for optimizer, _ in pairs}) < len(pairs):
            raise ValueError("Expected a new optimizer for each pair; got one of them twice.")
        self._known = variables_in(
            [v for _, variables in pairs for v in variables], "optimizers_and_variables"
        )
        self.optimizers_and_variables = pairs
        over = {name: value for name, value in DEFAULTS.items() if name != "weight_decay"}
        self._wrapper = _Whole(self.name, over, self._store)
        self._attach()

    def _attach(self) -> None:
        for optimizer, _ in self.optimizers_and_variables:
            if store_of(optimizer).wrapper is None:  # a shallow copy shares the original's
                store_of(optimizer).set_wrapper(self._wrapper)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._attach()

    def build(self, var_list: Sequence[Variable]) -> None:
        if set(variables_in(var_list, "var_list")) != set(self._known):
            raise ValueError(
                f"Expected the variables of all optimizers of {self.name!r}, "
                f"{brief([v.name for v in self._known])}; got {brief([v.name for v in var_list])}."
            )
        built = self.built
        super().build(var_list)
        for optimizer, variables in self.optimizers_and_variables:
            optimizer.build(variables)
            if isinstance(optimizer, Optax) and states_in(optimizer._state):
                raise ValueError(
                    f"Expected the transformation of {optimizer.name!r} without "
                    f"gainstage.loss_scaled in it: one loss has one scale. Put a "
                    f"LossScaleOptimizer around {self.name!r}."
                )
            if not built:
                self._slots.all.extend(store_of(optimizer).variables)

    def _wants_loss(self) -> bool:
        return any(optimizer._wants_loss() for optimizer, _ in self.optimizers_and_variables)

    def _update_all(self, grads: Gradients, rate: jax.Array, loss: Given) -> None:
        if self._store.in_force.weight_decay is not None:
            raise ValueError(
                f"Expected weight_decay on an optimizer of {self.name!r}, whose learning rate "
                f"multiplies it; got {self._store.in_force.weight_decay} for all of them."
            )
        gradient_of = dict(zip(self._store.index, grads, strict=True))
        for optimizer, variables in self.optimizers_and_variables:
            store = store_of(optimizer)
            own = [gradient_of[variable] for variable in variables]
            own_rate = rate_of_step(optimizer)
            if own_rate is None:
                own_rate = store.rate.at(store.microbatches.value())
            own_rate = rate * own_rate
            decay = store.in_force.weight_decay
            for variable, gradient in zip(variables, own, strict=True):
                if decay is not None and gradient is not None and decays(optimizer, variable):
                    weight = variable.value()
                    self.assign(variable, weight - weight * decay * own_rate)
            optimizer._update_all(own, own_rate, loss)
            self.assign_add(store.microbatches, 1)
