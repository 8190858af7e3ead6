"""The X-ray of a step as one HTML file."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from gainstage._base.checks import as_power
from gainstage.runs.render import render
from gainstage.runs.rows import Rows
from gainstage.xray.causes import LOST
from gainstage.xray.remedies import GOOD
from gainstage.xray.windows import Window, together

if TYPE_CHECKING:
    from gainstage.xray.xray import Xray

SHOWN_ON_PAGE = 20  # causes and gradients
LAYERS = 40


def page(x: "Xray") -> str:
    """Returns the page of an X-ray, as HTML.

    Args:
        x: the X-ray.
    """
    bad = [name for name, error in x.gradient_errors.items() if math.isnan(error)]
    headline = {
        "Loss": _number(x.loss, ".4g", "not finite"),
        "Loss scale": as_power(x.scale),
        "Gradients that are not finite": f"{len(bad)} of {len(x.gradient_errors)}",
    }
    errors = {name: error for name, error in x.gradient_errors.items() if not math.isnan(error)}
    drawn = {"windows": _windows(x.windows(), x.scale), "errors": _errors(errors)}
    shares = {"good": f"{GOOD:.0%}", "lost": f"{LOST:.0%}"}
    values = {"headline": headline, "tried": _tried(x), "bad": bad, "shown": SHOWN_ON_PAGE}
    return render("xray.html", "X-ray of a step", x=x, **drawn, **shares, **values)


def _number(number: float, form: str, other: str = "-") -> str:
    return format(number, form) if math.isfinite(number) else other


def _tried(x: "Xray") -> Rows:
    """The changes that were tried, or why none was."""
    rows = [
        (r.change, "yes" if r.is_finite else "no", _number(r.loss, ".4g"), _number(r.error, ".2%"))
        for r in x.remedies
    ]
    notes = ["Error: of all gradients together, relative to float32."] * bool(rows)
    notes += [f"{r.change}, as code: {r.code}" for r in x.remedies if r.code and r.helps]
    notes += [said for said in (x.caution, x.conclusion) if said]
    return Rows("Tried", ("Change", "Finite", "Loss", "Error"), rows, notes)


class Bar(NamedTuple):
    """A row of a chart: a name, a number and a bar, from and to per cent of the width."""

    name: str
    number: str
    left: float
    right: float
    kind: str = ""
    is_limit: bool = False  # whether its name is stressed


class Chart(NamedTuple):
    """Bars on one axis: its labels, a shaded range and a line, by their places in per cent."""

    bars: list[Bar]
    more: int  # bars that are not shown
    ticks: dict[float, str]
    shade: tuple[float, float] | None = None
    now: float | None = None
    lead: str = ""


def _windows(windows: Mapping[str, Window], scale: float) -> Chart:
    """A bar for each layer on an axis of powers of two."""
    now, fits = math.log2(scale), together(windows)
    ends = [now, *(end for w in windows.values() for end in w[:2] if math.isfinite(end))]
    low, high = math.floor(min(ends)) - 1, math.ceil(max(ends)) + 1
    every = max(1, math.ceil((high - low) / 8))

    def at(number: float) -> float:
        return 100 * (min(max(number, low), high) - low) / (high - low)

    fitting = {layer: w.low <= now <= w.high for layer, w in windows.items()}
    first = sorted(windows, key=lambda layer: (fitting[layer], windows[layer].high))[:LAYERS]
    bars = [
        Bar(layer, "none" if w.is_empty else _span(w), at(min(w[:2])), at(max(w[:2])),
            "" if fitting[layer] else "most", layer == fits.highest)
        for layer, w in windows.items() if layer in first
    ]  # fmt: skip
    ticks = {
        at(power): f"2^{power}" for power in range(-(-(low + 1) // every) * every, high, every)
    }
    shade = None if fits.is_empty else (at(fits.low), at(fits.high))
    if fits.is_empty:
        needs = f"{fits.lowest} needs at least 2^{fits.low:g}"
        lead = f"No scale fits all layers: {needs}, {fits.highest} overflows above 2^{fits.high:g}."
    else:
        which = f"from {_span(fits)}" if math.isfinite(fits.low) else _span(fits)
        lead = f"Scales {which} fit all layers. Above, {fits.highest} overflows."
    return Chart(bars, len(windows) - LAYERS, ticks, shade, at(now), lead)


def _span(window: Window) -> str:
    low, high = (f"2^{end:g}" for end in window[:2])
    return f"{low} to {high}" if math.isfinite(window.low) else f"up to {high}"


def _errors(errors: Mapping[str, float]) -> Chart:
    """A bar for each of the worst gradients, on an axis of powers of ten."""

    def at(error: float) -> float:
        return 100 * (math.log10(min(max(error, 10**-4.3), 10**0.3)) + 4.3) / 4.6

    bars = [
        Bar(name, f"{error:.2%}" if error < 10 else "> 1000%", 0, at(error),
            "" if error <= GOOD else "much" if error <= LOST else "most")
        for name, error in list(errors.items())[:SHOWN_ON_PAGE]
    ]  # fmt: skip
    ticks = {at(10.0**power): f"{10.0 ** (power + 2):g}%" for power in range(-4, 1)}
    return Chart(bars, len(errors) - SHOWN_ON_PAGE, ticks)
