"""Which products are in float8: those that are large enough for a card to gain by it."""

from collections.abc import Sequence
from typing import NamedTuple

from gainstage._base._jax import JaxprEqn, batch_size
from gainstage._programs.in_dtype import is_float32
from gainstage._programs.patterns import sides
from gainstage.precision.cards import Card
from gainstage.transforms.retrace import Kind, Retraced

NARROWEST = 16  # rows, columns or summed elements: below, float8 multiplies no faster
# Bytes that float8 adds for each element of an activation or a cotangent, and of a weight. On an
# H200 a step of a language model gained 0.4, 5.6 and 14.8 ms by float8 at the widths 1024, 2048 and
# 4096. That is as if each element were moved by 12 bytes more: it is read for its largest number,
# read again, written in float8, and copied to the order of axes that the hardware wants.
BYTES_OF_ACTIVATION, BYTES_OF_WEIGHT = 12, 1
PRODUCTS_OF_A_STEP = 3  # a product, and the derivatives of both operands


class Sizes(NamedTuple):
    """The sizes of a product of two matrices."""

    rows: int
    summed: int
    columns: int

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        return 2 * self.rows * self.summed * self.columns

    def __str__(self) -> str:
        return f"[{self.rows}, {self.summed}] x [{self.summed}, {self.columns}]"


def float8_sizes(
    eqn: JaxprEqn, values: Sequence[Retraced], *, only_linear: bool = True
) -> Sizes | None:
    """The sizes of an operation that may be in half precision, if it may be in float8 too.

    It is a `dot_general` without batch axes, with enough rows, columns and summed elements for the
    hardware. Rows are those of the activation, and columns those of the parameter, on whichever
    side that is. The examples of `jax.vmap` are rows, unless both operands have them: each example
    is then a product of its own.

    Args:
        eqn: an operation.
        values: its operands.
        only_linear: whether it must be a linear layer: a parameter times an activation. A plan has
            measured what the others cost.
    """
    found = sides(eqn)
    if found is None or any(eqn.params["dimension_numbers"][1]):
        return None
    rows, summed, columns = found
    left, right = (batch_size(value.x) for value in values)
    if min(left, right) == 1:
        rows, columns = rows * left, columns * right
    are_free = [value.kind is Kind.FREE for value in values]
    if are_free == [True, False]:
        rows, columns = columns, rows
    is_chosen = sum(are_free) == 1 or not only_linear
    fits = is_chosen and min(rows, summed, columns) >= NARROWEST
    return Sizes(rows, summed, columns) if fits and all(map(is_float32, eqn.invars)) else None


def pays(sizes: Sizes, card: Card) -> bool:
    """Whether float8 saves more arithmetic than it adds bytes, forwards and backwards."""
    rows, summed, columns = sizes
    if not card.float8:
        return False
    each = 1 / card.rate("float16") - 1 / card.rate("float8")
    added = added_bytes(rows * summed, summed * columns, rows * columns)
    return PRODUCTS_OF_A_STEP * sizes.operations * each > added / (1e12 * card.memory)


def added_bytes(activation: int, weight: int, result: int) -> int:
    """The bytes that casts add to a step of a linear layer, from the elements of its tensors."""
    return BYTES_OF_ACTIVATION * (activation + result) + BYTES_OF_WEIGHT * weight
