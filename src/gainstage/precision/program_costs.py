"""The arithmetic of a function's products, and what its forward pass keeps."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gainstage._base._jax import JaxprEqn, Literal
from gainstage._programs import jaxprs
from gainstage._programs.operations import PRODUCTS
from gainstage._programs.patterns import terms_of
from gainstage.precision.cards import H100, Card
from gainstage.precision.float8_rule import PRODUCTS_OF_A_STEP, Sizes, added_bytes, pays
from gainstage.precision.plan import DTYPES, FLOAT8
from gainstage.precision.samples import Samples

UPCAST = {"bfloat16": 2, "float16": 2, FLOAT8: 4}  # by which a cast to float32 multiplies bytes


class Product(NamedTuple):
    """A product of a program, as often as it is computed in a forward pass."""

    operations: float  # multiplications and additions
    moved: float  # bytes that it reads and writes
    cast: float  # bytes that casts to float8 add, forwards and backwards
    dtype: str  # of its operands

    def seconds(self, card: Card) -> float:
        """Its time on a card, on paper: as long as its arithmetic or its memory takes, forwards and
        backwards."""
        moved = self.moved if card.multiplies(self.dtype) else self.moved * UPCAST[self.dtype]
        each = max(self.operations / card.rate(self.dtype), moved / (1e12 * card.memory))
        return PRODUCTS_OF_A_STEP * each + self.cast / (1e12 * card.memory)


def products_of(fun: Callable[..., Any], *args: Any) -> list[Product]:
    """The products of a function."""
    every = jaxprs.repeated(jax.make_jaxpr(fun)(*args))
    return [_product(eqn, times) for times, eqn in every if eqn.primitive.name in PRODUCTS]


def _product(eqn: JaxprEqn, times: float) -> Product:
    left, right, out = (jaxprs.array(v) for v in (*eqn.invars[:2], eqn.outvars[0]))
    # A transposed convolution puts zeros between the elements: no card multiplies those.
    summed = terms_of(eqn) / math.prod(eqn.params.get("lhs_dilation", ()))
    if math.isinf(summed):  # a ragged product: each row meets one matrix
        summed = left.shape[-1]
    name, cast = left.dtype.name, 0
    size_of_out = out.dtype.itemsize
    if name.startswith("float8"):  # the kernel of the product casts its result to half precision
        name, size_of_out = FLOAT8, 2
        # On which side the weight is, the program forgets: it is the smaller operand, unless the
        # product is in float8 because it is the larger one.
        weight, activation = sorted((left.size, right.size))
        terms = int(summed)
        if not pays(Sizes(activation // terms, terms, weight // terms), H100):
            weight, activation = activation, weight
        cast = added_bytes(activation, weight, out.size)
    moved = left.size * left.dtype.itemsize + right.size * right.dtype.itemsize
    moved += out.size * size_of_out
    return Product(2.0 * out.size * summed * times, moved * times, cast * times, name)


def kept(fun: Callable[..., Any], params: Any, *batch: Any) -> int:
    """The bytes that the forward pass keeps for the backward pass, without the arguments.

    Casts of one value to one dtype count once: a compiler merges them.
    """

    def residuals(params: Any, batch: Any) -> list[Any]:
        return jax.tree.leaves(jax.vjp(lambda params: fun(params, *batch), params)[1])

    jaxpr = jaxprs.open_jaxpr(jax.make_jaxpr(residuals)(params, batch))
    inputs = {id(variable) for variable in (*jaxpr.invars, *jaxpr.constvars)}
    casts = {
        id(eqn.outvars[0]): (id(eqn.invars[0]), jaxprs.array(eqn.outvars[0]).dtype)
        for eqn in jaxprs.equations(jaxpr)
        if eqn.primitive.name == "convert_element_type"
    }
    arrays = {
        casts.get(id(v), id(v)): jaxprs.array(v)
        for v in jaxpr.outvars
        if not isinstance(v, Literal) and id(v) not in inputs
    }
    return sum(x.size * x.dtype.itemsize for x in arrays.values())


def bytes_in_half(samples: Samples, fun: Callable[..., Any]) -> float:
    """The bytes that a step of a function reads and writes in half precision or float8, before a
    compiler fuses any of it."""

    def gradients(arrays: Any) -> Any:
        return samples.gradients_of(fun, jnp.float32(1), arrays)

    total = 0.0
    for times, eqn in jaxprs.repeated(jax.make_jaxpr(gradients)(samples.arrays[0])):
        if not jaxprs.inner(eqn):
            every = (v for v in (*eqn.invars, *eqn.outvars) if hasattr(v.aval, "dtype"))
            each = map(jaxprs.array, every)
            total += times * sum(x.size * x.dtype.itemsize for x in each if _is_short(x.dtype))
    return total


def _is_short(dtype: Any) -> bool:
    return dtype in DTYPES.values() or dtype.name.startswith(FLOAT8)
