"""Compute and variable dtypes, by policy name."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gainstage._base.configurable import Fields
from gainstage._variables.types import PyTree
from gainstage._variables.variable import Variable

_MIXED = {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}


@dataclasses.dataclass(frozen=True)
class Policy(Fields):
    """The dtypes of a model, by their Keras names.

    Args:
        name: "mixed_float16" or "mixed_bfloat16" (compute in half precision, keep variables in
            float32), or one floating dtype for both, such as "float32" or "float16".

    Raises:
        TypeError: `name` is not a string.
        ValueError: there is no such policy.

    Examples:
        >>> import gainstage as gs
        >>> import jax.numpy as jnp
        >>> policy = gs.precision.Policy("mixed_float16")
        >>> print(policy.compute_dtype, policy.variable_dtype)
        float16 float32
        >>> policy.cast_to_compute({"w": jnp.ones(2), "step": 3})["w"].dtype
        dtype('float16')

    Source: `keras.mixed_precision.DTypePolicy`; `jmp.Policy`.
    """

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"Expected a string for name; got {self.name!r}.")
        try:
            known = self.name in _MIXED or jnp.issubdtype(jnp.dtype(self.name), jnp.floating)
        except TypeError:
            known = False
        if not known:
            raise ValueError(
                f"Expected 'mixed_float16', 'mixed_bfloat16' or a floating dtype for name; "
                f"got {self.name!r}."
            )

    @property
    def compute_dtype(self) -> str:
        """The dtype to compute in."""
        return _MIXED.get(self.name, self.name)

    @property
    def variable_dtype(self) -> str:
        """The dtype to keep variables in."""
        return "float32" if self.name in _MIXED else self.name

    def cast_to_compute(self, tree: PyTree) -> PyTree:
        """Casts the floating arrays (and variables' values) of a pytree to `compute_dtype`."""
        return self._cast(tree, self.compute_dtype)

    def cast_to_variable(self, tree: PyTree) -> PyTree:
        """Casts the floating arrays (and variables' values) of a pytree to `variable_dtype`."""
        return self._cast(tree, self.variable_dtype)

    def _cast(self, tree: PyTree, dtype: str) -> PyTree:
        def one(x: Any) -> Any:
            x = x.value() if isinstance(x, Variable) else x
            floating = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
            return jnp.asarray(x, dtype) if floating else x

        return jax.tree.map(one, tree)
