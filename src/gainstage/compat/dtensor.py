"""`tf.keras.dtensor.experimental.optimizers`: optimizers with a `mesh` argument."""

# TensorFlow's methods differ from ours in arguments and results.
# pyright: reportIncompatibleMethodOverride=false
# mypy: disable-error-code="override, misc"

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import numpy.typing as npt
from jax.sharding import Mesh
from jax.typing import DTypeLike

from gainstage import optimizers
from gainstage._base import checks
from gainstage._scaling import gradients
from gainstage._scaling.gradients import Gradients
from gainstage._variables.types import Rate, Scalar
from gainstage._variables.variable import Variable
from gainstage.optimizers._step.conventions import Conventions
from gainstage.optimizers._step.differentiate import VarList
from gainstage.optimizers._step.options import Setting, check_options
from gainstage.optimizers._step.slots import Initializer
from gainstage.optimizers.optimizer import Optimizer

__all__ = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "EMAOption",
    "GradientsClipOption",
    "RMSprop",
]


def __dir__() -> list[str]:
    return __all__


@dataclasses.dataclass(frozen=True)
class GradientsClipOption:
    """Clip options: at most one of the three, as for every `Optimizer`.

    Args:
        clipnorm: the largest norm of each gradient, > 0.
        clipvalue: the largest absolute value of an element, > 0.
        global_clipnorm: the largest norm of all gradients together, > 0.

    Raises:
        TypeError, ValueError: an argument is invalid, or several are given.

    Source: the development tree of Keras before 2.8.
    """

    clipnorm: float | None = None
    clipvalue: float | None = None
    global_clipnorm: float | None = None

    def __post_init__(self) -> None:
        check_options(vars(self))

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class EMAOption:
    """Moving-average options, as for every `Optimizer`.

    Args:
        use_ema: whether to average.
        ema_momentum: in [0, 1].
        ema_overwrite_frequency: the number of updates after which the variables are set to their
            average, or None.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: the development tree of Keras before 2.8.
    """

    use_ema: bool = False
    ema_momentum: float = 0.99
    ema_overwrite_frequency: int | None = 100

    def __post_init__(self) -> None:
        check_options(vars(self))

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return dataclasses.asdict(self)


def _slot_name_before_variable(owner: str, variable: str, slot: str, place: int) -> str:
    return f"{owner}/{slot}/{variable}"


# The optimizer that takes a step, which asks for its own rate, and that; None while it is computed.
_STEP: ContextVar[tuple[Any, jax.Array | None]] = ContextVar("a step", default=(None, None))


@contextlib.contextmanager
def _step_of(optimizer: Optimizer, rate: jax.Array | None) -> Iterator[None]:
    token = _STEP.set((optimizer, rate))
    try:
        yield
    finally:
        _STEP.reset(token)


class _MeshOptimizer(Optimizer):
    """The base of the DTensor optimizers: option objects, and `update_step` of two arguments."""

    _is_base = True
    _conventions = Conventions(_slot_name_before_variable, passes_rate=False, sums_losses=True)

    def __init__(
        self,
        *args: Any,
        gradients_clip_option: GradientsClipOption | Mapping[str, Any] | None = None,
        ema_option: EMAOption | Mapping[str, Any] | None = None,
        jit_compile: bool = False,
        name: str | None = None,
        mesh: Mesh | None = None,
        **options: Any,
    ):
        if "decay" in options:
            raise checks.InvalidArgumentError(
                f"Expected no decay; got {options['decay']!r}. Write learning_rate="
                f"gainstage.optimizers.schedules.InverseTimeDecay(learning_rate, 1, decay)."
            )
        if name is None:
            name = next(c.__name__ for c in type(self).__mro__ if c.__module__ == __name__)
        for argument, cls, value in [
            ("gradients_clip_option", GradientsClipOption, gradients_clip_option),
            ("ema_option", EMAOption, ema_option),
        ]:
            for key, setting in _settings(argument, cls, value).items():
                if key in options:
                    raise ValueError(f"{key} is given twice: by itself and in {argument}.")
                options[key] = setting
        self._given |= options.keys()
        super().__init__(*args, jit_compile=jit_compile, name=name, mesh=mesh, **options)

    @property
    def gradients_clip_option(self) -> None:
        """None: the options that the constructor was given are attributes of their own."""

    @property
    def ema_option(self) -> None:
        """None: the options that the constructor was given are attributes of their own."""

    @property
    def iterations(self) -> Variable:
        """The number of updates so far. A number, or a variable that becomes the counter, can be
        assigned before `build`."""
        return super().iterations

    @iterations.setter
    def iterations(self, value: Scalar) -> None:
        self._store.set_count(value)

    @property
    def learning_rate(self) -> Any:
        """The rate of the last step; before any, that of the first. Inside `update_step`, the rate
        of the step."""
        store, (optimizer, rate) = self._store, _STEP.get()
        if optimizer is not self:
            return store.rate_now(0 if store.outer else 1)  # a wrapper has that of its last step
        # A subclass's own property starts from the optimizer's.
        return store.rate_now() if rate is None or store.has_own_rate else rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Rate) -> None:
        base: Any = Optimizer.learning_rate
        base.fset(self, learning_rate)

    def add_variable(
        self,
        shape: Sequence[int] | None = (),
        dtype: DTypeLike | None = None,
        initializer: Initializer = "zeros",
        name: str | None = None,
    ) -> Variable:
        """Adds a variable to the optimizer's state, with TensorFlow's order of arguments. On a mesh
        it is replicated."""
        return super().add_variable(() if shape is None else shape, initializer, dtype, name=name)

    def add_variable_from_reference(
        self,
        model_variable: Variable,
        variable_name: str | None = None,
        initial_value: Initializer | npt.ArrayLike | None = None,
        *,
        shape: Sequence[int] | None = None,
    ) -> Variable:
        """Adds a slot with the sharding of `model_variable`; it starts at `initial_value`, or 0. It
        is called `{name}/{variable_name}/{model_variable.name}`. One of another `shape` is
        replicated; with an `initial_value` that has no effect, as in TensorFlow 2.15."""
        if shape is not None and initial_value is None and tuple(shape) != model_variable.shape:
            dtype = gradients.float32_or_wider(model_variable.dtype)
            name = f"{variable_name or 'var'}/{model_variable.name}"
            return super().add_variable(shape, "zeros", dtype, name=name)
        initializer = "zeros" if initial_value is None else initial_value
        return super().add_variable_from_reference(model_variable, variable_name, initializer)

    def update_step(self, gradient: jax.Array, variable: Variable) -> None:
        """Assigns the new value of one variable; override it with these two arguments.

        Args:
            gradient: the unscaled, clipped gradient, in float32 or wider.
            variable: the variable. `self.learning_rate` is the rate of the step.
        """
        optimizer, rate = _STEP.get()
        rate = rate if optimizer is self and rate is not None else self.learning_rate
        super().update_step(gradient, variable, rate)

    def _update_weights(self, grads: Gradients, rate: jax.Array, loss: jax.Array | None) -> None:
        with _step_of(self, rate):
            super()._update_weights(grads, rate, loss)

    def _rate_of_step(self) -> jax.Array | None:
        with _step_of(self, None):
            return super()._rate_of_step()

    def compute_gradients(
        self, loss: Callable[[], Any], var_list: VarList, tape: object = None
    ) -> list[tuple[jax.Array | None, Variable]]:
        """Returns the (gradient, variable) pairs of a loss, a callable; there are no tapes here. A
        loss that is not a scalar is summed."""
        if tape is not None:
            raise ValueError("Expected no tape: pass the loss as a callable.")
        return super().compute_gradients(loss, var_list)

    def minimize(self, loss: Callable[[], Any], var_list: VarList, tape: object = None) -> None:
        """Differentiates `loss`, a callable, and takes a step. A loss that is not a scalar is
        summed."""
        self.apply_gradients(self.compute_gradients(loss, var_list, tape))

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        *,
        experimental_aggregate_gradients: bool = True,
    ) -> None:
        """Takes a step on (gradient, variable) pairs, already reduced over the whole mesh. The last
        three arguments are those of TensorFlow 2.13 to 2.15, and have no effect."""
        super().apply_gradients(grads_and_vars)


def _must_be_false(name: str, value: object) -> bool:
    if checks.flag(name, value):
        raise ValueError(f"Expected {name}=False for SGD; got True.")
    return False


class SGD(_MeshOptimizer, optimizers.SGD):
    """`gainstage.optimizers.SGD` with TensorFlow's arguments; on a mesh slots are sharded as their
    variable.

    Args:
        learning_rate: a number, schedule or callable.
        momentum: in [0, 1].
        nesterov: whether to use Nesterov momentum.
        amsgrad: must be False; it has no meaning for SGD.
        gradients_clip_option: a `GradientsClipOption`, a mapping of its arguments, or None.
        ema_option: an `EMAOption`, a mapping of its arguments, or None.
        jit_compile: whether `apply_gradients` is compiled.
        name: the prefix of the names of the optimizer's variables.
        mesh: the `jax.sharding.Mesh` that replicates iterations and learning rate, and by `build`
            the variables that lie on one device.
        **options: `weight_decay`, `clipnorm`, `clipvalue`, `global_clipnorm`, `use_ema`,
            `ema_momentum`, `ema_overwrite_frequency`.

    Raises:
        TypeError: an argument has the wrong type, or is unknown.
        ValueError: an argument is out of range, `amsgrad=True`, or `mesh` is not a mesh.

    Examples:
        >>> import gainstage as gs
        >>> from gainstage.compat import dtensor
        >>> var = gs.optimizers.Variable(1.0)
        >>> opt = dtensor.SGD(learning_rate=0.1)
        >>> opt.minimize(lambda: (var ** 2) / 2.0, [var])
        >>> print(var.value())
        0.9

    Source: `tf.keras.dtensor.experimental.optimizers.SGD` (TensorFlow 2.12).
    """

    amsgrad: Setting[bool] = Setting(check=_must_be_false)

    def __init__(
        self,
        learning_rate: Rate = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        amsgrad: bool = False,
        gradients_clip_option: GradientsClipOption | Mapping[str, Any] | None = None,
        ema_option: EMAOption | Mapping[str, Any] | None = None,
        jit_compile: bool = False,
        name: str = "SGD",
        mesh: Mesh | None = None,
        **options: Any,
    ):
        self.amsgrad = amsgrad
        super().__init__(
            learning_rate,
            momentum,
            nesterov,
            gradients_clip_option=gradients_clip_option,
            ema_option=ema_option,
            jit_compile=jit_compile,
            name=name,
            mesh=mesh,
            **options,
        )


class Adam(_MeshOptimizer, optimizers.Adam):
    """`gainstage.optimizers.Adam` with the keywords of `SGD` above."""


class AdamW(_MeshOptimizer, optimizers.AdamW):
    """`gainstage.optimizers.AdamW` with the keywords of `SGD` above."""


class RMSprop(_MeshOptimizer, optimizers.RMSprop):
    """`gainstage.optimizers.RMSprop` with the keywords of `SGD` above."""


class Adagrad(_MeshOptimizer, optimizers.Adagrad):
    """`gainstage.optimizers.Adagrad` with the keywords of `SGD` above."""


class Adadelta(_MeshOptimizer, optimizers.Adadelta):
    """`gainstage.optimizers.Adadelta` with the keywords of `SGD` above."""


def _settings(argument: str, cls: type, value: object) -> dict[str, Any]:
    """The options in an option object, a mapping or None."""
    if value is None:
        return {}
    if isinstance(value, Mapping) and value.keys() <= vars(cls)["__dataclass_fields__"].keys():
        checked = vars(cls(**value))  # what it does not name has Keras's default
        return {key: checked[key] for key in value if checked[key] is not None}
    if not isinstance(value, cls):
        raise TypeError(f"Expected a {cls.__name__} for {argument}; got {value!r}.")
    return {key: setting for key, setting in vars(value).items() if setting is not None}
