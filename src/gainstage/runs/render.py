"""Pages: one HTML file each, rendered from the templates of the package, which escape all text."""

from typing import Any

from gainstage import __version__
from gainstage._base.extras import missing_package
from gainstage.runs.rows import LONGEST, printable

try:
    import jinja2
except ModuleNotFoundError as _error:
    raise missing_package("jinja2", "report") from _error

# The colors of all pages and pictures, on paper and in the dark.
LIGHT = {
    "paper": "#ffffff", "ink": "#1c2430", "faint": "#5b6675", "line": "#d9dee5", "box": "#f4f6f8",
    "curve": "#00798c", "overflow": "#c9304e", "nan": "#7a4fc0", "loss": "#b36b00",
}  # fmt: skip
DARK = {
    "paper": "#14181e", "ink": "#e4e8ee", "faint": "#9aa5b4", "line": "#333c48", "box": "#1d232b",
    "curve": "#45bccd", "overflow": "#ff6f87", "nan": "#b796ff", "loss": "#f2ad45",
}  # fmt: skip
TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("gainstage"),
    autoescape=True,
    finalize=lambda value: printable(value, 10 * LONGEST) if type(value) is str else value,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(template: str, title: str, **values: Any) -> str:
    """Returns a page.

    Args:
        template: the name of its template.
        title: its title, as text.
        **values: what the template shows.
    """
    page = TEMPLATES.get_template(template)
    return page.render(title=title, light=LIGHT, dark=DARK, version=__version__, **values)
