"""The report as one HTML file that needs nothing else: no script, no font, no network.

Curves are stretched to the width of the window, and the words beside them are not: they stand
outside of the drawings. Whatever comes from the file is escaped.
"""

import html
import math
from collections.abc import Iterable
from string import Template

import numpy as np

from gainstage import __version__
from gainstage.diagnostics.findings import SHOWN, Findings, Flushed, Rows
from gainstage.diagnostics.runs import Run, why_skipped

ACROSS, DOWN = 1000, 200  # the units of a drawing, whatever its size is
BUCKETS = 500  # stretches of a curve of which its extremes are drawn
CURVES = {"loss_scale": "Loss scale", "loss": "Loss", "grad_norm": "Norm of all gradients"}

PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root { --paper: #ffffff; --ink: #1c2430; --faint: #5b6675; --line: #d9dee5; --box: #f4f6f8;
  --curve: #00798c; --overflow: #c9304e; --nan: #7a4fc0; --loss: #b36b00; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181e; --ink: #e4e8ee; --faint: #9aa5b4;
  --line: #333c48; --box: #1d232b; --curve: #45bccd; --overflow: #ff6f87; --nan: #b796ff;
  --loss: #f2ad45; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1100px; padding: 1.5rem 1.25rem 3rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.25rem 0 .5rem; }
p, ul { margin: .5rem 0; } ul { padding-left: 1.25rem; } li { overflow-wrap: anywhere; }
.note { color: var(--faint); font-size: .875rem; white-space: pre-line; }
.advice { border-left: 4px solid var(--curve); background: var(--box); padding: .5rem 1rem; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(240px, 1fr)); gap: .6rem;
  margin: 0; }
dl div { background: var(--box); border-radius: 6px; padding: .5rem .8rem; min-width: 0; }
dt { color: var(--faint); font-size: .8125rem; } dd { margin: 0; font-weight: 600;
  overflow-wrap: anywhere; }
.plot { display: grid; margin-top: .9rem; grid-template-columns: 4.25rem 1fr; font-size: .8125rem;
  padding-right: 1rem; }
.plot svg { display: block; width: 100%; height: 100%; overflow: visible; }
.plot path { fill: none; stroke: var(--curve); stroke-width: 1.25; stroke-linejoin: round;
  stroke-linecap: round;
  vector-effect: non-scaling-stroke; }
.plot .stairs { stroke-width: 2; } .plot .grid { stroke: var(--line); stroke-width: 1; }
.lane path { stroke-width: 2; stroke-linecap: butt; } .plot .overflow { stroke: var(--overflow); }
.plot .nan { stroke: var(--nan); } .plot .loss { stroke: var(--loss); }
.high { height: 190px; margin-bottom: .6rem; position: relative; }
.lane { height: 1.5rem; padding: .3rem 0; }
.high span, .under span { position: absolute; color: var(--faint); white-space: nowrap; }
.high span { right: .5rem; transform: translateY(-50%); }
.under { grid-column: 2; height: 1.4rem; position: relative; }
.under span { transform: translateX(-50%); }
.name { text-align: right; padding-right: .5rem; font-size: .75rem; line-height: 1.5rem;
  white-space: nowrap; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; }
th, td { text-align: right; padding: .35rem .5rem; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums; }
th { color: var(--faint); font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; }
td:first-child, code { font-family: ui-monospace, Consolas, "DejaVu Sans Mono", monospace;
  font-size: .8125rem; }
.bars td { width: 13%; } .bars td:first-child { width: 35%; }
.bar { height: .5rem; border-radius: 2px; background: var(--box); }
.bar i { display: block; height: 100%; min-width: 1px; border-radius: 2px; }
.error, .unscaled_error { background: var(--curve); }
.flushed { background: var(--overflow); } .subnormal { background: var(--loss); }
.zero { background: var(--faint); }
@media (max-width: 640px) {
  body { padding: 1rem .75rem 2rem; } .plot { grid-template-columns: 3.75rem 1fr; }
  .under span:nth-child(even) { display: none; } dl { grid-template-columns: 1fr 1fr; }
  .bars tr { display: grid; grid-template-columns: repeat(auto-fit, minmax(4.5rem, 1fr)); }
  .bars tr { border-bottom: 1px solid var(--line); padding-bottom: .3rem; }
  .bars tr > * { width: auto; border: 0; padding: .35rem .25rem; }
  .bars tr > :first-child { width: auto; grid-column: 1 / -1; }
  .cards, .cards tbody { display: block; } .cards thead { display: none; }
  .cards tr { display: flex; flex-wrap: wrap; gap: .1rem 1rem; padding: .5rem 0;
    border-bottom: 1px solid var(--line); }
  .cards td { border: 0; padding: 0; } .cards td:first-child { flex-basis: 100%; }
  .cards td:not(:first-child)::before { content: attr(data-of) " "; color: var(--faint); }
}
</style>
</head>
<body>
<h1>$title</h1>
$body
<p class="note">Drawn by gainstage $version.</p>
</body>
</html>
""")


def page(run: Run, found: Findings, title: str) -> str:
    """The page of a run, as HTML.

    Args:
        run: what was recorded.
        found: what there is to say of it.
        title: its name, as text.
    """
    numbers = "".join(
        f"<div><dt>{_text(name)}</dt><dd>{_text(number)}</dd></div>"
        for name, number in found.headline.items()
    )
    parts = [f"<dl>{numbers}</dl>", _advice(found.advice)]
    parts += [_curve(run, name, heading) for name, heading in CURVES.items()]
    lost = _underflow(found.underflow, found.verdict)
    parts += [_table(found.overflows), lost, _table(found.replay)]
    body = "\n".join(part for part in parts if part)
    return PAGE.substitute(title=_text(title), body=body, version=__version__)


def _text(words: str) -> str:
    return html.escape(words)


def _advice(sentences: list[str]) -> str:
    if not sentences:
        return (
            '<h2>Advice</h2><p class="note">None: no alarm, and no rule that skips much less.</p>'
        )
    items = "".join(f"<li>{_text(sentence)}</li>" for sentence in sentences)
    return f'<h2>Advice</h2><div class="advice"><ul>{items}</ul></div>'


def _table(table: Rows) -> str:
    """A table; on a narrow screen every row is a card, whose numbers have their names."""
    if not table.rows and not table.note:
        return ""
    head = "".join(f"<th>{_text(column)}</th>" for column in table.columns)
    body = ""
    for row in table.rows:
        cells = zip(table.columns, row, strict=True)
        body += "".join(
            ["<tr>", *(f'<td data-of="{_text(of)}">{_text(cell)}</td>' for of, cell in cells)]
        )
        body += "</tr>"
    whole = f'<table class="cards"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    note = f'<p class="note">{_text(table.note)}</p>' if table.note else ""
    return f"<h2>{_text(table.title)}</h2>{whole if table.rows else ''}{note}"


UNDERFLOW = (
    "Off: the rounding error of float16 as a share of the tensor's root mean square. Unscaled: the "
    "same without loss scaling. Only gradients of parameters are measured, none inside of the "
    "network.",
    "Flushed: the share of elements that float16 makes 0. Subnormal: those that it holds "
    "with fewer digits. Zero: those that are 0 already.",
)


def _underflow(shares: list[Flushed], verdict: list[str]) -> str:
    if not shares and not verdict:
        return ""
    kinds = {"error": "off", "unscaled_error": "unscaled"} if verdict else {}
    kinds |= {"flushed": "flushed", "subnormal": "subnormal", "zero": "zero"}
    rows = ""
    for tensor in shares[:SHOWN]:
        bars = "".join(f"<td>{_bar(kind, getattr(tensor, kind))}</td>" for kind in kinds)
        rows += f"<tr><td>{_text(tensor.name)}</td>{bars}</tr>"
    head = "".join(f"<th>{words}</th>" for words in ("Tensor", *kinds.values()))
    whole = f'<table class="bars"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    notes = [f"and {len(shares) - SHOWN} more"] * (len(shares) > SHOWN)
    notes += UNDERFLOW[not verdict :] if shares else ()
    said = "".join(f"<p>{_text(sentence)}</p>" for sentence in verdict)
    more = f'<p class="note">{_text(chr(10).join(notes))}</p>' if notes else ""
    return f"<h2>Underflow</h2>{said}{whole if shares else ''}{more}"


def _bar(kind: str, share: float) -> str:
    if not math.isfinite(share):
        return "overflow" if share > 0 else "-"
    width = 100 * min(max(share, 0), 1)
    filled = f'<i class="{kind}" style="width:{width:.1f}%"></i>' if width else ""
    return f'{share:.2%}<div class="bar">{filled}</div>'


def _curve(run: Run, name: str, heading: str) -> str:
    """A curve with its axes; below the scale a lane for each cause of skipped steps."""
    values = run.get(name)
    gap = run.skipped if name == "grad_norm" else np.zeros_like(run.skipped)
    there = np.isfinite(values) & ~gap
    if not there.any():
        return ""
    first, last = float(run.steps[0]), float(run.steps[-1])
    across = (run.steps - first) / max(last - first, 1) * ACROSS
    heights, ticks = _axis(values[there], _base(name, values[there]))
    stairs = name == "loss_scale"
    apart = np.diff(np.cumsum(gap)[there]) > 0  # points with a skipped step between them
    curve = _path(across[there], heights, stairs, apart)
    kind = "stairs" if stairs else "line"
    lines = "".join(f"M0 {at:.1f}H{ACROSS}" for at, _ in ticks)
    words = "".join(
        f'<span style="top:{100 * at / DOWN:.1f}%">{_text(tick)}</span>' for at, tick in ticks
    )
    paths = f'<path class="grid" d="{lines}"/><path class="{kind}" d="{curve}"/>'
    lanes, legend = _skips(run, across) if stairs else ("", "")
    places = "".join(
        f'<span style="left:{100 * (at - first) / max(last - first, 1):.1f}%">{at:.10g}</span>'
        for at in _round_numbers(first, last, min(4, last - first))
    )
    return (
        f'<h2>{heading}</h2><div class="plot"><div class="high">{words}</div>'
        f'<div class="high">{_svg(DOWN, paths, heading)}</div>{lanes}'
        f'<div class="under">{places}</div></div>{legend}'
    )


WHY = {
    "overflow": "an overflow",
    "NaN": "gradients that were NaN at lower scales too",
    "bad loss": "a loss that was not finite before any scaling",
}


def _skips(run: Run, across: np.ndarray) -> tuple[str, str]:
    """A lane for each cause of skipped steps, and a line that counts them."""
    skips = {cause: mask for cause, mask in why_skipped(run).items() if mask.any()}
    lanes = "".join(_lane(cause, across[mask]) for cause, mask in skips.items())
    told = ", ".join(f"{mask.sum()} by {WHY[cause]}" for cause, mask in skips.items())
    return lanes, f'<p class="note">Skipped steps: {told}.</p>' if told else ""


def _lane(cause: str, across: np.ndarray) -> str:
    """One stroke for each skipped step, or for several that would lie on each other."""
    strokes = "".join(f"M{at} 0V10" for at in np.unique(across.round().astype(int)))
    kind = cause.split()[-1].lower()
    drawn = _svg(10, f'<path class="{kind}" d="{strokes}"/>', f"Steps skipped: {cause}")
    return f'<div class="name">{cause}</div><div class="lane">{drawn}</div>'


def _svg(down: int, inside: str, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {ACROSS} {down}" preserveAspectRatio="none" role="img" '
        f'aria-label="{label}">{inside}</svg>'
    )


def _axis(values: np.ndarray, base: int | None) -> tuple[np.ndarray, list[tuple[float, str]]]:
    """Where finite values lie, from 0 at the top to `DOWN`, and the places and words of ticks."""
    if base is None:
        size = 10.0 ** math.floor(math.log10(max(float(np.abs(values).max()), 1e-300)))
        values = values / size  # so that no difference overflows
        low, high = _apart(float(values.min()), float(values.max()))
        marks = [(at, f"{at * size:.3g}") for at in _round_numbers(low, high, 3)]
    else:
        values = np.log(values) / math.log(base)
        low, high = _apart(float(values.min()), float(values.max()))
        marks = _powers(low, high, base)

    def height(at: np.ndarray | float) -> np.ndarray | float:
        return (high - at) / (high - low) * DOWN

    return np.asarray(height(values)), [(float(height(at)), words) for at, words in marks]


def _base(name: str, values: np.ndarray) -> int | None:
    """Of the logarithm that an axis shows, if it shows one."""
    if not values.min() > 0:
        return None
    if name == "loss_scale":
        return 2
    return 10 if values.max() / 20 > values.min() else None


def _powers(low: float, high: float, base: int) -> list[tuple[float, str]]:
    """The ticks of an axis of logarithms: powers, and 2 and 5 times those of ten if few."""
    every = max(1, math.ceil((high - low) / 5))
    powers = range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1, every)
    if base == 2 or every > 1:
        return [(at, f"{base}^{at}") for at in powers]
    digits = (1, 2, 5) if high - low < 2 else (1,)
    around = range(math.floor(low), math.ceil(high) + 1)
    marks = [(at + math.log10(n), f"{n}e{at}") for at in around for n in digits]
    return [(at, f"{float(word):g}") for at, word in marks if low <= at <= high]


def _apart(low: float, high: float) -> tuple[float, float]:
    return (low, high) if low < high else (low - 1, high + 1)


def _round_numbers(low: float, high: float, count: float) -> Iterable[float]:
    """At least so many round numbers from `low` to `high`, if these are not the same."""
    if high <= low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / count))
    wide = (n * power for n in (10, 5, 2) if (high - low) / (n * power) >= count)
    every = next(wide, power)
    return [n * every for n in range(math.ceil(low / every), math.floor(high / every) + 1)]


def _path(across: np.ndarray, down: np.ndarray, stairs: bool, apart: np.ndarray) -> str:
    """A curve; of one with many points the first, the extremes and the last of each stretch.

    Args:
        across, down: where its points are.
        stairs: whether it goes across first, and then up or down.
        apart: bool, for each point but the first: whether there is a gap before it. Of many points
            only those gaps are drawn that are wide enough to be seen.
    """
    places, narrow = np.arange(len(across)), 0.0
    if len(places) > 4 * BUCKETS:
        narrow = 2 * ACROSS / BUCKETS
        kept = [
            {some[0], some[down[some].argmin()], some[down[some].argmax()], some[-1]}
            for some in np.array_split(places, BUCKETS)
        ]
        places = np.array(sorted(set().union(*kept)))
    gaps = np.append(0, np.cumsum(apart))[places]
    far = (np.diff(gaps) > 0) & (np.diff(across[places]) > narrow)
    points = zip(across[places], down[places], np.append(True, far), strict=True)
    parts = ((f"{x:.1f}", f"{y:.1f}", new) for x, y, new in points)
    return "".join(
        f"M{x} {y}h0" if new else f"H{x}V{y}" if stairs else f"L{x} {y}" for x, y, new in parts
    )
