"""Steps that are taken again with the same loss, at a lower scale, while a gradient overflows."""

from collections.abc import Callable
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import lax

from gainstage._core import checks
from gainstage._core.bridge import functional, read, write
from gainstage._core.of_loss import VarList
from gainstage._core.types import Aux, Scalar
from gainstage._core.variable import is_tracing
from gainstage.optimizers.base import Optimizer


class Retrying(Optimizer):
    """An optimizer that skips steps, and can take a skipped step again."""

    _is_base = True

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
                Each retry calls the same loss at the scale that the rule has lowered, and leaves
                what a skipped step leaves. Inside `gainstage.jit` it is a loop of the program;
                otherwise the host reads after each step whether it was applied.

        Returns:
            The unscaled loss before the step, in float32 or wider; (loss, aux) with `has_aux`.

        Raises:
            TypeError: as `compute_gradients` and `apply`, or `retries` is not a number.
            ValueError: as these, or `retries` is not an integer >= 0.

        Examples:
            >>> import gainstage as gs
            >>> w = gs.Variable(1.0)
            >>> opt = gs.LossScaleOptimizer(gs.SGD(1 / 16), initial_scale=2.0**126)
            >>> loss = opt.minimize(lambda: 4 * w**2, [w], retries=8)  # two overflow
            >>> print(w.value(), opt.loss_scale == 2.0**124)
            0.5 True
        """
        has_aux = checks.flag("has_aux", has_aux)
        retries = checks.integer("retries", retries, low=0)
        if not retries:
            return self._take(loss, var_list, has_aux)[0]
        changed = list(self._store.index)

        def take() -> tuple[Any, jax.Array]:
            result, conditions, pairs = self._take(loss, var_list, has_aux)
            changed[:] = dict.fromkeys([*self._store.index, *self.variables, *pairs.assigned])
            return result, jnp.array(conditions, bool).all()

        result, applied = take()
        if not is_tracing():
            for _ in range(retries):
                if applied:
                    break
                result, applied = take()
            return result
        variables = [variable for variable in changed if variable._is_bound]

        def again(state: tuple[Any, ...]) -> tuple[Any, ...]:
            count, *_, values = state
            (result, applied), values = functional(take, variables)(values)
            return count + 1, applied, result, values

        state = jnp.int32(0), applied, result, read(variables)
        *_, result, values = lax.while_loop(lambda s: ~s[1] & (s[0] < retries), again, state)
        write(variables, values)
        return result
