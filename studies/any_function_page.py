"""The table of `any_function`, made of its results, and the failures that are known."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import between_marks

from .functions import FAMILIES

PAGE, MARK = "autocast.md", "any function"
GOAL = 0.98  # of the cases are right or refused under default rules in float16
ARMS = {
    "autocast": "autocast float16",
    "plan": "with a plan",
    "bfloat16": "autocast bfloat16",
    "torch float16": "torch float16",
    "torch bfloat16": "torch bfloat16",
}
COUNTED = "counted"
# Why a case is left out.
NO_FLOAT32, NO_GRADIENT = "float32 is not finite", "the gradient is zero"
TOO_LARGE, MOVED = "numbers do not fit float16", "float16 inputs already move it"

Row = dict[str, Any]

# The cases that fail under default rules in float16, and the operation that causes it.
KNOWN: dict[tuple[str, str], str] = {}  # (name of the function, factor)


def write(functions: Row, docs: Path) -> None:
    """Writes the table between the marks of the page."""
    file = docs / PAGE
    file.write_text(between_marks(file.read_text(), markdown(functions), MARK))


def each_case(functions: Row, status: str = COUNTED) -> Iterator[tuple[str, str, Row]]:
    """The cases of a status: the name of the function, the factor, the case."""
    for name, row in functions.items():
        for factor, case in row["cases"].items():
            if case["status"] == status:
                yield name, factor, case


def kinds(functions: Row, arm: str, status: str = COUNTED) -> Counter[str]:
    """How many cases of each class an arm has."""
    return Counter(case[arm]["is"] for _, _, case in each_case(functions, status) if arm in case)


def failures(functions: Row, arm: str = "autocast") -> dict[tuple[str, str], Row]:
    """The counted cases that are off or not finite."""
    return {
        (name, factor): case[arm]
        for name, factor, case in each_case(functions)
        if case.get(arm, {"is": "right"})["is"] in ("off", "not finite")
    }


def markdown(functions: Row) -> str:
    """The table of the page, and the totals."""
    head = ["functions", "cases", *(f"right: {name}" for name in ARMS.values()),
            *(f"not finite: {name}" for name in ARMS.values())]  # fmt: skip
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for family, name in (*FAMILIES.items(), (None, "all")):
        some = {n: row for n, row in functions.items() if family in (None, row["family"])}
        if some:
            lines.append([name, str(sum(1 for _ in each_case(some))), *cells(some)])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    out = Counter(case["status"] for row in functions.values() for case in row["cases"].values())
    total, right = sum(kinds(functions, "autocast").values()), kinds(functions, "autocast")
    apart = kinds(functions, "autocast", MOVED)
    said = [
        f"{len(functions)} functions, {sum(out.values())} cases, of which {out[COUNTED]} count.",
        f"Left out: {out[TOO_LARGE]} with numbers that do not fit float16, {out[NO_FLOAT32]} in "
        f"which float32 is not finite, {out[NO_GRADIENT]} in which the gradient is zero.",
        f"Counted apart: {out[MOVED]} in which float16 inputs alone move the gradient by more "
        f"than 2 %; autocast in float16 is right in {apart['right']} of them and not finite in "
        f"{apart['not finite']}.",
        f"Right or refused in float16: {100 * (right['right'] + right['refused']) / total:.1f} % "
        f"(goal: {100 * GOAL:.0f} %); not finite: {right['not finite']} (goal: 0).",
    ]  # fmt: skip
    return table + "\n\n" + "\n".join(said)


def cells(some: Row) -> list[str]:
    """How many are right and how many not finite, by arm."""
    counts = [kinds(some, arm) for arm in ARMS]
    right = [f"{c['right']} of {sum(c.values())}" if c else "" for c in counts]
    return right + [str(c["not finite"]) if c else "" for c in counts]


def listed(functions: Row) -> str:
    """Each failure of ours, with its cause where it is known."""
    return "\n".join(
        f"{name} x{factor}, {arm}: {row['is']} {row['error'] or ''} "
        f"{KNOWN.get((name, factor), '') if arm == 'autocast' else ''}"
        for arm in ("autocast", "plan")
        for (name, factor), row in failures(functions, arm).items()
    )


def reaches_the_goal(functions: Row) -> bool:
    """Whether default rules in float16 are right often enough, and never not finite."""
    counts = kinds(functions, "autocast")
    enough = counts["right"] + counts["refused"] >= GOAL * sum(counts.values())
    return enough and not counts["not finite"]
