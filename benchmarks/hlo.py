"""Reads an optimized XLA program: what it moves, starts, waits for and sends."""

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\})?")
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
CALLED = re.compile(
    r"\b(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)"
    r"|branch_computations=\{([^}]*)\}"
)
COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?$"
)
# These start no kernel.
FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all",
        "partition-id", "replica-id", "opt-barrier"}  # fmt: skip
# These update their first operand in place: the number of the operand with the new elements.
IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    shape: str
    op: str
    operands: list[str]
    attributes: str
    is_root: bool
    line: str


Computation = dict[str, Instruction]


class Counts(NamedTuple):
    """What a program does, by its text."""

    read: int = 0  # bytes, of the device's memory
    written: int = 0
    kernels: int = 0
    conditionals: int = 0
    copies: int = 0  # kernels that only copy
    collectives: tuple[int, ...] = ()  # the bytes of each

    def plus(self, other: "Counts", times: int = 1) -> "Counts":
        """Both, one after the other."""
        pairs: Any = zip(self, other, strict=True)
        return Counts(*(mine + times * its for mine, its in pairs))


def counts(text: str) -> Counts:
    """What the entry computation of an optimized program does, with all that it calls.

    A conditional counts as the branch that moves most, a loop as often as it is known to run.
    """
    computations, entry = parse(text)
    return counts_of(computations, entry)


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """The computations of a program by name, and the name of the entry."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if (head := COMPUTATION.match(line)) and " -> " in line:
            current = computations[head[2]] = {}
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := INSTRUCTION.match(line)):
            instruction = _instruction(found, line)
            current[instruction.name] = instruction
    return computations, entry


def _instruction(found: re.Match[str], line: str) -> Instruction:
    """`name = shape op(operands), attributes`, of which the shape may be a tuple."""
    rest = re.sub(r"/\*.*?\*/", "", found[3])
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    operands = re.findall(r"%([\w.\-]+)", rest[opening:closing])
    op = rest[:opening]
    return Instruction(found[2], shape, op, operands, rest[closing + 1 :], bool(found[1]), line)


def _closing(text: str, opening: int) -> int:
    """Where the parenthesis that opens there is closed."""
    depth = 0
    for i in range(opening, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise ValueError(f"Expected balanced parentheses; got {text[:200]!r}.")


def nbytes(shape: str, on_chip: bool = False) -> int:
    """The bytes of an array or of a tuple of arrays; those in a memory on the chip, whose layout
    has `S(1)`, say, count only if they are asked for."""
    total = 0
    for kind, sizes, layout in ARRAY.findall(shape):
        if on_chip or "S(" not in layout:
            elements = math.prod(int(n) for n in re.findall(r"\d+", sizes))
            total += math.ceil(elements * _bits(kind) / 8)
    return total


def _bits(kind: str) -> int:
    """The bits of an element, such as 8 of `f8e4m3fn`; a token has none."""
    found = re.match(r"[a-z]+(\d+)", kind)
    return int(found[1]) if found else 8 * (kind == "pred")


def counts_of(computations: dict[str, Computation], name: str) -> Counts:
    """What a computation moves and starts, with all that it calls."""
    computation, total = computations[name], Counts()
    for instruction in computation.values():
        op, called = instruction.op, list(called_by(instruction))
        if op == "conditional":
            branches = [counts_of(computations, branch) for branch in called]
            most = max(branches, key=lambda branch: branch.read + branch.written)
            total = total.plus(most).plus(Counts(conditionals=1))
        elif op in ("while", "call", "async-start"):
            known = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes)
            for inner in called:
                total = total.plus(counts_of(computations, inner), int(known[1]) if known else 1)
        elif op not in FREE and not op.endswith(("-done", "-update")):
            total = total.plus(_counts_of_kernel(instruction, computation, computations))
    return total


def called_by(instruction: Instruction) -> Iterator[str]:
    """The names of the computations that an instruction calls."""
    for one, several in CALLED.findall(instruction.attributes):
        yield from (one,) if one else re.findall(r"[\w.\-]+", several)


def _counts_of_kernel(
    kernel: Instruction, computation: Computation, computations: dict[str, Computation]
) -> Counts:
    shape = kernel.shape
    if COLLECTIVE.match(kernel.op):
        operands = " ".join(computation[name].shape for name in dict.fromkeys(kernel.operands))
        moved = nbytes(operands)
        return Counts(moved, moved, 1, collectives=(nbytes(operands, on_chip=True),))
    if kernel.op in ("copy-start", "slice-start"):  # the shape also has the operand, and a context
        (operand,) = kernel.operands[:1]
        moved = nbytes(computation[operand].shape)
        return Counts(moved, moved, 1, copies=1)
    if kernel.op == "custom-call" and "__cublas" in kernel.attributes:
        shape = re.sub(r", s8\[\d+\]\{0\}\)$", ")", shape)  # its workspace
    inside = None
    if kernel.op == "fusion":
        inside = computations[next(called_by(kernel))]
    read = sum(_bytes_read(kernel, computation, inside))
    return Counts(read, _bytes_written(shape, inside), 1, copies=int(_only_copies(kernel, inside)))


def _bytes_read(
    kernel: Instruction, computation: Computation, inside: Computation | None
) -> Iterator[int]:
    """The bytes of each operand: of one of which a kernel takes slices, only theirs."""
    seen = set()
    for number, name in enumerate(kernel.operands):
        whole = nbytes(computation[name].shape)
        uses = uses_of(inside, number) if inside else [(kernel, name)]
        if uses and all(_takes_a_part(user, operand) for user, operand in uses):
            yield min(whole, sum(_part(user) for user, _ in uses))
        elif name not in seen:
            seen.add(name)
            yield whole


def uses_of(inside: Computation, number: int) -> list[tuple[Instruction, str]]:
    """The instructions of a fusion that use its parameter of that number, behind bitcasts, each
    with the name of what it uses."""
    names = [i.name for i in inside.values() if f" parameter({number})" in i.line]
    uses = []
    for name in names:
        for user in inside.values():
            if name in user.operands:
                names.append(user.name) if user.op == "bitcast" else uses.append((user, name))
    return uses


def _takes_a_part(user: Instruction, operand: str) -> bool:
    return (
        user.op in ("slice", "dynamic-slice", "gather", *IN_PLACE) and user.operands[0] == operand
    )


def _part(user: Instruction) -> int:
    """What it reads of its first operand; one that is updated in place is not read."""
    return 0 if user.op in IN_PLACE else nbytes(user.shape)


def _bytes_written(shape: str, inside: Computation | None) -> int:
    """The bytes of the results: of one that is updated in place, only those of the update."""
    if inside is None:
        return nbytes(shape)
    root = next(i for i in inside.values() if i.is_root)
    results = [inside[name] for name in root.operands] if root.op == "tuple" else [root]
    total = 0
    for result in results:
        new = IN_PLACE.get(result.op)
        total += nbytes(result.shape if new is None else inside[result.operands[new]].shape)
    return total


def _only_copies(kernel: Instruction, inside: Computation | None) -> bool:
    copies = {"copy", "parameter", "bitcast", "tuple", "transpose"}
    if inside is None:
        return kernel.op in ("copy", "transpose")
    return {instruction.op for instruction in inside.values()} <= copies
