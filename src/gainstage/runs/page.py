"""The report on a recorded run as one HTML file."""

import math
from collections.abc import Iterable

import numpy as np

from gainstage.runs.causes import why_skipped
from gainstage.runs.findings import SHOWN, Findings, Flushed
from gainstage.runs.html import ACROSS, document, numbers, svg, table, text
from gainstage.runs.run import Run

DOWN = 200  # the height of a drawing in its own units
BUCKETS = 500  # stretches of a long curve; the extremes of each are drawn
CURVES = {"loss_scale": "Loss scale", "loss": "Loss", "grad_norm": "Norm of all gradients"}


def page(run: Run, found: Findings, title: str) -> str:
    """Returns the page of a run, as HTML.

    Args:
        run: the recorded run.
        found: its findings.
        title: the name of the run, as text.
    """
    parts = [numbers(found.headline), _advice(found.advice)]
    parts += [_curve(run, name, heading) for name, heading in CURVES.items()]
    lost = _underflow(found.underflow, found.underflow_summary)
    parts += [table(found.overflows), lost, table(found.replay)]
    return document(title, parts)


def _advice(sentences: list[str]) -> str:
    if not sentences:
        return (
            '<h2>Advice</h2><p class="note">None: no alarm, and no rule that skips much less.</p>'
        )
    items = "".join(f"<li>{text(sentence)}</li>" for sentence in sentences)
    return f'<h2>Advice</h2><div class="advice"><ul>{items}</ul></div>'


UNDERFLOW = (
    "Off: the rounding error of float16 as a share of the tensor's root mean square. Unscaled: the "
    "same without loss scaling. Only gradients of parameters are measured, none inside of the "
    "network.",
    "Flushed: the share of elements that float16 makes 0. Subnormal: those that it holds "
    "with fewer digits. Zero: those that are 0 already.",
)


def _underflow(shares: list[Flushed], summary: list[str]) -> str:
    if not shares and not summary:
        return ""
    kinds = {"error": "off", "unscaled_error": "unscaled"} if summary else {}
    kinds |= {"flushed": "flushed", "subnormal": "subnormal", "zero": "zero"}
    rows = ""
    for tensor in shares[:SHOWN]:
        bars = "".join(f"<td>{_bar(kind, getattr(tensor, kind))}</td>" for kind in kinds)
        rows += f"<tr><td>{text(tensor.name)}</td>{bars}</tr>"
    head = "".join(f"<th>{words}</th>" for words in ("Tensor", *kinds.values()))
    whole = f'<table class="bars"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    notes = [f"and {len(shares) - SHOWN} more"] * (len(shares) > SHOWN)
    notes += UNDERFLOW[not summary :] if shares else ()
    said = "".join(f"<p>{text(sentence)}</p>" for sentence in summary)
    more = f'<p class="note">{text(chr(10).join(notes))}</p>' if notes else ""
    return f"<h2>Underflow</h2>{said}{whole if shares else ''}{more}"


def _bar(kind: str, share: float) -> str:
    if not math.isfinite(share):
        return "overflow" if share > 0 else "-"
    width = 100 * min(max(share, 0), 1)
    filled = f'<i class="{kind}" style="width:{width:.1f}%"></i>' if width else ""
    return f'{share:.2%}<div class="bar">{filled}</div>'


def _curve(run: Run, name: str, heading: str) -> str:
    """Draws a curve with its axes; below the scale, one lane per cause of skipped steps."""
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
        f'<span style="top:{100 * at / DOWN:.1f}%">{text(tick)}</span>' for at, tick in ticks
    )
    paths = f'<path class="grid" d="{lines}"/><path class="{kind}" d="{curve}"/>'
    lanes, legend = _skips(run, across) if stairs else ("", "")
    places = "".join(
        f'<span style="left:{100 * (at - first) / max(last - first, 1):.1f}%">{at:.10g}</span>'
        for at in _round_numbers(first, last, min(4, last - first))
    )
    return (
        f'<h2>{heading}</h2><div class="plot"><div class="high">{words}</div>'
        f'<div class="high">{svg(DOWN, paths, heading)}</div>{lanes}'
        f'<div class="under">{places}</div></div>{legend}'
    )


WHY = {
    "overflow": "an overflow",
    "NaN": "gradients that were NaN at lower scales too",
    "bad loss": "a loss that was not finite before any scaling",
}


def _skips(run: Run, across: np.ndarray) -> tuple[str, str]:
    """Draws one lane per cause of skipped steps, and the line that counts them."""
    skips = {cause: mask for cause, mask in why_skipped(run).items() if mask.any()}
    lanes = "".join(_lane(cause, across[mask]) for cause, mask in skips.items())
    counts = ", ".join(f"{mask.sum()} by {WHY[cause]}" for cause, mask in skips.items())
    return lanes, f'<p class="note">Skipped steps: {counts}.</p>' if counts else ""


def _lane(cause: str, across: np.ndarray) -> str:
    """Draws one stroke per skipped step; strokes at one place are merged."""
    strokes = "".join(f"M{at} 0V10" for at in np.unique(across.round().astype(int)))
    kind = cause.split()[-1].lower()
    drawn = svg(10, f'<path class="{kind}" d="{strokes}"/>', f"Steps skipped: {cause}")
    return f'<div class="name">{cause}</div><div class="lane">{drawn}</div>'


def _axis(values: np.ndarray, base: int | None) -> tuple[np.ndarray, list[tuple[float, str]]]:
    """The heights of finite values, from 0 (top) to `DOWN`, and the ticks with their labels."""
    if base is None:
        size = 10.0 ** math.floor(math.log10(max(float(np.abs(values).max()), 1e-300)))
        values = values / size  # so that no difference overflows
        low, high = _apart(float(np.min(values)), float(np.max(values)))
        marks = [(at, f"{at * size:.3g}") for at in _round_numbers(low, high, 3)]
    else:
        values = np.log(values) / math.log(base)
        low, high = _apart(float(np.min(values)), float(np.max(values)))
        marks = _powers(low, high, base)

    def height(at: np.ndarray | float) -> np.ndarray | float:
        return (high - at) / (high - low) * DOWN

    return np.asarray(height(values)), [(float(height(at)), words) for at, words in marks]


def _base(name: str, values: np.ndarray) -> int | None:
    """The base of the axis' logarithm; None for a linear axis."""
    if not values.min() > 0:
        return None
    if name == "loss_scale":
        return 2
    return 10 if values.max() / 20 > values.min() else None


def _powers(low: float, high: float, base: int) -> list[tuple[float, str]]:
    """The ticks of a logarithmic axis: powers; also 2 and 5 times powers of ten if few."""
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
    """At least this many round numbers from `low` to `high`, unless these are the same."""
    if high <= low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / count))
    wide = (n * power for n in (10, 5, 2) if (high - low) / (n * power) >= count)
    every = next(wide, power)
    return [n * every for n in range(math.ceil(low / every), math.floor(high / every) + 1)]


def _path(across: np.ndarray, down: np.ndarray, stairs: bool, apart: np.ndarray) -> str:
    """The path of a curve; for many points, the first, last and extreme ones of each stretch.

    Args:
        across, down: the coordinates of its points.
        stairs: whether to draw steps: across first, then up or down.
        apart: bool, for each point but the first: whether there is a gap before it. Of many points,
            only visible gaps are drawn.
    """
    places, narrow = np.arange(len(across)), 0.0
    if len(places) > 4 * BUCKETS:
        narrow = 2 * ACROSS / BUCKETS
        kept = [
            {some[0], some[np.argmin(down[some])], some[np.argmax(down[some])], some[-1]}
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
