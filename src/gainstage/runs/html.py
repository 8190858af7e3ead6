"""The parts that all pages share: the template, and the HTML of text, tables and drawings.

A page is one file without dependencies: no script, no font, no network. Text is outside of the
drawings, which are stretched to the window's width. All inserted text is escaped.
"""

import html
from collections.abc import Mapping
from string import Template

from gainstage import __version__
from gainstage.runs.findings import Rows

ACROSS = 1000  # the width of a drawing in its own units

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
$style</style>
</head>
<body>
<h1>$title</h1>
$body
<p class="note">Drawn by gainstage $version.</p>
</body>
</html>
""")


def document(title: str, parts: list[str], style: str = "") -> str:
    """Returns a page.

    Args:
        title: the title, as text.
        parts: its HTML from top to bottom; empty parts are left out.
        style: CSS for this page alone.
    """
    body = "\n".join(part for part in parts if part)
    return PAGE.substitute(title=text(title), body=body, version=__version__, style=style)


def text(words: str) -> str:
    """Escapes text for HTML, between tags or quotes."""
    return html.escape(words)


def numbers(headline: Mapping[str, str]) -> str:
    """Draws a box for each number, with its label."""
    boxes = (f"<div><dt>{text(of)}</dt><dd>{text(n)}</dd></div>" for of, n in headline.items())
    return f"<dl>{''.join(boxes)}</dl>"


def table(of: Rows) -> str:
    """Draws a table; on a narrow screen each row is a card with labelled numbers."""
    if not of.rows and not of.note:
        return ""
    head = "".join(f"<th>{text(column)}</th>" for column in of.columns)
    body = ""
    for row in of.rows:
        cells = zip(of.columns, row, strict=True)
        body += "".join(
            ["<tr>", *(f'<td data-of="{text(name)}">{text(cell)}</td>' for name, cell in cells)]
        )
        body += "</tr>"
    whole = f'<table class="cards"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    note = f'<p class="note">{text(of.note)}</p>' if of.note else ""
    return f"<h2>{text(of.title)}</h2>{whole if of.rows else ''}{note}"


def svg(down: int, inside: str, label: str) -> str:
    """Draws an SVG that is stretched to the size of its place."""
    return (
        f'<svg viewBox="0 0 {ACROSS} {down}" preserveAspectRatio="none" role="img" '
        f'aria-label="{label}">{inside}</svg>'
    )
