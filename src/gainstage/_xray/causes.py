"""The causes of a bad step: the first non-finite or wrong results with good operands."""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from gainstage._programs.in_dtype import HALF
from gainstage._programs.jaxprs import OPAQUE
from gainstage._programs.operations import Trait, names_with
from gainstage._programs.places import layer_of
from gainstage._xray.numbers import largest, smallest
from gainstage._xray.walk import Ran, Result

LOST = 0.05  # the relative error by underflow that counts as a cause
NEGLIGIBLE = (
    1e-5  # of the largest gradient, or of all: below it a gradient cancels to rounding errors
)
CONVERT = "convert_element_type"  # JAX's name for a change of dtype, which no user writes
ADDS = names_with(Trait.ADDS)  # operations in which a small operand matters little
HINTS = {
    "log": "log(0): keep its operand above 0",
    "log1p": "log1p(-1): keep its operand above -1",
    "div": "a division by 0: keep the divisor away from 0",
    "sqrt": "the derivative of sqrt is infinite at 0: take sqrt(jnp.where(x > 0, x, 1))",
    "rsqrt": "rsqrt(0): add an epsilon that the dtype holds",
    "pow": "a power of 0: keep its operand above 0",
    "integer_pow": "a power of 0: keep its operand away from 0",
}


class Cause(NamedTuple):
    """A result or argument where non-finite numbers start, or where numbers are lost."""

    kind: str  # "overflow", "underflow", "invalid", "argument", "constant" or "unseen"
    operation: str  # the primitive, such as "dot_general"; "" for arguments and constants
    is_backward: bool
    dtype: str
    shape: tuple[int, ...]
    layer: str  # the layer of the parameter used here, or used last before
    place: str  # line, parameter and scope, as text
    line: str  # file and line of the user
    iteration: int | None  # of the innermost loop around it
    elements: int  # the number of elements that are not finite, or lost
    of: int  # the number of all elements
    float32: float  # the largest value in float32
    message: str  # what happened, and what the limits are
    result: int  # its index among the results of the X-ray

    @property
    def name(self) -> str:
        """Its operation, as users know it; the kind of an argument or a constant."""
        return operation_name(self.operation, self.dtype) if self.operation else self.kind

    def __str__(self) -> str:
        if not self.operation:
            return self.message
        way = "backward" if self.is_backward else "forward"
        dtype = "" if self.name.endswith(self.dtype) else f" {self.dtype}"
        where = f"{way} {self.name}{dtype}{list(self.shape)}, {self.place}"
        turn = "" if self.iteration is None else f", iteration {self.iteration}"
        return f"{where}{turn}: {self.message}"


def operation_name(operation: str, dtype: np.dtype | str) -> str:
    """An operation as users know it: a change of dtype is a rounding or a conversion."""
    if operation != CONVERT:
        return operation
    return f"{'rounding' if np.dtype(dtype) in HALF else 'conversion'} to {dtype}"


def described(result: Result) -> str:
    """The operation of a result, with its dtype."""
    name = operation_name(result.op, result.dtype)
    return name if name.endswith(str(result.dtype)) else f"{name} {result.dtype}"


def line_of_result(ran: Ran, result: Result) -> str:
    """The user's line of a result. If it has none, as a rounding under `autocast`, it is the line
    of the first operation that reads it, or else of one that makes it."""
    if result.place.line or not result.path:
        return result.place.line
    readers = (r for r in ran.results[result.id + 1 :] if result.id in r.operands)
    makers = (ran.results[i] for i in result.operands)
    return next((r.place.line for r in (*readers, *makers) if r.place.line), "")


def causes_of(ran: Ran) -> list[Cause]:
    """The causes of a non-finite loss or gradient: arguments first, then in program order."""
    return [_with_line(ran, cause) for cause in _causes(ran)]


def _with_line(ran: Ran, cause: Cause) -> Cause:
    line = line_of_result(ran, ran.results[cause.result])
    if cause.line or not line:
        return cause
    return cause._replace(line=line, place=f"{line}, {cause.place}".removesuffix(", "))


def _causes(ran: Ran) -> list[Cause]:
    arguments, born, masks = _traced(ran)
    found = [_argument(ran.results[i]) for i in arguments]
    if not found or born:
        found += _once(_born(ran, ran.results[i]) for i in born)
    if not found or (arguments and all(not ran.results[i].numbers.nan for i in arguments)):
        found += _once(_mask(ran.results[i]) for i in masks if ran.results[i].op != "constant")
    return found or [_argument(ran.results[i]) for i in masks if ran.results[i].op == "constant"]


def _traced(ran: Ran) -> tuple[list[int], list[int], list[int]]:
    """The bad arguments, the results that are the first bad ones, and NaN from infinities of the
    program itself."""
    results = ran.results
    of_arguments: set[int] = set()  # bad results that follow from a bad argument
    for result in results:
        begins = result.op == "argument" or of_arguments.intersection(result.operands)
        if result.numbers.bad and begins:
            of_arguments.add(result.id)
    outs = zip((ran.loss, *ran.gradients), ran.origins, strict=True)
    todo = [i for _, i in outs if i is not None and results[i].numbers.bad]
    seen: set[int] = set()
    arguments: list[int] = []
    born: list[int] = []
    masks: list[int] = []
    while todo:
        i = todo.pop()
        if i in seen:
            continue
        seen.add(i)
        result = results[i]
        bad = [j for j in result.operands if results[j].numbers.bad]
        todo += bad
        if result.op == "argument":
            arguments.append(i)
        elif result.op == "constant":
            (arguments if result.numbers.nan else masks).append(i)
        elif result.is_born:
            born.append(i)
        elif i in of_arguments:
            continue
        elif result.numbers.nan and not any(results[j].numbers.nan for j in bad):
            masks.append(i)
    return sorted(arguments), sorted(born), sorted(masks)


def _once(causes: Iterator[Cause]) -> list[Cause]:
    """Drops repeated causes of one operation at one place, such as in later iterations."""
    known: dict[tuple[object, ...], Cause] = {}
    for cause in causes:
        key = (cause.operation, cause.is_backward, cause.place, cause.kind)
        known.setdefault(key, cause)
    return list(known.values())


def _argument(result: Result) -> Cause:
    n = result.numbers
    name = result.place.near or "an array that the loss closes over"
    message = f"{name} has {_plural(n.bad, 'element')} of {n.size} that {_are(n.bad)} not finite"
    if result.shape and n.first_bad >= 0:
        index = list(map(int, np.unravel_index(n.first_bad, result.shape)))
        message += f", {'the first at' if n.bad > 1 else 'at'} {index}"
    return _cause("argument" if result.op == "argument" else "constant", result, n.bad, message, "")


def _mask(result: Result) -> Cause:
    nan, elements = result.numbers.nan, _plural(result.numbers.size, "element")
    message = (
        f"{nan} of {elements} {_are(nan)} NaN, out of an infinity that stands in the program "
        f"itself: does a mask hide everything in a row?"
    )
    return _cause("invalid", result, nan, message)


def _born(ran: Ran, result: Result) -> Cause:
    n, ref = result.numbers, result.ref
    counts = f"{n.bad} of {_plural(n.size, 'element')}"
    not_finite = f"{counts} {_are(n.bad)} not finite"
    if result.op in OPAQUE:
        message = f"{not_finite}. The X-ray does not look inside of {result.op}"
        return _cause("unseen", result, n.bad, message)
    flushed = next((ran.results[i] for i in result.operands if ran.results[i].flushed), None)
    if result.overflows:
        message = (
            f"{counts} overflow{'s' * (n.bad == 1)}; float32 has {ref.max:.3g}, {result.dtype} "
            f"ends at {largest(result.dtype):.5g}"
        )
        return _cause("overflow", result, n.bad, message)
    if not ref.bad and flushed is not None:
        message = (
            f"{not_finite}, because {_plural(flushed.flushed, 'element')} of an operand "
            f"({described(flushed)}) {_are(flushed.flushed)} 0, but not in float32"
        )
        return _cause("underflow", result, n.bad, message)
    if not ref.bad and result.is_half:
        message = f"{not_finite}; float32 has at most {ref.max:.3g}"
        return _cause("overflow", result, n.bad, message)
    operation = result.derivative_of or result.op
    hint = (
        HINTS.get(operation, "")
        if n.nan or operation in ("log", "div", "sqrt", "rsqrt", "pow")
        else ""
    )
    message = f"{not_finite}, and in float32 neither" + (f"; {hint}" if hint else "")
    return _cause("invalid", result, n.bad, message)


def losses_of(ran: Ran) -> list[Cause]:
    """The causes of losing more than 5 % of a gradient in a finite step, the worst first. They are
    overflows that a later operation makes finite, such as 1 / inf, and flushed results."""
    weights = importance(ran)
    found = _swallowed(ran, weights) or _flushed(ran, weights)
    return [_with_line(ran, cause) for cause in found]


def _swallowed(ran: Ran, weights: dict[int, float]) -> list[Cause]:
    readers: dict[int, list[Result]] = defaultdict(list)
    for result in ran.results:
        for i in result.operands:
            readers[i].append(result)

    def matters(result: Result) -> bool:
        each = readers[result.id]
        finite = (r for r in each if not r.numbers.bad)
        if any(r.error > LOST and weights.get(r.id, 0.0) > LOST for r in finite):
            return True
        return any(matters(r) for r in each if r.numbers.bad)

    born = (r for r in ran.results if r.is_born and r.is_half and not r.ref.bad)
    return _once(_born(ran, result) for result in born if matters(result))


def _flushed(ran: Ran, weights: dict[int, float]) -> list[Cause]:
    lost = {r.id: lost_share(r) * weights.get(r.id, 0.0) for r in ran.results if r.is_half}
    worst: dict[str, Result] = {}
    for i, share in lost.items():
        result = ran.results[i]
        before = max((lost.get(j, 0.0) for j in result.operands), default=0.0)
        if share < LOST or share < 2 * before or not result.flushed:
            continue
        known = worst.get(layer_of(result.place))
        if known is None or share > lost[known.id]:
            worst[layer_of(result.place)] = result
    causes = []
    for result in sorted(worst.values(), key=lambda r: -lost[r.id]):
        share = result.flushed / result.numbers.size
        message = (
            f"{share:.1%} of {result.numbers.size} elements are flushed to 0; float32 has at most "
            f"{result.ref.max:.3g}, {result.dtype} ends at {smallest(result.dtype):.2g}"
        )
        causes.append(_cause("underflow", result, result.flushed, message))
    return causes


def rounding(result: Result) -> float:
    """The error of rounding to subnormal numbers, relative to the root mean square."""
    ref = result.ref
    if not ref.rms or ref.bad:
        return 0.0
    others = (ref.size - ref.zero) / max(ref.size, 1)
    return smallest(result.dtype) / 12**0.5 * others**0.5 / ref.rms


def lost_share(result: Result) -> float:
    """`rounding`, at most 1."""
    return min(rounding(result), 1.0)


def importance(ran: Ran) -> dict[int, float]:
    """How much of a relative error of each result reaches a gradient: 1 if all of it does."""
    results, outs = ran.results, [i for i in ran.origins[1:] if i is not None]
    top = max((results[i].ref.rms for i in outs), default=0.0)
    weights = {i: 1.0 for i in outs if results[i].ref.rms > NEGLIGIBLE * top}
    for result in reversed(results):
        weight = weights.get(result.id)
        if weight is None:
            continue
        for i in result.operands:
            share = weight
            if result.op in ADDS and result.ref.rms:
                share *= min(results[i].ref.rms / result.ref.rms, 1.0)
            weights[i] = max(weights.get(i, 0.0), share)
    return weights


def _cause(
    kind: str, result: Result, elements: int, message: str, operation: str | None = None
) -> Cause:
    op = result.op if operation is None else operation
    if op and result.derivative_of:
        op = f"{op} (derivative of {result.derivative_of})"
    place = str(result.place) + (f" ({result.place.via})" if result.place.via and op else "")
    return Cause(
        kind=kind,
        operation=op,
        is_backward=result.is_backward,
        dtype=str(result.dtype),
        shape=tuple(result.shape),
        layer=layer_of(result.place),
        place=place,
        line=result.place.line,
        iteration=result.turns[-1] if result.turns else None,
        elements=elements,
        of=result.numbers.size,
        float32=math.inf if result.ref.bad else result.ref.max,
        message=message,
        result=result.id,
    )


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
