"""Wide twins of functions of the corpus whose products all have a narrow side.

The corpus has small shapes, and what a rule of cost keeps in float32 there it does not keep in a
network. So each such function is written again with sides of 64: by the numbers in its shapes, and
by those numbers in its body that are sizes too. Of several ways to do so the first is taken whose
products are all wide.
"""

import ast
import contextlib
import inspect
import itertools
import math
import sys
import textwrap
import warnings
from collections.abc import Iterator, Mapping

import jax

from gainstage._programs import jaxprs, patterns
from gainstage._programs.operations import PRODUCTS

from . import Function
from .spaces import JAX

WIDE = 64
LARGEST = 2**22  # numbers in all arrays of a twin
LONGEST = 5000  # operations in its program, which an unrolled loop may have
# Numbers below this are also exponents, axes and factors, so they are sizes only where one stands.
UNCLEAR = 5
TAKES_SIZES = {"reshape", "eye", "zeros", "ones", "arange", "one_hot", "linspace", "tile",
               "full", "split", "repeat", "broadcast_to", "segment_sum", "segment_max"}  # fmt: skip


def products(function: Function) -> list[tuple[int, ...] | None]:
    """The sides of all products of a function; None of a convolution."""
    params, data = function.arguments()
    every = list(jaxprs.equations(jax.make_jaxpr(function.loss(JAX))(params, data)))
    if len(every) > LONGEST:
        raise ValueError(f"Expected at most {LONGEST} operations; got {len(every)}.")
    return [patterns.sides(e) for e in every if e.primitive.name in PRODUCTS]


def is_narrow(function: Function) -> bool:
    """Whether a function has products, and all of them a narrow side."""
    found = products(function)
    return bool(found) and all(s is not None and min(s) <= patterns.NARROW for s in found)


class _Sizes(ast.NodeTransformer):
    """Puts new sizes into a body.

    Args:
        sizes: the new number for each size.
        everywhere: whether unclear numbers are sizes too, where sizes are taken.
    """

    def __init__(self, sizes: Mapping[int, int], everywhere: bool):
        self._sizes, self._everywhere, self._is_size = sizes, everywhere, False

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Numbers among the arguments of what takes sizes are sizes."""
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        name = node.func.id if isinstance(node.func, ast.Name) else name
        before, self._is_size = self._is_size, self._everywhere and name in TAKES_SIZES
        node = self.generic_visit(node)  # type: ignore[assignment]
        self._is_size = before
        return node

    def visit_Slice(self, node: ast.Slice) -> ast.AST:
        """Bounds of slices are sizes."""
        before, self._is_size = self._is_size, self._everywhere
        node = self.generic_visit(node)  # type: ignore[assignment]
        self._is_size = before
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """A number that is a size is replaced."""
        value = node.value
        is_size = isinstance(value, int) and not isinstance(value, bool) and value in self._sizes
        if not is_size or not (value >= UNCLEAR or self._is_size):
            return node
        return ast.copy_location(ast.Constant(self._sizes[value]), node)


def written_again(function: Function, sizes: Mapping[int, int], everywhere: bool) -> Function:
    """A function with other sizes in its shapes and its body."""

    def texts(text: str) -> str:
        words = (word.split() for word in text.split(",") if word.strip())
        new = ([w[0], *(str(sizes.get(int(x), x)) if x.isdigit() else bound(x) for x in w[1:])]
               for w in words)  # fmt: skip
        return ", ".join(" ".join(part) for part in new)

    def bound(word: str) -> str:  # of integers below a size
        number = word[1:]
        return f"<{sizes.get(int(number), number)}" if word.startswith("<") else word

    tree = ast.parse(textwrap.dedent(inspect.getsource(function.body)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    ast.fix_missing_locations(_Sizes(sizes, everywhere).visit(tree))
    scope = dict(vars(sys.modules[function.body.__module__]))
    exec(compile(tree, f"<{function.name}, wide>", "exec"), scope)
    body = scope[function.body.__name__]
    return function._replace(body=body, params=texts(function.params), data=texts(function.data))


def attempts(function: Function) -> Iterator[Function]:
    """A function in several ways with wide sides."""
    text = f"{function.params}, {function.data}"
    found = {int(word) for part in text.split(",") for word in part.split()[1:] if word.isdigit()}
    small = sorted(n for n in found if n < WIDE)
    several = (
        dict.fromkeys(small, WIDE),
        {n: WIDE * (1 + i) for i, n in enumerate(small)},
        dict.fromkeys([n for n in small if n >= UNCLEAR], WIDE),
    )
    for sizes, everywhere in itertools.product(several, (False, True)):
        found = written_again(function, sizes, everywhere)
        if elements(f"{found.params}, {found.data}") <= LARGEST:
            yield found


def elements(text: str) -> int:
    """How many numbers the arrays of a text have."""
    parts = [[int(word) for word in part.split()[1:] if word.isdigit()] for part in text.split(",")]
    return sum(map(math.prod, parts))


def twin_of(function: Function) -> Function | None:
    """The wide twin of a function with narrow products, or None."""
    for build in attempts(function):
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if all(min(sides or (0,)) >= WIDE for sides in products(build)):
                return build
    return None
