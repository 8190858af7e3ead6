"""The optimizer: its options and state, to which a subclass adds the rule for one variable."""

import re
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from gainstage._core import checks, gradients
from gainstage._core.bridge import variables_in
from gainstage._core.configurable import deserialize
from gainstage._core.groups import Group, groups_of
from gainstage._core.learning_rate import LearningRate
from gainstage._core.minimizer import check_floating
from gainstage._core.options import AT_CONSTRUCTION, BEFORE_BUILD, CLIPS, OPTIONS, check_option
from gainstage._core.sharding import check_axes, divided_over
from gainstage._core.stateful import shown
from gainstage._core.step import Step
from gainstage._core.variable import Computed, Variable, is_tracing
from gainstage.schedules import LearningRateSchedule


class Optimizer(Step):
    """The base of every optimizer; subclass it and say the rule for one variable.

    A subclass writes `update_step`, and `build` if it needs state. The code is imperative, and
    every step runs it inside one compiled program. The order of a step is always: finite check
    (with a loss scale), unscale, accumulate, clip, decoupled weight decay, `update_step`, moving
    average, constraints, `iterations` + 1. Arithmetic is in float32 (float64 for float64
    variables), with one cast to the variable's dtype at the end.

    Args:
        learning_rate: a number; a schedule or another callable of the number of steps taken before
            (those that only accumulate count too; traced into the program); or a callable of no
            argument (called by Python once per eager step; an error in a traced function).
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
        on_bad_microbatch: what becomes of the window of `gradient_accumulation_steps` if a gradient
            is not finite: "extend", it does not count, and the window ends after so many finite
            ones; "renormalise", it counts, and the average is that of the finite ones;
            "drop_window", there is no update; "fail", nothing changes from then on, and the next
            `apply` that is not compiled into something else is a `FloatingPointError`, for which
            it waits for the last step. With the last three a loss scale moves only between windows.
        name: the prefix of the names of the optimizer's variables.
        jit_compile: whether `apply` runs as one compiled program.
        mesh: the `jax.sharding.Mesh` on which scalars are replicated, by default the variables'.
        group_small: whether the slots of variables of at most 4096 elements share buffers, up to
            32 each, which makes steps on hundreds of them faster. Only for rules that are
            `elementwise`, and variables on one device. `groups` is the table of what lies where.
        master_weights: whether half-precision variables have a float32 copy in the state, which
            takes the updates; the variable is what it rounds to. A variable that was assigned
            from outside starts a new copy.
        shard_state_over: the name, or names, of a mesh axis over which slots, averages,
            accumulators and master weights are divided (ZeRO, stage 1); the steps are the same.

    A rule that treats every element by itself, with slots of the variable's shape and nothing else,
    may say `elementwise = True` beside its `update_step`: then it can be called for several
    variables at once.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an argument out of range; two clip options.

    Examples:
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
        master_weights: bool = False,
        shard_state_over: str | Sequence[str] | None = None,
        on_bad_microbatch: str = "extend",
    ):
        given = locals()
        self._set_common(name, jit_compile, mesh)
        self.group_small = checks.flag("group_small", group_small)
        self.master_weights = checks.flag("master_weights", master_weights)
        over = (shard_state_over,) if isinstance(shard_state_over, str) else shard_state_over or ()
        self.shard_state_over = tuple(over)
        for option in OPTIONS:
            vars(self)[option] = check_option(option, given[option], vars(self))
        self._iterations = Variable(0, jnp.int32, f"{self.name}/iteration", trainable=False)
        self._rate = LearningRate(learning_rate, self.name)
        self._averages: list[Variable] = []
        self._accumulators: list[Variable] = []
        self._window_tally: Variable | None = None
        self._masters: dict[Variable, Variable] = {}
        self._places: dict[Variable, int] = {}
        self._undecayed: set[Variable] = set()
        self._undecayed_names: re.Pattern[str] | None = None

    def _set_common(self, name: str | None, jit_compile: bool, mesh: Mesh | None) -> None:
        """Sets what a wrapper has too; its other state is that of its inner optimizer."""
        if name is not None and (not isinstance(name, str) or not name):
            raise ValueError(f"Expected a non-empty string for name; got {name!r}.")
        cls = type(self).__name__
        snake = cls if cls.isupper() else re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls).lower()
        self.name = name or snake
        self.jit_compile = checks.flag("jit_compile", jit_compile)
        if mesh is not None and not isinstance(mesh, Mesh):
            raise ValueError(f"Expected a jax.sharding.Mesh for mesh; got {mesh!r}.")
        self.mesh = mesh
        self._wrapper_reference: weakref.ref[Optimizer] | None = None  # it keeps this one
        self._slots: list[Variable] = []
        self._slot_of: dict[tuple[Variable, str, int], Variable] = {}
        self._asked: Counter[Any] = Counter()
        self._added: dict[Any, Variable] = {}
        self._group_of: dict[Variable, Group] = {}
        self._program = self._last_kind = self._loss = None

    # ── state ────────────────────────────────────────────────────────────────────────────────

    @property
    def groups(self) -> list[list[list[Any]]]:
        return [group.table for group in dict.fromkeys(self._group_of.values())]

    @property
    def variables(self) -> list[Variable]:
        """All state, in the order of `stateless_apply`: iterations, learning rate (if a number),
        moving averages, accumulators, master weights, a tally of the window (if
        `on_bad_microbatch` wants one), then what `build` added."""
        rate = [] if self._rate.variable is None else [self._rate.variable]
        copies = [*self._averages, *self._accumulators, *self._masters.values()]
        tally = [] if self._tally is None else [self._tally]
        return [self._iterations, *rate, *copies, *tally, *self._slots]

    @property
    def built(self) -> bool:
        """Whether the trainable variables are known."""
        return bool(self._index)

    @property
    def iterations(self) -> Variable:
        """Updates so far, an int32 variable; with gradient accumulation one that is computed from
        the number of microbatches, and cannot be assigned."""
        count, steps = self._iterations, self._option("gradient_accumulation_steps")
        if not steps:
            return count
        set_by = "load a state that was saved, or start with a new optimizer"
        return Computed(count.name, lambda: count.value() // steps, set_by)

    @property
    def learning_rate(self) -> Any:
        """The current rate, a float32 variable; with a schedule or another callable one that is
        computed from it, and cannot be assigned. Assign a number to change a number; no step is
        compiled again."""
        rate, count = self._rate, self._iterations
        if rate.variable is not None:
            return rate.variable
        set_by = "assign another schedule or callable to the optimizer's `learning_rate`"
        name = f"{self.name}/learning_rate"
        return Computed(name, lambda: rate.at(count.value()), set_by)

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

    @property
    def _tally(self) -> Variable | None:
        return self._window_tally

    @property
    def _wrapper(self) -> "Optimizer | None":
        return self._wrapper_reference and self._wrapper_reference()

    def _rate_now(self) -> jax.Array | None:
        return self._rate.now()

    def _option(self, name: str) -> Any:
        """The option in force: the wrapper's, where the wrapper was given it."""
        given = vars(self._wrapper) if self._wrapper else {}
        if name in CLIPS and any(given.get(clip) is not None for clip in CLIPS):
            return given.get(name)  # one clip option is in force, of whichever kind
        return given.get(name, getattr(self, name))

    def _state_layout(self, reference: Variable) -> Any:
        layout = reference._layout
        if not self.shard_state_over or not isinstance(layout, NamedSharding):
            return layout
        return divided_over(layout, reference.shape, self.shard_state_over)

    def _state_of(self, variable: Variable) -> list[Variable]:
        """The state that belongs to one variable alone."""
        place = self._get_variable_index(variable)
        copies = [kind[place] for kind in (self._averages, self._accumulators) if kind]
        masters = [self._masters[variable]] if variable in self._masters else []
        slots = [slot for (owner, *_), slot in self._slot_of.items() if owner is variable]
        return [*copies, *masters, *(slots if variable not in self._group_of else [])]

    def _first_values(self, values: Mapping[Variable, jax.Array]) -> dict[Variable, jax.Array]:
        """The first values of all state, given those of the trainable variables."""
        own = {v: v._first_value() if v._first_value else v._value for v in self.variables}
        return own | {m: values[v].astype(m.dtype) for v, m in self._masters.items()}

    def _clips(self) -> dict[str, float]:
        """The clip option in force, if any, with its limit."""
        limits = {name: self._option(name) for name in CLIPS}
        return {name: checks.in_float32(n) for name, n in limits.items() if n is not None}

    def __setattr__(self, name: str, value: Any) -> None:
        if name in AT_CONSTRUCTION and name in vars(self):
            raise AttributeError(f"Expected {name} to be given to the constructor alone.")
        if name in OPTIONS:
            others = {option: self._option(option) for option in OPTIONS - {name}}
            value = check_option(name, value, others)
            if self._wrapper and value is not None and name in vars(self._wrapper):
                raise ValueError(
                    f"Expected {name} to be set on {self._wrapper.name!r}, where it is "
                    f"{getattr(self._wrapper, name)!r}; got {value!r} on {self.name!r}."
                )
            if name in BEFORE_BUILD and self.built and value != self._option(name):
                raise ValueError(f"Expected {name} to be set before the optimizer is built.")
            counts = vars(self).get("_window_tally") is not None and self._wrapper is None
            if counts and name == "loss_scale_factor" and value is None:
                raise ValueError(
                    f"Expected a loss_scale_factor for on_bad_microbatch="
                    f"{self._option('on_bad_microbatch')!r}; got None."
                )
            (self._given.discard if value is None else self._given.add)(name)
        super().__setattr__(name, value)
        if not name.startswith("_") and name != "learning_rate":
            self._forget_program()  # Python values are constants of the compiled step

    def _forget_program(self) -> None:
        if "_iterations" in vars(self) and self._iterations._is_lent:
            return  # an assignment by the step itself, while it is being compiled
        vars(self)["_program"] = None
        if vars(self).get("_wrapper_reference") and self._wrapper:
            self._wrapper._forget_program()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_program": None, "_last_kind": None, "_wrapper_reference": None}

    def __repr__(self) -> str:
        rate = self._rate.source if self._rate.variable is None else shown(self._rate.variable)
        count = len(self._index)
        built = f"built for {count} variable{'s' * (count > 1)}" if count else "not built"
        return f"<{type(self).__name__} {self.name!r}: learning rate {rate}, {built}>"

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
        if isinstance(var_list, Variable) or list(var_list) != variables:
            raise TypeError(f"Expected a list of variables for var_list; got {var_list!r}.")
        self._asked.clear()
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
        check_axes(self.shard_state_over, [variable.sharding for variable in variables])
        self._window_tally = self._tally_of_window()
        self._replicate(self.variables, variables)
        if self._option("use_ema"):
            self._averages = [self._slot_like(v, "average") for v in variables]
        if self._option("gradient_accumulation_steps"):
            self._accumulators = [self._slot_like(v, "gradient_accumulator") for v in variables]
        if self.master_weights:
            half = [v for v in variables if v.dtype != gradients.wide(v.dtype)]
            self._masters = {v: self._slot_like(v, "master") for v in half}
            for variable, master in self._masters.items():
                if not variable._is_planned:
                    master.assign(variable)
        if isinstance(self._wrapper, Optimizer):
            self._wrapper._build_around(variables)
        self._places = {variable: place for place, variable in enumerate(variables)}
        if self.group_small and self._is_elementwise():
            for group in groups_of(variables, gradients.wide):
                self._group_of |= dict.fromkeys(group.members, group)
        self._forget_program()

    def _build_around(self, variables: Sequence[Variable]) -> None:
        """Creates what a wrapper keeps beside the state of its inner optimizer."""

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
        names, variables = list(var_names or ()), variables_in([] if var_list is None else var_list)
        try:
            self._undecayed_names = re.compile("|".join(names)) if names else None
        except re.error as error:
            raise ValueError(f"Expected regular expressions in var_names; got {names}.") from error
        self._undecayed = set(variables)

    def _skips(self) -> bool:
        return self._wrapper is not None or self._option("loss_scale_factor") is not None

    def _decays(self, variable: Variable) -> bool:
        names = self._undecayed_names
        return variable not in self._undecayed and not (names and names.search(variable.name))

    # ── configuration ────────────────────────────────────────────────────────────────────────

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments, JSON-serializable but for callables; the learning rate
        is the current one. How a step runs (`jit_compile`, `mesh`) is left out."""
        usual = {"group_small": False, "master_weights": False, "on_bad_microbatch": "extend"}
        return {k: v for k, v in super().get_config().items() if k not in usual or v != usual[k]}

    def _argument(self, name: str) -> Any:
        return self._rate.get_config() if name == "learning_rate" else super()._argument(name)

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
