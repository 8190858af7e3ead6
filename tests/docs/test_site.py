"""The site: it builds, no public name is missing in it, and its map is that of the package."""

import ast
import doctest
import importlib.util
import inspect
import pkgutil
import re
import shutil
import subprocess
import sys

import pytest
from docs.pages import DOCS, PAGES, ROOT

import gainstage as gs

pytestmark = pytest.mark.repo
MODULES = ["gainstage", "gainstage.optimizers", "gainstage.precision", "gainstage.typing",
           "gainstage.compat.experimental", "gainstage.compat.tf2",
           "gainstage.compat.v1", "gainstage.compat.dtensor", "gainstage.diagnostics",
           "gainstage.distributed", "gainstage.interop.keras",
           "gainstage.interop.importers", "gainstage.interop.tensorboard",
           "gainstage.optimizers.schedules"]  # fmt: skip


def test_the_map_is_that_of_the_rooms():
    """DESIGN.md draws the rooms in the tested order, each with its first sentence."""
    from contracts.test_package import ROOMS, SRC

    lines = []
    for room in reversed(ROOMS):
        files = [SRC / f"{room}.py", SRC / room / "__init__.py"]
        (path,) = [path for path in files if path.exists()]
        sentence = ast.get_docstring(ast.parse(path.read_text())).split("\n")[0]
        lines.append(f"{room:<21} {sentence}")
    assert "\n".join(["```text", *lines, "```"]) in (ROOT / "DESIGN.md").read_text()


def test_the_map_names_files_that_exist():
    """Each file that DESIGN.md names is one of the package."""
    from contracts.test_package import SRC

    named = re.findall(r"`([\w/]+\.py)`", (ROOT / "DESIGN.md").read_text())
    assert named
    assert [name for name in named if not (SRC / name).exists() and "test" not in name] == []


def prose():
    """The text of every page and docstring that Markdown renders, without its code."""
    for page in [*ROOT.glob("*.md"), *DOCS.glob("**/*.md")]:
        yield page, page.read_text()
    for path in (ROOT / "src").glob("**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                parts = doctest.DocTestParser().parse(ast.get_docstring(node) or "")
                text = "".join(part for part in parts if isinstance(part, str))
                yield path, re.sub(r":\n\n(    .*\n?|\n)+", "", text)  # formulas


def test_powers_are_written_as_code():
    """Outside of code `2**15` is bold or loses its stars, so pages and docstrings quote it."""
    for path, text in prose():
        text = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)
        text = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", text)
        assert not re.search(r".*\w\*\*[\w-].*", text), path


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built with every warning an error."""
    for library in ("zensical", "mkdocstrings"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"needs {library}")
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    for name in ("docs", "src"):
        shutil.copytree(ROOT / name, folder / name)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def public_names():
    """Where each public class and function is documented under, with its public methods."""
    for module in MODULES:
        try:
            found = pkgutil.resolve_name(module)
        except (ImportError, AttributeError):
            continue  # an extra that is not installed
        for name in set(found.__all__):
            value = getattr(found, name)
            if inspect.ismodule(value):
                continue
            places = f"{module}.{name}", f"gainstage.{name}"
            yield {*places, f"{value.__module__}.{value.__qualname__}"}
            for method in vars(value) if inspect.isclass(value) else ():
                described = getattr(vars(value)[method], "__doc__", None)  # or else where it is new
                if (
                    described
                    and not method.startswith("_")
                    and inspect.isfunction(vars(value)[method])
                ):
                    whole = f"{value.__module__}.{name}"
                    yield {f"{place}.{method}" for place in (*places, whole)}


def test_every_public_name_is_on_the_site(site):
    """Every public class, method and function has a place in the pages on the API."""
    pages = [path.read_text() for path in site.glob("api/**/*.html")]
    anchors = {anchor for page in pages for anchor in re.findall(r'id="(gainstage[\w.]*)"', page)}
    missing = [sorted(names)[0] for names in public_names() if not names & anchors]
    assert missing == [], missing
    assert "gainstage.optimizers.LossScaleOptimizer.apply" in anchors
    assert len(gs.__all__) < len(anchors)


def test_no_page_is_left_out(site):
    """Every page of the folder is in the navigation, and in the list of the home page."""
    index = (site / "index.html").read_text()
    for page in PAGES:
        if page.stem == "index":
            continue
        assert f'href="./{page.relative_to(DOCS).with_suffix("")}/"' in index, page
        assert f"({page.relative_to(DOCS)})" in (DOCS / "index.md").read_text(), page


def test_no_power_is_bold(site):
    """No page has bold type beside a digit, as two powers in one paragraph would make."""
    for page in site.glob("**/*.html"):
        text = re.sub(r"</?(code|span)[^>]*>", "", page.read_text())
        assert re.findall(r"\d<strong>.{40}|.{40}</strong>-?\d", text) == [], page


def test_docstrings_are_written_as_markdown(site):
    """No page shows the colons of reStructuredText, or quotes a text that begins with `>=`."""
    for page in site.glob("**/*.html"):
        assert re.findall(r".{40}::</p>|<blockquote.{40}", page.read_text(), re.DOTALL) == [], page


def test_printed_text_wraps(site):
    """What a program prints wraps at the edge of the page, where its end would be cut off."""
    style = (site / "stylesheets/extra.css").read_text()
    rules = dict(re.findall(r"^([^\n/]+?) \{(.*?)\}", style, re.DOTALL | re.MULTILINE))
    assert "white-space: pre-wrap" in rules[".language-text code"]
    page = (site / "bad-steps/index.html").read_text()
    assert 'href="../stylesheets/extra.css' in page
    assert re.search(r'class="language-text[^>]*><pre>.{0,40}NOT finite', page)
