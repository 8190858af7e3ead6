"""The table of `any_function`, made of its results, and the failures that are known."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import between_marks

from .functions import FAMILIES

PAGE, MARK = "gradients-under-autocast.md", "any function"
RIGHT = 0.02  # the largest error of a gradient that is right
WORSE = 1.5  # times what float16 inputs move: then it is autocast that loses
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

# The cases that fail under default rules in float16, and what causes it.
ROUNDED = "operands and results of products are rounded, as in any float16"
KNOWN = {  # (name of the function, factor)
    ("attention by random features", "100"): "operands of products are below 6e-8, and divide",
    ("spectral distance", "1"): ROUNDED + "; the logarithm of a spectrum near 0",
    ("spectral distance", "100"): ROUNDED + "; the sign of a difference of spectra",
    ("matrix powers", "0.01"): "operands of products are below 6e-5, where float16 has fewer bits",
}


def write(functions: Row, docs: Path) -> None:
    """Writes the table between the marks of the page."""
    docs.mkdir(parents=True, exist_ok=True)
    file = docs / PAGE
    text = file.read_text() if file.exists() else f"<!-- {MARK} -->\n<!-- end of {MARK} -->\n"
    file.write_text(between_marks(text, markdown(functions), MARK))


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
    """The counted cases that are off, not finite, or end with an error that is not ours."""
    return {
        (name, factor): case[arm]
        for name, factor, case in each_case(functions)
        if case.get(arm, {"is": "right"})["is"] in ("off", "not finite", "error")
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
    counts, apart = kinds(functions, "autocast"), kinds(functions, "autocast", MOVED)
    plans, total = kinds(functions, "plan"), sum(counts.values())
    small = sum("needs a scale below 1" in case for _, _, case in each_case(functions))
    worse = sum(
        case["autocast"]["is"] == "not finite"
        or case["autocast"].get("error", 0.0) > WORSE * case["moved"]
        for _, _, case in each_case(functions, MOVED)
    )
    good = counts["right"] + counts["refused"]
    everywhere = (good + apart["right"]) / (total + sum(apart.values()) or 1)
    said = [
        f"- {len(functions)} functions make {sum(out.values())} cases, of which {out[COUNTED]} "
        f"count. Left out are {out[TOO_LARGE]} with numbers that do not fit float16, "
        f"{out[NO_FLOAT32]} in which float32 is not finite, and {out[NO_GRADIENT]} in which the "
        "gradient is zero.",
        f"- Of those that count, {percent(good / total)} are right or refused in float16, and "
        f"{counts['not finite']} are not finite. The goals are {percent(GOAL)} and 0. {small} need "
        "a loss scale below 1.",
        f"- With a plan, {plans['off']} are off, {plans['not finite']} not finite, and "
        f"{plans['error']} end with an error.",
        f"- Counted apart are {out[MOVED]} in which inputs and parameters that are rounded to "
        f"float16 once move the gradient in float32 by more than {percent(RIGHT)}. Autocast is "
        f"right in {apart['right']}, not finite in {apart['not finite']}, and moves it more than "
        f"{WORSE:g} times as far in {worse}. With them {percent(everywhere)} are right.",
    ]  # fmt: skip
    return table + "\n\n" + "\n".join(said)


def percent(share: float) -> str:
    """With a digit where it is not whole."""
    return f"{100 * share:.1f} %".replace(".0 %", " %")


def cells(some: Row) -> list[str]:
    """How many are right and how many not finite, by arm."""
    counts = [kinds(some, arm) for arm in ARMS]
    right = [f"{c['right']} of {sum(c.values())}" if c else "" for c in counts]
    return right + [str(c["not finite"]) if c else "" for c in counts]


def listed(functions: Row) -> str:
    """Each failure of ours, with its cause where it is known."""
    return "\n".join(
        f"{name} x{factor}, {arm}: {row['is']} {row.get('error') or row.get('says', '')} "
        f"{KNOWN.get((name, factor), '') if arm == 'autocast' else ''}"
        for arm in ("autocast", "plan")
        for (name, factor), row in failures(functions, arm).items()
    )


def reaches_the_goal(functions: Row) -> bool:
    """Whether default rules in float16 are right often enough, and never not finite."""
    counts = kinds(functions, "autocast")
    enough = counts["right"] + counts["refused"] >= GOAL * sum(counts.values())
    return enough and not counts["not finite"]
