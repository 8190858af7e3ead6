"""The X-ray of a step as one HTML file."""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from gainstage.rules.base import as_power
from gainstage.runs.findings import LONGEST, SHOWN, Rows, printable
from gainstage.runs.html import document, numbers, table, text
from gainstage.xray.causes import LOST, Cause
from gainstage.xray.remedies import GOOD
from gainstage.xray.windows import Window, together

if TYPE_CHECKING:
    from gainstage.xray.xray import Xray

LAYERS = 40  # the number of layers that are drawn
STYLE = """\
.summary { border-left: 4px solid var(--fits); background: var(--box); padding: .75rem 1rem;
  margin: 0 0 .75rem; font-size: 1.0625rem; overflow-wrap: anywhere; }
.summary.lost { border-color: var(--loss); } .summary.bad { border-color: var(--overflow); }
:root { --fits: #2b8a4b; --shade: #e3f3e8; }
@media (prefers-color-scheme: dark) { :root { --fits: #5fc98a; --shade: #1c3527; } }
.cause { background: var(--box); border-radius: 6px; padding: .75rem 1rem; margin: .75rem 0; }
.cause h3 { margin: 0; font-size: 1rem; overflow-wrap: anywhere; }
.cause p { margin: .25rem 0; overflow-wrap: anywhere; }
.cause dl { display: flex; flex-wrap: wrap; gap: .25rem 2rem; font-size: .875rem; }
.cause dl div { padding: 0; } .cause dd { font-weight: 400; }
.chart { font-size: .8125rem; margin-top: .75rem; }
.row { display: grid; column-gap: .75rem; grid-template: "name track of" / 14rem 1fr 7.5rem; }
.row > * { padding: .2rem 0; min-width: 0; overflow-wrap: anywhere; }
.row .track, .row .under { grid-area: track; }
.row .of { grid-area: of; text-align: right; font-variant-numeric: tabular-nums; }
.row b { font-weight: 700; } .row .under { height: 1.4rem; padding: 0; }
.track { position: relative; min-height: 1.25rem; }
.track > * { position: absolute; }
.shade { background: var(--shade); } .track .shade { top: 0; bottom: 0; }
.track i { top: 50%; height: .625rem; margin-top: -.3125rem; border-radius: 2px; min-width: 2px; }
.track i, i.key { background: var(--curve); }
i.much { background: var(--loss); } i.most { background: var(--overflow); }
.track .line { top: 0; bottom: 0; width: 0; border-left: 1px solid var(--line); }
.track .now { border-left: 2px solid var(--ink); margin-left: -1px; }
i.key { display: inline-block; width: .9rem; height: .625rem; border-radius: 2px;
  margin-right: .3rem; }
i.shade.key { background: var(--shade); outline: 1px solid var(--fits); }
i.now.key { background: var(--ink); width: 2px; height: .9rem; vertical-align: -.15rem; }
.legend { color: var(--faint); font-size: .875rem; display: flex; flex-wrap: wrap;
  gap: .1rem 1.25rem; }
@media (max-width: 640px) {
  .row { grid-template: "name of" "track track" / 1fr max-content; padding-bottom: .3rem; }
}
"""


def page(x: "Xray") -> str:
    """Returns the page of an X-ray, as HTML.

    Args:
        x: the X-ray.
    """
    parts = [_summary(x), _headline(x), _causes(x.causes), _tried(x)]
    parts += [_windows(x.windows(), x.scale), _errors(x.gradient_errors), _unseen(x.unseen)]
    return document("X-ray of a step", parts, STYLE)


def _words(words: str) -> str:
    return text(printable(words, 10 * LONGEST))


def _summary(x: "Xray") -> str:
    kind = "bad" if not x.finite else "lost" if x.causes else "good"
    sentences = [x.summary, x.comparison]
    return f'<div class="summary {kind}">{_words(" ".join(filter(None, sentences)))}</div>'


def _headline(x: "Xray") -> str:
    bad = sum(math.isnan(error) for error in x.gradient_errors.values())
    loss = f"{x.loss:.4g}" if math.isfinite(x.loss) else "not finite"
    return numbers(
        {
            "Loss": loss,
            "Loss scale": as_power(x.scale),
            "Gradients that are not finite": f"{bad} of {len(x.gradient_errors)}",
        }
    )


def _causes(causes: list[Cause]) -> str:
    if not causes:
        return '<h2>Causes</h2><p class="note">None.</p>'
    return f"<h2>Causes</h2>{''.join(map(_cause, causes[:SHOWN]))}{_more(len(causes) - SHOWN, '')}"


def _cause(cause: Cause) -> str:
    way = "backward" if cause.is_backward else "forward"
    title = f"{cause.operation}, {way}" if cause.operation else cause.kind
    array = f"{cause.dtype}{list(cause.shape)}"
    facts = {"Layer": cause.layer, "Place": cause.place, "Array": array}
    if cause.iteration is not None:
        facts["Iteration"] = str(cause.iteration)
    known = {name: printable(fact) for name, fact in facts.items() if fact}
    return (
        f'<div class="cause"><h3>{_words(title)}</h3><p>{_words(cause.message)}</p>'
        f"{numbers(known)}</div>"
    )


def _tried(x: "Xray") -> str:
    """Draws the changes that were tried, or why none was."""
    rows: list[tuple[str, ...]] = [
        (
            printable(remedy.change, 10 * LONGEST),
            "yes" if remedy.is_finite else "no",
            f"{remedy.loss:.4g}" if math.isfinite(remedy.loss) else "-",
            f"{remedy.error:.2%}" if math.isfinite(remedy.error) else "-",
        )
        for remedy in x.remedies
    ]
    notes = ["Error: of all gradients together, relative to float32."] * bool(rows)
    notes += [x.conclusion] * bool(x.conclusion)
    return table(Rows("Tried", ("Change", "Finite", "Loss", "Error"), rows, "\n".join(notes)))


# ── the drawings ─────────────────────────────────────────────────────────────────────────────


class Axis(NamedTuple):
    """The axis that the rows of a drawing share: numbers from left to right, with labels."""

    low: float
    high: float
    ticks: Mapping[int, str]

    def row(self, name: str, number: str, marks: Iterable[str], stress: bool = False) -> str:
        """Draws a row: a name, a drawing and a number; `stress` makes the name bold."""
        word = f"<b>{_words(name)}</b>" if stress else _words(name)
        grid = "".join(self.line(at) for at in self.ticks)
        return (
            f'<div class="row"><code>{word}</code><div class="of">{_words(number)}</div>'
            f'<div class="track">{grid}{"".join(marks)}</div></div>'
        )

    def bar(self, low: float, high: float, kind: str = "") -> str:
        """Draws a bar between two numbers; infinity is drawn at the edge."""
        left, right = self._at(low), self._at(high)
        tag = "div" if kind == "shade" else "i"
        place = f"left:{left:.2f}%;width:{right - left:.2f}%"
        return f'<{tag} class="{kind}" style="{place}"></{tag}>'

    def line(self, at: float, kind: str = "") -> str:
        """Draws a vertical line."""
        return f'<div class="line {kind}" style="left:{self._at(at):.2f}%"></div>'

    def below(self) -> str:
        """Draws the labels of the axis."""
        words = "".join(
            f'<span style="left:{self._at(at):.2f}%">{text(word)}</span>'
            for at, word in self.ticks.items()
        )
        return f'<div class="row"><div class="under">{words}</div></div>'

    def _at(self, number: float) -> float:
        share = (min(max(number, self.low), self.high) - self.low) / (self.high - self.low)
        return 100 * share


def _windows(windows: Mapping[str, Window], scale: float) -> str:
    """Draws a bar for each layer on an axis of powers of two."""
    if not windows:
        return ""
    now, fits = math.log2(scale), together(windows)
    ends = [end for w in windows.values() for end in (w.low, w.high) if math.isfinite(end)]
    low, high = math.floor(min(now, *ends)) - 1, math.ceil(max(now, *ends)) + 1
    every = max(1, math.ceil((high - low) / 8))
    ticks = range(-(-(low + 1) // every) * every, high, every)
    axis = Axis(low, high, {at: f"2^{at}" for at in ticks})
    shade = "" if fits.is_empty else axis.bar(fits.low, fits.high, "shade")
    fitting = {layer: w.low <= now <= w.high for layer, w in windows.items()}
    first = sorted(windows, key=lambda layer: (fitting[layer], windows[layer].high))[:LAYERS]
    rows = ""
    for layer in [layer for layer in windows if layer in first]:
        window, kind = windows[layer], "" if fitting[layer] else "most"
        bars = [shade, axis.bar(min(window[:2]), max(window[:2]), kind), axis.line(now, "now")]
        rows += axis.row(layer, _span(window), bars, stress=layer == fits.highest)
    return (
        f"<h2>Loss scales that fit</h2><p>{_words(_fitting(fits))}</p>{LEGEND}"
        f'<div class="chart">{rows}{axis.below()}</div>'
        f"{_more(len(windows) - LAYERS, 'layers')}"
    )


LEGEND = (
    '<p class="note">Below its window, a result of the layer loses more than 1% to rounding. '
    'Above it, the layer overflows.</p><p class="legend"><span><i class="key"></i>fits the layer'
    '</span><span><i class="most key"></i>fits the layer; this step is outside</span>'
    '<span><i class="shade key"></i>fits all layers</span>'
    '<span><i class="now key"></i>the scale of this step</span></p>'
)


def _fitting(fits: Window) -> str:
    low, high = (f"2^{end:g}" for end in fits[:2])
    if fits.is_empty:
        needs = f"{fits.lowest} needs at least {low}, {fits.highest} overflows above {high}"
        return f"No scale fits all layers: {needs}."
    which = f"from {low} to {high}" if math.isfinite(fits.low) else f"up to {high}"
    return f"Scales {which} fit all layers. Above, {fits.highest} overflows."


def _span(window: Window) -> str:
    low, high = (f"2^{end:g}" for end in window[:2])
    if window.is_empty:
        return "none"
    return f"{low} to {high}" if math.isfinite(window.low) else f"up to {high}"


def _errors(errors: Mapping[str, float]) -> str:
    """Draws a bar for each of the worst gradients, on an axis of powers of ten."""
    if not errors:
        return ""
    axis = Axis(-4.3, 0.3, {at: f"{10.0 ** (at + 2):g}%" for at in range(-4, 1)})
    bad = [name for name, error in errors.items() if math.isnan(error)]
    finite = {name: error for name, error in errors.items() if not math.isnan(error)}
    rows = ""
    for name, error in list(finite.items())[:SHOWN]:
        kind = "" if error <= GOOD else "much" if error <= LOST else "most"
        bars = [axis.bar(-math.inf, math.log10(error), kind)] if error > 0 else []
        rows += axis.row(name, f"{error:.2%}" if error < 10 else "> 1000%", bars)
    chart = f'<div class="chart">{rows}{axis.below()}</div>' if finite else ""
    more = _more(len(finite) - SHOWN, "") + (ERRORS if finite else "")
    return f"<h2>Errors of the gradients, relative to float32</h2>{_bad(bad)}{chart}{more}"


ERRORS = (
    f'<p class="legend"><span><i class="key"></i>up to {GOOD:.0%}</span>'
    f'<span><i class="much key"></i>up to {LOST:.0%}</span>'
    '<span><i class="most key"></i>more</span></p>'
)


def _bad(names: list[str]) -> str:
    if not names:
        return ""
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    shown = ", ".join(f"<code>{_words(name)}</code>" for name in names[:SHOWN])
    return f"<p>Not finite: {shown}{more}.</p>"


def _unseen(operations: list[str]) -> str:
    names = ", ".join(operations)
    note = f"The X-ray does not look inside of {printable(names)}." if operations else ""
    return table(Rows("Not looked into", (), [], note))


def _more(count: int, of: str) -> str:
    return f'<p class="note">and {count} more {of}</p>' if count > 0 else ""
