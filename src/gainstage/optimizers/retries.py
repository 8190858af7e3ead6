"""Steps that are taken again with the same loss, at a lower scale, while a gradient overflows."""

from collections.abc import Callable
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from gainstage._base import checks
from gainstage._base.warn import warn
from gainstage._scaling.retry_loop import NO_RETRY, Attempt, may_help, try_again
from gainstage._variables.bridge import assign, functionalize, read, write
from gainstage._variables.types import Aux, Scalar
from gainstage._variables.variable import is_tracing
from gainstage.optimizers._step.differentiate import VarList, selected
from gainstage.optimizers.optimizer import Optimizer
from gainstage.rules.loss_scale import FixedLossScale


class Retrying(Optimizer):
    """`minimize` with retries, for an optimizer that may skip a step."""

    _is_base = True
    _scale_store: Any
    _told = False  # that retries have no effect

    @overload
    def minimize(
        self,
        loss: Callable[[], Scalar],
        var_list: VarList,
        *,
        has_aux: Literal[False] = False,
        retries: int = 0,
    ) -> jax.Array: ...

    @overload
    def minimize(
        self,
        loss: Callable[[], tuple[Scalar, Aux]],
        var_list: VarList,
        *,
        has_aux: Literal[True],
        retries: int = 0,
    ) -> tuple[jax.Array, Aux]: ...

    def minimize(
        self,
        loss: Callable[[], Any],
        var_list: VarList,
        *,
        has_aux: bool = False,
        retries: int = 0,
    ) -> Any:
        """Differentiates the scaled `loss` and takes a step.

        The loss may assign variables that it does not train, such as the running mean of a
        normalisation. They keep their new values only if the step was applied: a skipped step
        changes nothing but the loss scale.

        Args:
            loss: a function of no argument that reads the variables and returns a scalar.
            var_list: the variables to train, or a callable that returns them. It is called after
                the loss, which may create them when it is called for the first time.
            has_aux: whether `loss` returns (loss, aux), where aux is any pytree of arrays.
            retries: how often a step with a non-finite gradient is taken again, an integer >= 0.
                Each retry calls the same loss at the scale that the rule has lowered. There is none
                if the loss is not finite, or the rule keeps its scale; if none is applied, the
                scale is that after one skipped step. Inside `gainstage.jit` it is a loop of the
                program; otherwise the host reads after each step whether to retry.

        Returns:
            The unscaled loss before the step, in float32 or wider; (loss, aux) with `has_aux`.

        Raises:
            TypeError: as `compute_gradients` and `apply`, or `retries` is not a number.
            ValueError: as these, or `retries` is not an integer >= 0.

        Examples:
            >>> import gainstage as gs
            >>> w = gs.Variable(1.0)
            >>> opt = gs.LossScaleOptimizer(gs.optimizers.SGD(1 / 16), initial_scale=2.0**126)
            >>> loss = opt.minimize(lambda: 4 * w**2, [w], retries=8)  # two overflow
            >>> print(w.value(), opt.loss_scale == 2.0**124)
            0.5 True
        """
        has_aux = checks.flag("has_aux", has_aux)
        retries = checks.integer("retries", retries, low=0)
        if not retries:
            return self._take(loss, var_list, has_aux)[0]
        if isinstance(getattr(self, "rule", None), FixedLossScale) and not self._told:
            self._told = True
            warn(NO_RETRY)
        changed, rule = list(self._store.index), self._scale_store.state.rule_state
        scales = jax.tree.leaves(rule)

        def take() -> Attempt:
            before = rule.scale.value()
            result, conditions, found = self._take(loss, var_list, has_aux)
            changed[:] = dict.fromkeys([*self._store.index, *self.variables, *found.assigned])
            applied = jnp.array(conditions, bool).all()
            helps = may_help(applied, found.loss, before, rule.scale.value())
            return Attempt(helps, (result, applied))

        def again(_: object) -> Attempt:
            observed = self._scale_store.state.observed
            if observed is not None:  # the step that was skipped is retried instead
                observed.info.skipped_steps.assign_sub(1)
                observed.info.retried_steps.assign_add(1)
            return take()

        first = take()
        after_one = [variable.value() for variable in scales]
        if is_tracing():  # the variables are carried through the loop
            variables = [variable for variable in changed if variable._is_bound]
            pure = functionalize(again, variables)

            def once_more(state: tuple[Any, list[Any]]) -> Attempt:
                (helps, taken), values = pure(state[1], None)
                return Attempt(helps, (taken, values))

            start = Attempt(first.helps, (first.result, read(variables)))
            _, ((result, applied), values) = try_again(start, once_more, retries)
            write(variables, values)
            write(scales, selected([applied], read(scales), after_one))
            return result
        count, (result, applied) = try_again(first, again, retries)
        if count:
            assign(scales, selected([applied], read(scales), after_one))
        return result
