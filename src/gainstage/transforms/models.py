"""Models of Flax NNX and Equinox: what differentiates them, and what of them is trained."""

# Neither library is imported here: whoever has a model has imported it.

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from gainstage._variables.types import PyTree, Using
from gainstage.transforms.nnx_objects import nodes_in

Model = TypeVar("Model")
NNX, EQUINOX = "flax.nnx", "equinox"


def library(*models: Any, beside: PyTree = ()) -> str | None:
    """The library of a model among these values: `NNX`, `EQUINOX` or None. Any object of NNX
    beside them counts too, such as `nnx.Rngs`, if they are of no other library."""
    for name in (NNX, EQUINOX):
        module = getattr(sys.modules.get(name), "Module", ())
        if any(isinstance(model, module) for model in models):
            return name
    objects = getattr(sys.modules.get(NNX), "Pytree", ())
    nodes = jax.tree.leaves(beside, is_leaf=lambda x: isinstance(x, objects)) if objects else []
    return NNX if any(isinstance(node, objects) for node in nodes) else None


def refuse_models_in_a_pytree(params: PyTree) -> None:
    """Raises an error for NNX models in a tuple or dictionary, of which JAX trains copies."""
    module = getattr(sys.modules.get(NNX), "Module", ())
    if isinstance(params, module) or not any(isinstance(x, module) for x in nodes_in(params)):
        return
    kind, several = type(params).__name__, "Dict" if isinstance(params, dict) else "List"
    raise TypeError(
        f"Expected one model; got a {kind} of NNX models, whose running means would not change. "
        f"Make it a model: nnx.{several}(params)."
    )


def _of_nnx(fun: Callable[..., Any], /, **options: Any) -> Callable[..., Any]:
    return sys.modules[NNX].value_and_grad(fun, **options)


def _of_equinox(
    fun: Callable[..., Any], /, *, has_aux: bool = False, argnums: int | Sequence[int] = 0
) -> Callable[..., Any]:
    """`equinox.filter_value_and_grad`, which has no argnums."""
    filtered = functools.partial(sys.modules[EQUINOX].filter_value_and_grad, has_aux=has_aux)
    if argnums == 0:
        return filtered(fun)
    numbers = argnums if isinstance(argnums, Sequence) else (argnums,)

    def differentiate(*args: PyTree, **kwargs: Any) -> tuple[Any, PyTree]:
        def of(chosen: Sequence[Any]) -> Any:
            whole = list(args)
            for n, arg in zip(numbers, chosen, strict=True):
                whole[n] = arg
            return fun(*whole, **kwargs)

        value, grads = filtered(of)(tuple(args[n] for n in numbers))
        return value, (grads if isinstance(argnums, Sequence) else grads[0])

    return differentiate


# What differentiates with respect to a model of each library.
VALUE_AND_GRAD: dict[str | None, Using] = {
    None: jax.value_and_grad,
    EQUINOX: _of_equinox,
    NNX: _of_nnx,
}


def trainable(params: PyTree) -> PyTree:
    """What is trained: the parameters of a model, as a pytree; other pytrees as they are."""
    refuse_models_in_a_pytree(params)
    found = library(params)
    if found == NNX:
        nnx = sys.modules[NNX]
        return nnx.state(params, nnx.Param)
    if found == EQUINOX:
        eqx = sys.modules[EQUINOX]
        return eqx.filter(params, eqx.is_inexact_array)
    return params


def is_nnx(params: PyTree, grads: PyTree) -> bool:
    """Whether `params` is an NNX model whose gradients `grads` are an `nnx.State`."""
    state = getattr(sys.modules.get(NNX), "State", ())
    return library(params) == NNX and isinstance(grads, state)


def chosen(params: PyTree, grads: PyTree) -> PyTree:
    """The parameters that have gradients, in the structure of `grads`."""
    if not is_nnx(params, grads):
        pick = lambda g, p: None if g is None else p  # noqa: E731
        return jax.tree.map(pick, grads, params, is_leaf=lambda x: x is None)
    nnx = sys.modules[NNX]
    wanted = dict(nnx.to_flat_state(grads))
    pairs = [(at, value) for at, value in nnx.to_flat_state(nnx.state(params)) if at in wanted]
    return nnx.from_flat_state(pairs)


def updated(model: Model, new: PyTree) -> Model:
    """Updates an NNX model with these parameters and returns it."""
    sys.modules[NNX].update(model, new)
    return model
