"""An operation with its operands, of which a policy decides in which precision it is computed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np

from gainstage._base._jax import JaxprEqn, is_batched
from gainstage._programs import jaxprs
from gainstage._programs.in_dtype import is_float32
from gainstage.precision.needs import Need
from gainstage.transforms.retrace import Kind, Retraced


@dataclass(frozen=True)
class Call:
    """An operation with its operands, as the policy sees it."""

    eqn: JaxprEqn
    values: Sequence[Retraced]
    dtype: np.dtype  # the half-precision dtype
    need: Need = Need.NOTHING  # what of it must be exact

    @cached_property
    def name(self) -> str:
        """The name of the operation."""
        return self.eqn.primitive.name

    @cached_property
    def floats(self) -> list[Retraced]:
        """The operands that are float32 in the program."""
        pairs = zip(self.values, self.eqn.invars, strict=True)
        return [value for value, variable in pairs if is_float32(variable)]

    @cached_property
    def held(self) -> list[bool]:
        """For each of these, whether it is in half precision."""
        return [getattr(value.x, "dtype", None) == self.dtype for value in self.floats]

    @cached_property
    def is_half(self) -> bool:
        """Whether all of these are."""
        return bool(self.held) and all(self.held)

    @property
    def has_one_batch(self) -> bool:
        """Whether `jax.vmap` gives one of two operands another axis, which is a side then."""
        return len({is_batched(value.x) for value in self.floats}) > 1

    @property
    def is_batched(self) -> bool:
        """Whether `jax.vmap` around the function gives some of these another axis."""
        return any(is_batched(value.x) for value in self.floats)

    @cached_property
    def others(self) -> set[Kind]:
        """The kinds of these that are not."""
        return {v.kind for v, is_held in zip(self.floats, self.held, strict=True) if not is_held}

    @cached_property
    def broadcast(self) -> list[Retraced]:
        """The arrays among the operands that are broadcast."""
        shape = jaxprs.array(self.eqn.outvars[0]).shape
        return [v for v in self.values if isinstance(v.x, jax.Array) and v.x.shape != shape]

    @cached_property
    def numbers(self) -> list[float]:
        """The numbers of the program in a product of elements."""
        each = (v.x for v in self.floats if not isinstance(v.x, jax.Array) and np.ndim(v.x) == 0)
        return [float(x) for x in each] if self.name == "mul" else []
