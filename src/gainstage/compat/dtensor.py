"""`tf.keras.dtensor.experimental.optimizers`: optimizers that know the mesh."""

# The documented methods differ from the core's in arguments and results.
# pyright: reportIncompatibleMethodOverride=false

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from gainstage import optimizers
from gainstage._core import checks
from gainstage._core.options import check_option
from gainstage._core.variable import Variable
from gainstage.optimizers.base import Optimizer

LEFT_OVER = ("decay",)  # keywords of Keras's parent class that never meant anything here


@dataclasses.dataclass(frozen=True)
class GradientsClipOption:
    """How to clip: at most one of the three, as for every `Optimizer`.

    Args:
        clipnorm: the largest norm of each gradient, > 0.
        clipvalue: the largest absolute value of an element, > 0.
        global_clipnorm: the largest norm of all gradients together, > 0.

    Raises:
        TypeError, ValueError: wrong or several limits.

    Source: the development tree of Keras before 2.8.
    """

    clipnorm: float | None = None
    clipvalue: float | None = None
    global_clipnorm: float | None = None

    def __post_init__(self) -> None:
        _check_all(self)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class EMAOption:
    """How to average: as the options of every `Optimizer`.

    Args:
        use_ema: whether to average.
        ema_momentum: in [0, 1].
        ema_overwrite_frequency: after so many steps the variables become their average, or None.

    Raises:
        TypeError, ValueError: wrong arguments.

    Source: the development tree of Keras before 2.8.
    """

    use_ema: bool = False
    ema_momentum: float = 0.99
    ema_overwrite_frequency: int | None = 100

    def __post_init__(self) -> None:
        _check_all(self)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return dataclasses.asdict(self)


class _MeshOptimizer(Optimizer):
    """What the documented classes share: option objects, and `update_step` of two arguments."""

    elementwise = True

    def __init__(
        self,
        *args: Any,
        gradients_clip_option: Any = None,
        ema_option: Any = None,
        jit_compile: bool = False,
        name: str | None = None,
        mesh: Mesh | None = None,
        **options: Any,
    ):
        for option in [option for option in LEFT_OVER if option in options]:
            warnings.warn(f"{option} has no effect.", stacklevel=3)
            options.pop(option)
        for argument, cls, value in [
            ("gradients_clip_option", GradientsClipOption, gradients_clip_option),
            ("ema_option", EMAOption, ema_option),
        ]:
            for key, setting in _settings(argument, cls, value).items():
                if key in options:
                    raise ValueError(f"Expected {key} in {argument} or by itself; got it twice.")
                options[key] = setting
        self._given |= options.keys()
        super().__init__(*args, jit_compile=jit_compile, name=name, mesh=mesh, **options)
        # An option is reported once, under its own name.
        self.gradients_clip_option = self.ema_option = None
        self._step_rate: jax.Array | None = None

    @property
    def learning_rate(self) -> Any:
        """The current rate; inside `update_step` that of the step."""
        return super().learning_rate if self._step_rate is None else self._step_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        Optimizer.learning_rate.fset(self, learning_rate)  # type: ignore[attr-defined]

    def add_variable(
        self,
        shape: Any = (),
        dtype: Any = None,
        initializer: Any = "zeros",
        name: str | None = None,
    ) -> Variable:
        """A new variable of the optimizer's state, with the documented order of arguments."""
        return super().add_variable(shape, initializer, dtype, name=name)

    def add_variable_from_reference(
        self, model_variable: Variable, variable_name: str | None = None, initial_value: Any = None
    ) -> Variable:
        """A slot like `model_variable`, in its layout; it starts at `initial_value`, or at 0."""
        if initial_value is None or isinstance(initial_value, str) or callable(initial_value):
            initializer = initial_value or "zeros"
        else:
            initializer = lambda shape, dtype: jnp.broadcast_to(  # noqa: E731
                jnp.asarray(initial_value, dtype), shape
            )
        return super().add_variable_from_reference(model_variable, variable_name, initializer)

    def update_step(self, gradient: jax.Array, variable: Any) -> None:
        """Assigns the new value of one variable; override it with these two arguments.

        Args:
            gradient: the true gradient, float32 or wider, clipped.
            variable: the variable. `self.learning_rate` is the rate of the step.
        """
        super().update_step(gradient, variable, self.learning_rate)

    def _update_one(self, gradient: jax.Array, variable: Variable, rate: jax.Array) -> None:
        self._step_rate = rate
        try:
            self.update_step(gradient, variable)
        finally:
            self._step_rate = None

    def compute_gradients(self, loss: Callable[[], Any], var_list: Any, tape: Any = None) -> Any:
        """The (gradient, variable) pairs of a loss, a callable; there are no tapes here."""
        if tape is not None:
            raise ValueError("Expected no tape: pass the loss as a callable.")
        return super().compute_gradients(loss, var_list)

    def minimize(self, loss: Callable[[], Any], var_list: Any, tape: Any = None) -> None:
        """Differentiates `loss`, a callable, and takes a step."""
        self.apply_gradients(self.compute_gradients(loss, var_list, tape))

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> None:
        """Takes a step on (gradient, variable) pairs, which are already those of the whole mesh."""
        super().apply_gradients(grads_and_vars)


class SGD(_MeshOptimizer, optimizers.SGD):
    """`gainstage.SGD` with the documented arguments; on a mesh slots lie like their variable.

    Args:
        learning_rate: a number, schedule or callable.
        momentum: in [0, 1].
        nesterov: whether to look ahead.
        amsgrad: must be False, it means nothing for SGD.
        gradients_clip_option: a `GradientsClipOption`, a mapping of its arguments, or None.
        ema_option: an `EMAOption`, a mapping of its arguments, or None.
        jit_compile: whether `apply_gradients` is compiled.
        name: the prefix of the names of the optimizer's variables.
        mesh: the `jax.sharding.Mesh` on which iterations and rate are replicated.
        **options: `weight_decay`, `clipnorm`, `clipvalue`, `global_clipnorm`, `use_ema`,
            `ema_momentum`, `ema_overwrite_frequency`.

    Raises:
        TypeError: an argument of the wrong kind, or unknown.
        ValueError: an argument out of range, `amsgrad=True`, no mesh.

    Examples:
        >>> import gainstage as gs
        >>> from gainstage.compat import dtensor
        >>> var = gs.Variable(1.0)
        >>> opt = dtensor.SGD(learning_rate=0.1)
        >>> opt.minimize(lambda: (var ** 2) / 2.0, [var])
        >>> print(var.value())
        0.9

    Source: `tf.keras.dtensor.experimental.optimizers.SGD` (TensorFlow 2.12).
    """

    def __init__(
        self,
        learning_rate: Any = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        amsgrad: bool = False,
        gradients_clip_option: Any = None,
        ema_option: Any = None,
        jit_compile: bool = False,
        name: str = "SGD",
        mesh: Mesh | None = None,
        **options: Any,
    ):
        if checks.flag("amsgrad", amsgrad):
            raise ValueError("Expected amsgrad=False for SGD; got True.")
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
    """`gainstage.Adam` with the keywords of `SGD` above."""


class AdamW(_MeshOptimizer, optimizers.AdamW):
    """`gainstage.AdamW` with the keywords of `SGD` above."""


class RMSprop(_MeshOptimizer, optimizers.RMSprop):
    """`gainstage.RMSprop` with the keywords of `SGD` above."""


class Adagrad(_MeshOptimizer, optimizers.Adagrad):
    """`gainstage.Adagrad` with the keywords of `SGD` above."""


class Adadelta(_MeshOptimizer, optimizers.Adadelta):
    """`gainstage.Adadelta` with the keywords of `SGD` above."""


def _settings(argument: str, cls: type, value: Any) -> dict[str, Any]:
    """The options that an option object, a mapping or None stands for."""
    if value is None:
        return {}
    if isinstance(value, Mapping) and value.keys() <= vars(cls)["__dataclass_fields__"].keys():
        value = cls(**value)
    if not isinstance(value, cls):
        raise TypeError(f"Expected a {cls.__name__} for {argument}; got {value!r}.")
    return {key: setting for key, setting in vars(value).items() if setting is not None}


def _check_all(option: Any) -> None:
    checked: dict[str, Any] = {}
    for name, value in vars(option).items():
        checked[name] = check_option(name, value, checked)
