"""No loss-scale rule has a state from which training does not recover.

Every reachable state of each rule is visited, under every kind of batch, by the step that users
take; what must hold is checked in each. The rules of other libraries are searched in the same way.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import between_marks, environment, file_to_write

from . import DOCS, RESULTS
from .rules_invariants import broken_by
from .rules_machines import machines
from .rules_peers import installed, versions
from .rules_search import Machine, Search, in_words

# What is known to break: words of the row or setting, the invariant, the path. It is printed, and
# is no failure; one that does not break any more is.
FOUND = [
    # The first try heals the scale, and the second, with measured gradients, moves it on.
    ("AdaptiveLossScale`, retries", "recovers",
     "load a scale of 0 or inf or -inf, tiny gradients"),
    # The first decrease raises such a scale to the minimum, by more than one factor.
    ("below the minimum", "bad data", "NaN data"),
    # Without the loss the rule cannot know, and tries `2**-12` of its scale.
    ("without a loss", "bad data", "NaN data"),
    # After twelve overflows in a row any bad step undoes the twelve decreases.
    ("AdaptiveLossScale", "bad data", "tiny gradients, 12 x overflow, NaN data"),
    # The first overflow does not lower the scale, so there is nothing to try again.
    ("hysteresis=2", "few lost", "4 x finite, (4 x overflow above 2**4) for ever"),
]  # fmt: skip


def examined(chosen: Iterable[Machine]) -> dict[str, Any]:
    """What is kept of all machines: for each row the settings, the states, and what is broken."""
    rows: dict[str, dict[str, Any]] = {}
    for machine in chosen:
        search = Search(machine)
        row = rows.setdefault(
            machine.row,
            {"ours": machine.ours, "changes": False, "settings": 0, "states": 0, "broken": {}},
        )
        row["changes"] |= machine.period > 0
        row["settings"] += 1
        row["states"] += len(search)
        for name, path in broken_by(search).items():
            row["broken"].setdefault(name, []).append([machine.setting, in_words(path), len(path)])
    return {"environment": environment(), "versions": versions(), "rows": rows}


def new_breaks(results: dict[str, Any]) -> list[str]:
    """What a rule of ours breaks and is not known."""
    return [
        f"{where} breaks {name!r}: {path}"
        for where, name, path in breaks(results)
        if not known(where, name, path)
    ]


def failures(results: dict[str, Any]) -> list[str]:
    """What is new, and what is known and does not break any more."""
    still = [item for broken in breaks(results) for item in known(*broken)]
    mended = [f"{item} does not break any more." for item in FOUND if item not in still]
    return new_breaks(results) + mended


def breaks(results: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Row and setting, invariant, and path of all that rules of ours break."""
    ours = {row: found for row, found in results["rows"].items() if found["ours"]}
    return [
        (f"{row}, {setting}", name, path)
        for row, found in ours.items()
        for name, paths in found["broken"].items()
        for setting, path, _ in paths
    ]


def known(where: str, name: str, path: str) -> list[tuple[str, str, str]]:
    """What is known of it."""
    return [item for item in FOUND if item[0] in where and item[1:] == (name, path)]


def table(results: dict[str, Any]) -> list[list[str]]:
    """The lines: rule, settings, states, and each broken invariant with its shortest path."""
    lines = [["rule", "settings", "states", "broken", "shortest path"]]
    for row, found in results["rows"].items():
        numbers = [str(found["settings"]), str(found["states"])]
        none = "none" if found["changes"] else "none (the scale never changes)"
        lines.append([row, *numbers, *([none, ""] if not found["broken"] else ["", ""])])
        for place, (name, paths) in enumerate(found["broken"].items()):
            setting, path, _ = min(paths, key=lambda p: p[2])
            where = f"{setting}: " if found["settings"] > 1 else ""
            if place:
                lines.append(["", "", "", "", ""])
            lines[-1][3:] = [name, where + path]
    return lines


def markdown(results: dict[str, Any]) -> str:
    """The part of the page that the results make."""
    heading, *rows = table(results)
    marks = ["---", "---:", "---:", "---", "---"]
    lines = [f"| {' | '.join(line)} |" for line in (heading, marks, *rows)]
    parts = [re.sub(r"2\*\*-?\d+", r"`\g<0>`", "\n".join(lines))]
    about, others = results["environment"], results["versions"]
    if left_out := [name for name, version in others.items() if not version]:
        parts.append(f"Not installed, so left out: {', '.join(left_out)}.")
    names = {name: about[name] for name in ("gainstage", "jax")} | others
    said = ", ".join(f"{name} {version}" for name, version in names.items() if version)
    parts.append(f"Searched on {about['device']} with {said}.")
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> None:
    """Searches all rules, prints the table, and writes the results and their page."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    place = RESULTS / "rules" / "never_die.json"
    parser.add_argument("--output", type=file_to_write, default=place)
    parser.add_argument("--page", type=Path, default=DOCS / "faults.md")
    options = parser.parse_args(argv)
    results = examined([*machines(), *installed()])
    print(markdown(results))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=1) + "\n")
    if options.page.exists():
        text = options.page.read_text()
        options.page.write_text(between_marks(text, markdown(results), "rules"))
    if said := failures(results):
        sys.exit("\n".join(said))


if __name__ == "__main__":
    main()
