"""The optimizer: an update rule for one variable, and the fixed order of a step around it."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from gainstage import checks, gradients
from gainstage.bridge import keep_if, lent, read, variables_in
from gainstage.configurable import deserialize
from gainstage.gradients import Gradients
from gainstage.groups import Group, groups_of
from gainstage.learning_rate import LearningRate
from gainstage.minimizer import Minimizer, check_floating
from gainstage.options import BEFORE_BUILD, CLIPS, OPTIONS, check_option
from gainstage.schedules import LearningRateSchedule
from gainstage.variable import Variable, is_tracing


class Optimizer(Minimizer):
    """The base of every optimizer; subclass it and say the rule for one variable.

    A subclass writes `update_step`, and `build` if it needs state. The code is imperative, and
    every step runs it inside one compiled program. The order of a step is always: finite check
    (with a loss scale), unscale, accumulate, clip, decoupled weight decay, `update_step`, moving
    average, constraints, `iterations` + 1. Arithmetic is in float32 (float64 for float64
    variables), with one cast to the variable's dtype at the end.

    Args:
        learning_rate: a number; a schedule or another callable of the number of steps taken before
            (those that only accumulate count too; traced into the program); or a callable of no
            argument (called by Python once per eager step).
        weight_decay: decoupled decay, >= 0: `w -= w * weight_decay * learning_rate`.
        clipnorm: the largest norm of each variable's gradient, > 0.
        clipvalue: the largest absolute value of a gradient's element, > 0.
        global_clipnorm: the largest norm of all gradients together, > 0. At most one of the three.
        use_ema: whether to keep an exponential moving average of the variables, moved, as in
            Keras, at every step, those included that only accumulate.
        ema_momentum: its momentum, in [0, 1].
        ema_overwrite_frequency: after so many steps the variables become their average; None to
            leave that to `finalize_variable_values`. Counts updates.
        loss_scale_factor: a fixed scale: `scale_loss` multiplies by it, a step divides by it, and
            is skipped if a gradient is not finite.
        gradient_accumulation_steps: update once per so many steps, with the average gradient;
            >= 2, None or 0 for every step.
        name: the prefix of the names of the optimizer's variables.
        jit_compile: whether `apply` runs as one compiled program.
        mesh: the `jax.sharding.Mesh` on which scalars are replicated, by default the variables'.
        group_small: whether the slots of variables of at most 4096 elements share buffers, which
            makes steps on hundreds of them faster. Only for rules that are `elementwise`, and
            variables on one device. `groups` is the table of what lies where.

    A rule that treats every element by itself, with slots of the variable's shape and nothing else,
    may say `elementwise = True` beside its `update_step`: then it can be called for several
    variables at once.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an argument out of range; two clip options.

    Example:
        >>> import gainstage as gs
        >>> import jax.numpy as jnp
        >>> class SignSGD(gs.Optimizer):
        ...     def update_step(self, gradient, variable, learning_rate):
        ...         self.assign_sub(variable, learning_rate * jnp.sign(gradient))
        >>> var = gs.Variable(1.0)
        >>> loss = SignSGD(0.25).minimize(lambda: var ** 2, [var])
        >>> float(var)
        0.75

    Source: `keras.optimizers.Optimizer` (Keras 3).
    """

    def __init__(
        self,
        learning_rate: Any,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        loss_scale_factor: float | None = None,
        gradient_accumulation_steps: int | None = None,
        name: str | None = None,
        *,
        jit_compile: bool = True,
        mesh: Mesh | None = None,
        group_small: bool = False,
    ):
        self._start(name, jit_compile)
        if mesh is not None and not isinstance(mesh, Mesh):
            raise ValueError(f"Expected a jax.sharding.Mesh for mesh; got {mesh!r}.")
        self.mesh = mesh
        self.group_small = checks.flag("group_small", group_small)
        options = {
            "weight_decay": weight_decay,
            "clipnorm": clipnorm,
            "clipvalue": clipvalue,
            "global_clipnorm": global_clipnorm,
            "use_ema": use_ema,
            "ema_momentum": ema_momentum,
            "ema_overwrite_frequency": ema_overwrite_frequency,
            "loss_scale_factor": loss_scale_factor,
            "gradient_accumulation_steps": gradient_accumulation_steps,
        }
        for option, value in options.items():
            vars(self)[option] = check_option(option, value, vars(self))
        self._iterations = Variable(0, jnp.int32, f"{self.name}/iteration", trainable=False)
        self._rate = LearningRate(learning_rate, self.name)
        self._averages: list[Variable] = []
        self._accumulators: list[Variable] = []
        self._places: dict[Variable, int] = {}
        self._undecayed: set[Variable] = set()
        self._undecayed_names: re.Pattern[str] | None = None

    def _start(self, name: str | None, jit_compile: bool) -> None:
        """Sets what a wrapper has too; its other state is that of its inner optimizer."""
        if name is not None and (not isinstance(name, str) or not name):
            raise ValueError(f"Expected a non-empty string for name; got {name!r}.")
        cls = type(self).__name__
        snake = cls if cls.isupper() else re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls).lower()
        self.name = name or snake
        self.jit_compile = checks.flag("jit_compile", jit_compile)
        self._wrapper: Optimizer | None = None
        self._slots: list[Variable] = []
        self._slot_of: dict[tuple[Variable, str], Variable] = {}
        self._group_of: dict[Variable, Group] = {}
        self._program = None

    # ── state ────────────────────────────────────────────────────────────────────────────────

    @property
    def groups(self) -> list[list[list[Any]]]:
        return [group.table for group in dict.fromkeys(self._group_of.values())]

    @property
    def variables(self) -> list[Variable]:
        """All state, in the order of `stateless_apply`: iterations, learning rate (if a number),
        moving averages, accumulators, then what `build` added."""
        rate = [] if self._rate.variable is None else [self._rate.variable]
        return [self._iterations, *rate, *self._averages, *self._accumulators, *self._slots]

    @property
    def built(self) -> bool:
        """Whether the trainable variables are known."""
        return bool(self._index)

    @property
    def iterations(self) -> Any:
        """Updates so far: a variable, or, with gradient accumulation, an int32 scalar."""
        steps = self._option("gradient_accumulation_steps")
        return self._iterations.value() // steps if steps else self._iterations

    @property
    def learning_rate(self) -> Any:
        """The current rate: a variable, or, with a schedule or callable, its value now. Assign a
        number to change a number; no step is compiled again."""
        rate = self._rate
        return rate.at(self._iterations.value()) if rate.variable is None else rate.variable

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        rate = LearningRate(learning_rate, self.name)
        if rate.variable is None:
            self._rate = rate
            self._forget_program()
        elif self._rate.variable is not None:
            self._rate.variable.assign(rate.variable)
        else:
            raise TypeError(
                f"Expected a schedule or callable for learning_rate, as the optimizer was created "
                f"with one; got {learning_rate!r}."
            )

    @property
    def _index(self) -> dict[Variable, int]:
        return self._places

    def _rate_now(self) -> jax.Array | None:
        return self._rate.now()

    def _option(self, name: str) -> Any:
        """The option in force: the wrapper's, where the wrapper was given it."""
        given = vars(self._wrapper) if self._wrapper else {}
        if name in CLIPS and not CLIPS.isdisjoint(given):
            return given.get(name)  # one clip option is in force, of whichever kind
        return given.get(name, getattr(self, name))

    def _clips(self) -> dict[str, float]:
        """The clip option in force, if any, with its limit."""
        limits = {name: self._option(name) for name in CLIPS}
        return {name: limit for name, limit in limits.items() if limit is not None}

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OPTIONS:
            others = {option: self._option(option) for option in OPTIONS - {name}}
            value = check_option(name, value, others)
            if name in BEFORE_BUILD and self.built and value != self._option(name):
                raise ValueError(f"Expected {name} to be set before the optimizer is built.")
            (self._given.discard if value is None else self._given.add)(name)
        super().__setattr__(name, value)
        if not name.startswith("_") and name != "learning_rate":
            self._forget_program()  # Python values are constants of the compiled step

    def _forget_program(self) -> None:
        if "_iterations" in vars(self) and self._iterations._is_lent:
            return  # an assignment by the step itself, while it is being compiled
        vars(self)["_program"] = None
        if wrapper := vars(self).get("_wrapper"):
            wrapper._forget_program()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_program": None}

    # ── for subclasses ───────────────────────────────────────────────────────────────────────

    def build(self, var_list: Sequence[Variable]) -> None:
        """Creates the state for these variables. Override it to add your own, after `super()`.

        Args:
            var_list: the trainable variables; a second call must name the same ones.

        Raises:
            TypeError: an element that is no variable, or not of a floating dtype.
            ValueError: the same variable twice; other variables than at the first call; called
                inside of a traced function.
        """
        variables = variables_in(var_list)
        if self.built and variables != list(self._index):
            raise ValueError(
                f"Expected the variables that {self.name!r} was built with, "
                f"{[v.name for v in self._index]}; got {[v.name for v in variables]}."
            )
        if self.built:
            return
        if not variables:
            raise ValueError("Expected at least one variable in var_list; got none.")
        if is_tracing():
            raise ValueError(
                f"Expected {self.name!r} to be built outside of the traced function; call "
                f"`build(variables)` before it."
            )
        check_floating(variables)
        self._replicate(self.variables, variables)
        if self._option("use_ema"):
            self._averages = [self._slot_like(v, "average") for v in variables]
        if self._option("gradient_accumulation_steps"):
            self._accumulators = [self._slot_like(v, "gradient_accumulator") for v in variables]
        self._places = {variable: place for place, variable in enumerate(variables)}
        if self.group_small and self._is_elementwise():
            for group in groups_of(variables, gradients.wide):
                self._group_of |= dict.fromkeys(group.members, group)
        self._forget_program()

    def update_step(
        self, gradient: jax.Array, variable: Variable, learning_rate: jax.Array
    ) -> None:
        """Assigns the new value of one variable, and of its slots. Write this in a subclass.

        Args:
            gradient: the true gradient, float32 or wider, clipped.
            variable: the variable, which holds float32 or wider during the step. Operators work on
                it and on slots; functions of `jax.numpy` take their `value()`.
            learning_rate: a float32 scalar.
        """
        raise NotImplementedError(f"{type(self).__name__} must define update_step.")

    def exclude_from_weight_decay(
        self,
        var_list: Iterable[Variable] | None = None,
        var_names: Iterable[str] | None = None,
    ) -> None:
        """Names the variables that do not decay; a second call replaces the first.

        Args:
            var_list: variables, by identity.
            var_names: substrings or regular expressions, searched in variables' names.

        Raises:
            TypeError: a name among the variables, or one string for the names.
            ValueError: called after `build`; a malformed expression.
        """
        if self.built:
            raise ValueError("Expected exclude_from_weight_decay to be called before build.")
        if isinstance(var_names, str):
            raise TypeError(f"Expected a list of strings for var_names; got {var_names!r}.")
        names, variables = list(var_names or ()), variables_in(var_list or ())
        try:
            self._undecayed_names = re.compile("|".join(names)) if names else None
        except re.error as error:
            raise ValueError(f"Expected regular expressions in var_names; got {names}.") from error
        self._undecayed = set(variables)

    def _decays(self, variable: Variable) -> bool:
        names = self._undecayed_names
        return variable not in self._undecayed and not (names and names.search(variable.name))

    # ── the order of a step ──────────────────────────────────────────────────────────────────

    def scale_loss(self, loss: Any) -> Any:
        """The loss times the loss scale, in float32 or wider: a float16 one would overflow."""
        scale = self._loss_scale()
        return loss if scale is None else gradients.widen(loss) * scale

    def finalize_variable_values(self, var_list: Iterable[Variable]) -> None:
        """Gives the variables their moving averages, at the end of training with `use_ema`.

        Raises:
            ValueError: a variable that the optimizer was not built with.
        """
        if not self._option("use_ema"):
            return
        places = [(variable, self._get_variable_index(variable)) for variable in var_list]
        started = self._iterations.value() > 0  # before that there is no average
        for variable, place in places:
            average = self._averages[place].value()
            variable.assign(jnp.where(started, average, variable.value()))

    def _loss_scale(self) -> jax.Array | None:
        factor = self._option("loss_scale_factor")
        return None if factor is None else jnp.asarray(factor, jnp.float32)

    def _apply(self, grads: list[Any], rate: jax.Array | None) -> None:
        scale = self._loss_scale()
        if scale is None:
            norms = [] if self._accumulators else gradients.norms(grads, self._clips())
            self._update(gradients.divided(grads), norms, rate)
        else:
            self._update_if_finite(grads, scale, rate)

    def _update_if_finite(
        self, grads: list[Any], scale: jax.Array, rate: jax.Array | None
    ) -> jax.Array:
        """A step on scaled gradients: all of it, or nothing if one is not finite."""
        limits = {} if self._accumulators else self._clips()
        seen = gradients.inspect(grads, scale, limits, onto=read(self._accumulators))

        def update() -> None:
            self._update(gradients.divided(grads, scale), seen.norms, rate)

        keep_if(seen.finite, update, (list(self._index), self.variables))
        return seen.finite

    def _update(self, grads: Gradients, norms: Sequence[jax.Array], rate: jax.Array | None) -> None:
        """Everything after the finite check, on variables held in float32 or wider."""
        variables = list(self._index)
        rate = self._rate.at(self._iterations.value()) if rate is None else rate
        with lent(variables, [v.value().astype(gradients.wide(v.dtype)) for v in variables]):
            if self._accumulators:
                self._accumulate(grads, rate)
            else:
                self._update_weights(grads, norms, rate)
            if self._averages:
                self._average()
            for variable in variables:
                if variable.constraint is not None:
                    variable.assign(variable.constraint(variable.value()))
            new = read(variables)
        for variable, value in zip(variables, new, strict=True):
            variable.assign(value)
        self._iterations.assign_add(1)

    def _accumulate(self, grads: Gradients, rate: jax.Array) -> None:
        """Adds to the accumulators; every so many steps, updates with their average."""
        steps = self._option("gradient_accumulation_steps")
        present = [(g, a) for g, a in zip(grads, self._accumulators, strict=True) if g is not None]
        for gradient, accumulator in present:
            accumulator.assign(accumulator + gradient.value())

        def update() -> None:
            sums = [a.value() for a in self._accumulators]
            for _, accumulator in present:
                accumulator.assign(jnp.zeros_like(accumulator.value()))
            pairs = zip(grads, sums, strict=True)
            means = [None if g is None else s / steps for g, s in pairs]
            norms = gradients.norms(means, self._clips())
            self._update_weights(gradients.divided(means), norms, rate)

        due = (self._iterations + 1) % steps == 0
        keep_if(due, update, (list(self._index), self.variables))

    def _update_weights(
        self, grads: Gradients, norms: Sequence[jax.Array], rate: jax.Array
    ) -> None:
        """Clips and decays, then updates every variable that has a gradient."""
        decay, grads = self._option("weight_decay"), gradients.clip(grads, self._clips(), norms)
        for variable, gradient in zip(self._index, grads, strict=True):
            if decay is not None and gradient is not None and self._decays(variable):
                variable.assign(variable - variable * decay * rate)
        self._update_all(grads, rate)

    def _update_all(self, grads: Gradients, rate: jax.Array) -> None:
        gradient_of = dict(zip(self._index, grads, strict=True))
        for group in dict.fromkeys(self._group_of.values()):
            members = [gradient_of.pop(variable) for variable in group.members]
            group.update(members, lambda g, v: self._update_one(g, v, rate))
        for variable, gradient in gradient_of.items():
            if gradient is not None:
                self._update_one(gradient.value(), variable, rate)

    def _update_one(self, gradient: jax.Array, variable: Variable, rate: jax.Array) -> None:
        if self.update_step(gradient, variable, rate) is not None:
            raise TypeError(
                f"Expected {type(self).__name__}.update_step to assign the new value and "
                f"return None; got a result."
            )

    def _is_elementwise(self) -> bool:
        """Whether the class that wrote the rule says so: one that overrides it has to repeat it."""
        wrote = next(vars(cls) for cls in type(self).__mro__ if "update_step" in vars(cls))
        return wrote.get("elementwise", False)

    def _average(self) -> None:
        """Moves the averages towards the variables, and, when due, the variables onto them."""
        frequency = self._option("ema_overwrite_frequency")
        steps = self._option("gradient_accumulation_steps")
        updates = self._iterations.value() // (steps or 1)
        momentum = jnp.where(updates == 0, 0.0, self._option("ema_momentum"))
        for variable, average in zip(self._index, self._averages, strict=True):
            average.assign(momentum * average + (1 - momentum) * variable)
            if frequency:
                due = (updates + 1) % frequency == 0
                variable.assign(jnp.where(due, average.value(), variable.value()))

    # ── configuration ────────────────────────────────────────────────────────────────────────

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments, JSON-serializable but for callables; the learning rate
        is the current one. How a step runs (`jit_compile`, `mesh`) is left out."""
        config = {**super().get_config(), "learning_rate": self._rate.get_config()}
        return (
            config if self.group_small else {k: v for k, v in config.items() if k != "group_small"}
        )

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, type] | None = None
    ) -> Self:
        """The optimizer that `get_config` (or Keras) describes; `config` is not changed.

        Args:
            config: the constructor's arguments.
            custom_objects: schedules of your own by class name, if not found by themselves.
        """
        rate = config.get("learning_rate")
        if isinstance(rate, Mapping):
            schedule = deserialize(rate, LearningRateSchedule, custom_objects)
            config = {**config, "learning_rate": schedule}
        return super().from_config(config, custom_objects)
