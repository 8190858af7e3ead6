"""What `dir` shows of a module is what it is for."""

import importlib
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
MODULES = [
    "", "transforms", "optimizers", "optimizers.schedules", "precision", "diagnostics",
    "distributed", "interop", "interop.importers", "rules", "typing", "compat", "compat.tf2",
    "compat.v1", "compat.dtensor", "compat.experimental", "compat.stateful_scale",
]  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_a_module_shows_its_names_alone(name):
    """What it imports for itself is not shown."""
    module = importlib.import_module(f"gainstage.{name}".rstrip("."))
    shown = {each for each in dir(module) if not each.startswith("_")}
    rooms = set(MODULES) if not name else set()  # which are imported when they are asked for
    assert shown - rooms == {each for each in module.__all__ if not each.startswith("_")} - rooms
    assert all(hasattr(module, each) for each in shown)


def test_the_page_of_the_old_names_has_each_of_their_modules():
    """`docs/api/compat.md` shows what a user can import, and nothing else."""
    page = (DOCS / "api" / "compat.md").read_text()
    shown = re.findall(r"^::: gainstage\.compat\.(\w+)$", page, re.M)
    assert set(shown) == set(importlib.import_module("gainstage.compat").__all__)
