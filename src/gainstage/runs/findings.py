"""The findings of a report, as text for the terminal and the page."""

import math
from typing import Any, NamedTuple

import numpy as np

from gainstage.rules.base import as_power
from gainstage.runs.alarms import alarms_in
from gainstage.runs.causes import why_skipped
from gainstage.runs.replay import Outcome, advice, replay
from gainstage.runs.run import Run, measures
from gainstage.runs.telemetry import underflow_summary

SHOWN = 20  # tensors
LONGEST = 200  # characters of a name


class Rows(NamedTuple):
    """A table: its title, the names of its columns, its cells, and a line below."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str = ""


class Flushed(NamedTuple):
    """What float16 does to a tensor: shares, NaN if not known."""

    name: str
    error: float
    unscaled_error: float
    flushed: float
    subnormal: float
    zero: float


class Findings(NamedTuple):
    """All findings about a run, without its curves."""

    headline: dict[str, str]
    advice: list[str]
    overflows: Rows
    underflow: list[Flushed]
    underflow_summary: list[str]  # sentences on underflow
    replay: Rows


def findings(run: Run) -> Findings:
    """Returns the findings on a run: its numbers, its alarms, and what other rules would do."""
    outcomes, sentences = _replay(run)
    alarms = [printable(alarm.message, 10 * LONGEST) for alarm in alarms_in(run)]
    lost = underflow(run)
    summary, sentences = _underflow_summary(run), alarms + sentences
    return Findings(headline(run), sentences, overflows(run), lost, summary, outcomes)


def headline(run: Run) -> dict[str, str]:
    """Formats the numbers of a run, by their labels; what was not recorded is left out."""
    found = measures(run)
    forms = {
        "Steps recorded": "{steps} ({first} to {last})",
        "Skipped, of those recorded": "{skipped} ({skipped_share:.1%})",
        "Causes": "{causes}",
        "Finite, but skipped by apply_if": "{vetoed}",
        "Longest run of skipped steps": "{longest}",
        "Loss scale, first and last": "{scale_first}, {scale_last}",
        "Loss scale, lowest and highest": "{scale_lowest}, {scale_highest}",
        "Steps at the lowest": "{at_lowest} ({lowest_share:.1%})",
        "Times raised, lowered": "{raised}, {lowered}",
        "Loss, first and last tenth (median)": "{loss_first:.4g}, {loss_last:.4g}",
        "Norm of all gradients (median)": "{grad_norm:.4g}",
    }
    shown: dict[str, Any] = {
        k: as_power(v) if k.startswith("scale") else v for k, v in found.items()
    }
    shown["skipped_share"] = found.get("skipped", 0) / found["steps"]
    shown["lowest_share"] = found.get("at_lowest", 0) / found["steps"]
    counts = {cause: int(mask.sum()) for cause, mask in why_skipped(run).items()}
    if any(counts.values()):
        shown["causes"] = ", ".join(f"{n} {cause}" for cause, n in counts.items() if n)
    rows = made(run)
    for name, form in forms.items():
        try:
            rows[name] = form.format(**shown)
        except KeyError:
            continue
    return rows


def made(run: Run) -> dict[str, str]:
    """Formats the first line of the recording, as far as it is there."""
    rows = {}
    if rule := run.made.get("rule"):
        rows["Rule"] = printable(rule)
    if dtypes := run.made.get("dtypes"):
        counts = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.items())
        rows["Parameters"] = printable(counts)
    if versions := run.made.get("versions"):
        rows["Versions"] = printable(", ".join(f"{name} {at}" for name, at in versions.items()))
    return rows


def overflows(run: Run) -> Rows:
    """The tensors with non-finite gradients, the most frequent first."""
    columns = ["Tensor", "Inf", "NaN", "First", "Last"]
    hit = {name: known for name, known in run.tensors.items() if known["first"] >= 0}
    names = sorted(hit, key=lambda name: -max(hit[name]["inf"], hit[name]["nan"]))
    headroom = any("headroom" in known for known in hit.values())
    rows = []
    for name in names[:SHOWN]:
        known = hit[name]
        row = [printable(name), *(f"{known[key]}" for key in ("inf", "nan", "first", "last"))]
        bits = known.get("headroom", math.nan)
        rows.append((*row, *([f"{bits:.1f}" if math.isfinite(bits) else "-"] * headroom)))
    clean = len(run.tensors) - len(hit)
    notes = [f"and {len(names) - SHOWN} more"] * (len(names) > SHOWN)
    notes += [
        "Inf, NaN: in how many skipped steps the tensor held one. First, last: which steps.",
        f"Tensors that were finite in every step: {clean}.",
    ]
    notes += [
        "Headroom: how often the scale could be doubled before this gradient overflows; values "
        "inside of the network may overflow earlier."
    ] * headroom
    note = "\n".join(notes) if names else ""
    columns += ["Headroom (bits)"] * headroom
    return Rows("Tensors that overflowed", tuple(columns), rows, note)


def underflow(run: Run) -> list[Flushed]:
    """The tensors with flushed or subnormal elements, the worst first."""
    shares = [
        Flushed(printable(name), *(known.get(key, math.nan) for key in Flushed._fields[1:]))
        for name, known in run.tensors.items()
    ]
    worst = sorted(shares, key=lambda s: tuple(-np.nan_to_num([s.error, s.flushed, s.subnormal])))
    return [share for share in worst if share.flushed > 0 or share.subnormal > 0]


def _underflow_summary(run: Run) -> list[str]:
    """Sentences on whether float16 loses what matters, if that was recorded."""
    known = {printable(name): k for name, k in run.tensors.items() if k.get("error", math.nan) >= 0}
    if not known:
        return []
    underflows = any(k.get("flushed", 0) > 0 or k.get("subnormal", 0) > 0 for k in known.values())
    error, unscaled = (
        {name: k[which] for name, k in known.items() if k.get(which, math.nan) >= 0}
        for which in ("error", "unscaled_error")
    )
    never_scaled = (run.get("loss_scale") == 1).all()
    return underflow_summary(error, {} if never_scaled else unscaled, underflows)


def _replay(run: Run) -> tuple[Rows, list[str]]:
    """The table of what other rules would have done, and advice from it."""
    title = "What other rules would have done"
    columns = ("Rule", "Skipped", "Lowest", "Highest", "Last", "Bits", "Presumed")
    try:
        replayed = replay(run)
    except ValueError as error:
        return Rows(title, columns, [], str(error)), []

    def row(name: str, of: Outcome) -> tuple[str, ...]:
        scales = [as_power(float(scale)) for scale in (of.scales.min(), of.scales.max())]
        bits = f"{of.bits:+.1f}" if math.isfinite(of.bits) else "-"
        presumed = f"{of.presumed.mean():.0%}"
        return (name, f"{of.skips.sum()}", *scales, as_power(float(of.scales[-1])), bits, presumed)

    rows = [row("as recorded", replayed.recorded)]
    rows += [row(name, outcome) for name, outcome in replayed.outcomes.items()]
    notes = [
        f"Skipped: {bad} of them at any scale that was tried."
        if (bad := int(replayed.recorded.bad.sum()))
        else "Skipped: how many steps would have been.",
        "Lowest, highest, last: the loss scale.",
        "Bits: by how many powers of two the scale was above (+) or below (-) the highest one that "
        "is known to be finite, on average.",
        "Presumed: the share of steps of which the recording does not show what would happen.",
    ]
    if "FixedLossScale(1.0)" in replayed.outcomes and len(lost := _underflow_summary(run)) > 1:
        notes.append(f"FixedLossScale(1.0) does not scale. {lost[1]}")
    notes += [f"{name}: {reason}." for name, reason in replayed.left_out.items()]
    return Rows(title, columns, rows, "\n".join(notes)), advice(replayed, run.made.get("rule", ""))


def printable(text: str, longest: int = LONGEST) -> str:
    """Cuts and escapes a name from a file, so that it is one line and safe in a terminal."""
    cut = text if len(text) <= longest else f"{text[: longest - 3]}..."
    return cut if cut.isprintable() else cut.encode("unicode_escape").decode("ascii")
