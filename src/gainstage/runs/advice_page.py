"""What each precision costs, as one HTML file."""

import math
from typing import NamedTuple

from gainstage.precision.advice import Advice
from gainstage.precision.noise_and_bias import MAX_BIAS, MAX_NOISE
from gainstage.runs.render import render
from gainstage.runs.rows import Rows

SHOWN_FROM, SHOWN_TO = 1e-6, 1.0  # of the logarithmic scale of a bar


class PriceBar(NamedTuple):
    """A bar of the chart."""

    name: str
    number: str
    width: float  # per cent
    fits: bool


def page(advice: Advice) -> str:
    """Returns the page of an advice, as HTML."""
    head, *rows = advice.table()
    charts = {
        "Noise, of the batch's own": (1, [c.price.noise for c in advice.costs], MAX_NOISE),
        "Bias, of the mean gradient": (2, [c.price.bias for c in advice.costs], MAX_BIAS),
    }
    drawn = {
        words: (
            [
                PriceBar(row[0], row[column], _place(size), size <= limit)
                for row, size in zip(rows, sizes, strict=False)  # the last may have no numbers
            ],
            _place(limit),
        )
        for words, (column, sizes, limit) in charts.items()
    }
    table = Rows("Costs", head, rows, advice.notes())
    return render("advice.html", "What a precision costs", advice=advice, table=table, charts=drawn)


def _place(size: float) -> float:
    """Where a number is on the scale, in per cent."""
    if not size > SHOWN_FROM:
        return 0.0
    part = math.log(min(size, SHOWN_TO) / SHOWN_FROM) / math.log(SHOWN_TO / SHOWN_FROM)
    return 100 * part
