"""Names for the types of arguments and results of public functions."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, ParamSpec, Protocol, TypeAlias, TypeVar

import jax
import numpy as np
import numpy.typing as npt
from jax.typing import ArrayLike

from gainstage._variables.variable import Variable

# Type checkers cannot describe these.
PyTree: TypeAlias = Any  # a pytree of arrays, such as parameters, gradients or a batch
OptState: TypeAlias = Any  # the state of an optax transformation, a pytree of any classes
RuleState: TypeAlias = Any  # the state of a loss-scale rule, a NamedTuple with at least `scale`
P = ParamSpec("P")  # the arguments of a user's function
R = TypeVar("R")  # its result
Aux = TypeVar("Aux")  # the auxiliary output of a loss
Tree = TypeVar("Tree")  # a pytree of arrays, of which a result has the structure
# The same, as an argument of a loss. Without the bound, pyright refuses `lambda w: w**2`.
Params = TypeVar("Params", bound=Any)
Scalar = ArrayLike | Variable  # a number: a loss, a scale, a rate
Loss = TypeVar("Loss", bound=Scalar)
Flag = bool | np.bool_ | np.ndarray | jax.Array  # a bool scalar
Values = Sequence[npt.ArrayLike]  # numbers, arrays, variables and nested lists
Grads = Sequence[npt.ArrayLike | None]
Rate = Scalar | Callable[[], Scalar] | Callable[[jax.Array], Scalar]  # a learning rate
State = Variable | Iterable[Any]  # a pytree of variables


class Structure(Protocol):
    """The structure of a pytree, `jax.tree_util.PyTreeDef`, whose methods jaxlib does not type."""

    @property
    def num_leaves(self) -> int: ...

    def unflatten(self, leaves: Iterable[Any], /) -> PyTree: ...

    def flatten_up_to(self, tree: PyTree, /) -> list[Any]: ...


class Using(Protocol):
    """A function that differentiates, such as `jax.value_and_grad`."""

    def __call__(
        self, fun: Callable[..., Any], /, *, has_aux: Literal[True]
    ) -> Callable[..., Any]: ...


class Transformation(Protocol):
    """What `optax.GradientTransformation` and `optax.MultiSteps` have in common."""

    @property
    def init(self) -> Callable[[PyTree], OptState]: ...

    @property
    def update(self) -> Callable[..., tuple[PyTree, OptState]]: ...
