"""The verbs of every optimizer: how a step is called, whatever it does.

All of them run one piece of imperative code, `_apply`: under the bridge by itself it is
`stateless_apply`, compiled it is `apply`.
"""

import abc
import itertools
import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gainstage._core import checks
from gainstage._core._jax import Tracer, used_arguments
from gainstage._core.bridge import functional, jit, read, run, variables_in
from gainstage._core.gradients import widen
from gainstage._core.stateful import Stateful, check_count
from gainstage._core.variable import Variable, is_inside, strong

VarList = Sequence[Variable] | Callable[[], Sequence[Variable]]


class Minimizer(Stateful):
    """Something with variables and a step; `Optimizer` says what the step does."""

    jit_compile: bool
    _program: jit | None
    _loss: jax.Array | None  # of the step that is being taken, where `minimize` takes it
    _last_kind: Any  # the kind of the last gradients, if a step took them as they came

    @abc.abstractmethod
    def build(self, var_list: Sequence[Variable]) -> None:
        """Creates the state for these variables."""

    @abc.abstractmethod
    def scale_loss(self, loss: Any) -> Any:
        """The loss to differentiate."""

    @property
    @abc.abstractmethod
    def iterations(self) -> Variable:
        """Updates so far."""

    @property
    @abc.abstractmethod
    def _index(self) -> dict[Variable, int]:
        """The trainable variables, with their places."""

    @abc.abstractmethod
    def _rate_now(self) -> jax.Array | None:
        """A learning rate that Python has to compute for each step; else None."""

    @abc.abstractmethod
    def _apply(
        self,
        grads: list[Any],
        rate: jax.Array | None,
        loss: jax.Array | None = None,
        only_if: jax.Array | None = None,
    ) -> None:
        """One step, as imperative code on variables; gradients in the trainable ones' order."""

    def _wants_loss(self) -> bool:
        """Whether a step wants to know the true loss, if there is one."""
        return False

    def _raise_if_failed(self) -> None:
        """An error if nothing will change any more."""

    # ── the step ─────────────────────────────────────────────────────────────────────────────

    def minimize(self, loss: Callable[[], Any], var_list: VarList) -> jax.Array:
        """Differentiates `loss` and takes a step.

        Args:
            loss: a function of no argument that reads the variables and returns a scalar.
            var_list: the variables to change, or a callable that returns them.

        Returns:
            The loss before the step, not scaled, in float32 or wider.

        Raises:
            TypeError, ValueError: as `compute_gradients` and `apply`.
        """
        value, grads_and_vars = self._loss_and_gradients(loss, var_list)
        self._loss = value
        try:
            self.apply_gradients(grads_and_vars)
        finally:
            self._loss = None
        return value

    def compute_gradients(
        self, loss: Callable[[], Any], var_list: VarList
    ) -> list[tuple[jax.Array | None, Variable]]:
        """The (gradient, variable) pairs of a loss, in order, scaled as `apply` expects them.

        The gradient is None for a variable on which the loss does not depend. `loss` runs
        uncompiled; for speed call this inside `gainstage.jit`. A `jax.jit` or `lax.scan` inside of
        the loss must get `variable.value()` as an argument, for JAX keeps what it traced.

        Args:
            loss: a function of no argument that reads the variables and returns a scalar.
            var_list: the variables, or a callable that returns them.

        Raises:
            TypeError: `loss` is not callable, or returns no floating number.
            ValueError: `loss` returns something else than a scalar.
        """
        return self._loss_and_gradients(loss, var_list)[1]

    def _loss_and_gradients(
        self, loss: Callable[[], Any], var_list: VarList
    ) -> tuple[jax.Array, list[tuple[jax.Array | None, Variable]]]:
        variables = variables_in(var_list() if callable(var_list) else var_list)
        if not callable(loss):
            raise TypeError(f"Expected a callable of no argument for loss; got {loss!r}.")

        def scaled_and_true_loss() -> tuple[jax.Array, jax.Array]:
            value = jnp.asarray(loss())
            if value.shape:
                raise ValueError(f"Expected loss() to be a scalar; got shape {value.shape}.")
            if not jnp.issubdtype(value.dtype, jnp.floating):
                raise TypeError(f"Expected loss() to be floating; got dtype {value.dtype}.")
            value = widen(value)
            return self.scale_loss(value), value

        check_floating(variables)
        pure, values = functional(scaled_and_true_loss, variables), read(variables)
        try:
            scaled, linear, value = jax.linearize(lambda v: pure(v)[0], values, has_aux=True)
        except jax.errors.UnexpectedTracerError as error:
            error.add_note(
                "Expected a loss without jax.jit, jax.checkpoint or lax.scan over a named function "
                "that reads variables itself; pass it `variable.value()` as an argument."
            )
            raise
        # A gradient is None where nothing flows back to: known from the program, not from zeros.
        depends = used_arguments(jax.make_jaxpr(linear)(values))
        (grads,) = jax.linear_transpose(linear, values)(jnp.ones_like(scaled))
        if not is_inside():  # a gradient may be the very array of a weight, which a step reuses
            memory = set(itertools.chain(*map(_buffers, (*grads, value))))
            for variable, array in zip(variables, values, strict=True):
                variable._shared |= not memory.isdisjoint(_buffers(array))
        grads = [g if used else None for g, used in zip(grads, depends, strict=True)]
        return value, list(zip(grads, variables, strict=True))

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Variable]]) -> Any:
        """Takes a step on (gradient, variable) pairs, and returns `iterations`."""
        pairs = [tuple(pair) for pair in grads_and_vars]
        self.apply([gradient for gradient, _ in pairs], [variable for _, variable in pairs])
        return self.iterations

    def apply(
        self,
        grads: Sequence[Any],
        trainable_variables: VarList | None = None,
        *,
        loss: Any = None,
        only_if: Any = None,
    ) -> None:
        """Takes a step: one compiled program, in which nothing is read back by Python.

        It reuses the memory of the weights; an array that `value()` has handed out is copied first.

        Args:
            grads: gradients of `scale_loss(loss)`, each of its variable's shape, of any floating
                dtype and placement; None leaves a variable, its slots and its decay alone. An
                empty list changes nothing.
            trainable_variables: their variables, all or some of those that the optimizer was built
                with, in any order; by default all. The first call builds the optimizer.
            loss: the true loss, a scalar, for loss-scale rules and optax transformations that
                need it.
            only_if: a bool scalar: where it does not hold the step is skipped, though its gradients
                may be finite; the scale moves as these gradients alone say, but leaves a finite
                one out of a window that counts bad ones. So several optimizers share a verdict::

                    fine = opt_a.check_finite(grads_a) & opt_b.check_finite(grads_b)
                    opt_a.apply(grads_a, only_if=fine)
                    opt_b.apply(grads_b, only_if=fine)

        Raises:
            TypeError: a gradient of an integer, boolean or complex dtype; `only_if` is no bool.
            ValueError: a wrong number or shape of gradients, an unknown variable, all gradients
                None, not built and no variables given.
            FloatingPointError: with `on_bad_microbatch="fail"`, after one.
        """
        grads = list(grads)
        only_if = None if only_if is None else checks.condition("only_if", only_if)
        if not grads:
            return
        self._raise_if_failed()
        if callable(trainable_variables):
            trainable_variables = trainable_variables()
        if is_inside():
            self._check_that_all_are_bound(trainable_variables)
        signature = _signature(grads, trainable_variables)
        if signature is None or signature != self._last_kind:
            given, grads = grads, self._checked(grads, trainable_variables)
            ordered = signature is not None and signature[0] in (None, list(self._index))
            as_given = ordered and all(map(operator.is_, given, grads))
            self._last_kind = signature if as_given else None
        loss = self._loss if loss is None else loss
        loss = jnp.asarray(loss) if self._wants_loss() and loss is not None else None
        if any([variable._traces for variable in self.variables]):
            self._last_kind = None  # nothing was asked about where arrays lie
            self._apply(grads, None, loss, only_if)  # already inside of a traced function
            return
        state = (self.variables, list(self._index))
        if not self.jit_compile:
            run(self._apply, state, grads, self._rate_now(), loss, only_if)
        else:
            self._program = self._program or jit(_weakly(self._apply), state, donate=True)
            self._program(grads, self._rate_now(), loss, only_if)

    def _check_that_all_are_bound(self, trainable_variables: Any) -> None:
        """An error if the weights belong to a transformation of JAX and the state does not."""
        weights = list(self._index) if trainable_variables is None else trainable_variables
        bound = [v.name for v in weights if isinstance(v, Variable) and v._is_lent]
        if bound and not any(variable._is_lent for variable in self.variables):
            raise ValueError(
                f"Expected {self.variables[0].name!r} to be in the state of the function that is "
                f"traced or differentiated, as {bound} are. In `gainstage.jit`: add "
                f"`optimizer.variables` to `state`. In a loss: call `apply` after `minimize`."
            )

    def _checked(self, grads: list[Any], trainable_variables: Any) -> list[Any]:
        """The gradients as a step takes them: an array or None for each variable, in order."""
        if trainable_variables is None:
            variables = self._built_variables("apply without trainable_variables")
        else:
            variables = variables_in(trainable_variables)
        check_count("gradients", grads, variables)
        grads = [_placed(g, v) for g, v in zip(grads, variables, strict=True)]
        _check_gradients(grads, variables)
        if not self.built:
            self.build(variables)
        if not self.built:
            raise ValueError(
                f"Expected {type(self).__name__}.build to call super().build(var_list)."
            )
        grads = self._in_order(grads, variables)
        for variable in [v for v in (*self.variables, *self._index) if v._is_planned]:
            variable.value()  # an error
        return grads

    def stateless_apply(
        self, optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Any
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """The step as a pure function of lists of arrays, which changes no variable.

        Args:
            optimizer_variables: values for `variables`, in that order.
            grads: as for `apply`, one per trainable variable.
            trainable_variables: values for the variables that the optimizer was built with.

        Returns:
            The new values `(trainable_variables, optimizer_variables)`.

        Raises:
            TypeError: as `apply`.
            ValueError: as `apply`, a list of the wrong length, or a value of the wrong shape.

        To donate old values under `jax.jit`, give the arguments in the order of the results:
        `jax.jit(lambda w, s, g: opt.stateless_apply(s, g, w), donate_argnums=(0, 1))`. The scale of
        the loss is part of `variables`, so it too is read by a pure function:

        Examples:
            >>> import jax, gainstage as gs
            >>> w = gs.Variable(1.0)
            >>> opt = gs.LossScaleOptimizer(gs.SGD(0.25))
            >>> opt.build([w])
            >>> scaled = gs.functional(lambda loss: opt.scale_loss(loss), opt.variables)
            >>> @jax.jit
            ... def step(weights, state):
            ...     grads = jax.grad(lambda w: scaled(state, w[0] ** 2)[0])(weights)
            ...     return opt.stateless_apply(state, grads, weights)
            >>> weights, state = step([w.value()], [v.value() for v in opt.variables])
            >>> print(weights[0])
            0.5
        """
        trainable, variables = self._built_variables("stateless_apply"), self.variables
        check_count("optimizer_variables", optimizer_variables, variables)
        check_count("gradients", grads, trainable)
        check_count("trainable_variables", trainable_variables, trainable)
        state = (trainable, variables)
        values = (list(trainable_variables), list(optimizer_variables))
        grads = [_array(gradient) for gradient in grads]
        _check_gradients(grads, trainable)
        return functional(self._apply, state)(values, grads, self._rate_now())[1]

    def _built_variables(self, caller: str) -> list[Variable]:
        if not self.built:
            raise ValueError(f"Expected {self.name!r} to be built before {caller}; call `build`.")
        return list(self._index)

    def _in_order(self, grads: list[Any], variables: list[Variable]) -> list[Any]:
        """One gradient or None for each variable that the optimizer was built with."""
        ordered: list[Any] = [None] * len(self._index)
        for gradient, variable in zip(grads, variables, strict=True):
            ordered[self._get_variable_index(variable)] = gradient
        missing = [v.name for g, v in zip(grads, variables, strict=True) if g is None]
        if missing:
            warnings.warn(f"No gradient for {missing}: left as they are.", stacklevel=4)
        return ordered

    def _get_variable_index(self, variable: Variable) -> int:
        """The place of a variable among those that the optimizer was built with."""
        if variable not in self._index:
            names = [v.name for v in self._index]
            name = getattr(variable, "name", variable)
            again = " It is another variable of that name." if name in names else ""
            raise ValueError(
                f"Expected variables that {self.name!r} was built with, {names}; got {name!r}."
                f"{again} An optimizer trains the variables that it was built with: assign to "
                f"them, or create a new optimizer for new ones."
            )
        return self._index[variable]


def _signature(grads: list[Any], variables: Any) -> Any:
    """All that is checked about a step's arguments, at little cost; None if they are not arrays."""
    classes = set(map(type, grads))
    if any(issubclass(cls, Tracer) or not issubclass(cls, jax.Array) for cls in classes):
        return None
    if variables is not None and not isinstance(variables, (list, tuple)):
        return None
    order = None if variables is None else list(variables)
    # Lists of what mostly is the same object are compared quickly; a set of it would be hashed.
    return order, [gradient.aval for gradient in grads], [gradient.sharding for gradient in grads]


VERBS = ("minimize", "compute_gradients", "apply_gradients", "apply", "stateless_apply")


def check_verbs(optimizer: Any, caller: str, verbs: Sequence[str] = VERBS) -> None:
    """A TypeError if the user's class overrides one of `verbs`, which `caller` does not call."""
    for verb in verbs:
        owner = next(cls for cls in type(optimizer).__mro__ if verb in vars(cls))
        if owner.__module__.partition(".")[0] != "gainstage":
            raise TypeError(
                f"{owner.__name__} overrides {verb}, which {caller} does not call. Override "
                f"update_step, or change the gradients before they are given to the optimizer."
            )


def check_floating(variables: Sequence[Variable]) -> None:
    """A TypeError that names the first variable that cannot be trained."""
    for variable in variables:
        if not jnp.issubdtype(variable.dtype, jnp.floating):
            raise TypeError(
                f"Expected variables of a floating dtype; got {variable.name!r} of dtype "
                f"{variable.dtype}."
            )


def _check_gradients(grads: Sequence[Any], variables: Sequence[Variable]) -> None:
    if all(gradient is None for gradient in grads):
        raise ValueError(
            f"Expected a gradient for at least one variable; got None for all of "
            f"{[variable.name for variable in variables]}."
        )
    for gradient, variable in zip(grads, variables, strict=True):
        if gradient is None:
            continue
        if gradient.shape != variable.shape:
            raise ValueError(
                f"Expected a gradient of shape {variable.shape} for variable {variable.name!r}; "
                f"got shape {gradient.shape}."
            )
        if not jnp.issubdtype(gradient.dtype, jnp.floating):
            raise TypeError(
                f"Expected a gradient of a floating dtype for variable {variable.name!r}; "
                f"got dtype {gradient.dtype}."
            )


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose object it does not keep: one that keeps it in turn would only be freed, with
    all of its arrays, when Python collects cycles."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        return reference()(*args)  # type: ignore[misc]

    return call


def _buffers(array: jax.Array) -> list[int]:
    """Where the parts of an array that are in this process lie in memory."""
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def _array(gradient: Any) -> Any:
    if isinstance(gradient, Variable):
        gradient = gradient.value()
    if gradient is None or (isinstance(gradient, jax.Array) and not gradient.weak_type):
        return gradient
    return strong(gradient)


def _placed(gradient: Any, variable: Variable) -> Any:
    """The gradient as an array on its variable's devices."""
    gradient = _array(gradient)
    if gradient is None or isinstance(gradient, Tracer) or variable._is_lent:
        return gradient
    if variable._is_planned or gradient.sharding.device_set == variable.sharding.device_set:
        return gradient
    return jax.device_put(gradient, variable.sharding)
