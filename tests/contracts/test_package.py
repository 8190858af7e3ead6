"""The package as a whole: layers, imports, names, style and types."""

import ast
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import gainstage as gs
from gainstage.optimizers._step.options import Arguments, OptimizerOptions

pytestmark = pytest.mark.repo

SRC = Path(gs.__file__).parent
FOLDERS = ["src", "tests", "examples", "benchmarks", "studies"]
ROOT = Path(__file__).parents[2]
# The rooms of the package, the lowest first: a file imports from its own room and lower ones.
ROOMS = [
    "_base", "_programs", "_variables", "optimizers/schedules", "rules", "_scaling", "transforms",
    "precision", "training", "saving", "typing", "optimizers/_step", "optimizers", "runs", "_xray",
    "diagnostics", "compat", "distributed", "interop", "demo", "_doctor",
    "_advise", "_lint", "__main__",
]  # fmt: skip
FILES = sorted(SRC.rglob("*.py"))


def room_of(parts):
    """The room of a file or module, from the parts of its name."""
    inner = "/".join(parts[:2])
    return inner if inner in ("optimizers/_step", "optimizers/schedules") else parts[0]


# The files that import by name, look among the modules that are imported, or into a caller's frame.
# A static import, which has types and stands in the order of the rooms, is everywhere else.
USER_HAS = "an optional library, used only when the user has imported it"
BY_NAME = {
    "__init__.py": "modules of the package, imported when they are first used",
    "interop/__init__.py": "modules of the package, imported when they are first used",
    "interop/keras_backend.py": "an extra, which has no types",
    "_xray/from_file.py": "the module of the user that a command names",
    "_advise.py": USER_HAS,
    "_base/warn.py": "the user's line, for a warning",
    "interop/keras_statistics.py": "what Keras's trainer has computed, and does not pass on",
    "transforms/models.py": USER_HAS,
}


def imports(path):
    """The names that a file imports, anywhere in it, also by `import_module`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
            if ast.unparse(node.func).endswith(("import_module", "__import__")):
                yield from filter(lambda text: isinstance(text, str), texts)


def imported(path):
    """The rooms that a file imports from."""
    for name in imports(path):
        first, *parts = name.split(".")
        if first == "gainstage" and parts and room_of(parts) in ROOMS:
            yield room_of(parts)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_imports_point_down(path):
    """A file imports only from its own room and from lower ones, also inside of functions."""
    parts = path.relative_to(SRC).with_suffix("").parts
    if parts == ("__init__",):
        return
    own = room_of(parts)
    for room in imported(path):
        assert ROOMS.index(room) <= ROOMS.index(own), f"{own} imports {room}"


def test_an_import_by_name_counts(tmp_path):
    """What `import_module` and `__import__` are given is read like an `import`."""
    path = tmp_path / "reader.py"
    path.write_text(
        "import importlib\nfrom gainstage.rules import adaptive\n"
        "importlib.import_module('gainstage.interop.keras')\n__import__('gainstage.demo')\n"
    )
    assert list(imported(path)) == ["rules", "interop", "demo"]


def test_few_files_import_by_name():
    """`BY_NAME` holds each file whose imports a reader of the source cannot follow."""
    words = re.compile(r"\bimport_module\(|\b__import__\(|\bsys\.modules\b|\b_getframe\(")
    found = {path.relative_to(SRC).as_posix() for path in FILES if words.search(path.read_text())}
    assert found == set(BY_NAME)


def test_no_two_modules_have_one_name():
    """A name in a traceback, or in a sentence, is one file."""
    names = [path.stem for path in FILES if path.name != "__init__.py"]
    assert sorted(names) == sorted(set(names))


# What a face has as its document does, or as another face has it.
FACES = {"advise", "autocast", "deserialize", "serialize", "find_plan"}


def test_no_function_has_the_name_of_one_in_another_module():
    """A function's name has one meaning in the package, but for `main` and names of faces."""
    modules = defaultdict(set)
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not re.fullmatch("__.+__|_|main", node.name):
                modules[node.name].add(path.name)
    assert {name for name, files in modules.items() if len(files) > 1} == FACES


def test_each_room_says_what_it_is_and_what_may_be_imported():
    """The first words of a room are two sentences or more."""
    for room in ROOMS:
        if (SRC / room).is_dir():
            text = ast.get_docstring(ast.parse((SRC / room / "__init__.py").read_text()))
            assert len(re.findall(r"\.(?:\s|$)", text)) >= 2, room


def test_only_one_file_imports_what_jax_may_move():
    """JAX's private and experimental names come from `_jax.py`, where a new JAX is met first."""
    places = ("jax._src", "jax.core", "jax.experimental", "jax.extend", "jax.interpreters")
    found = set()
    for path in FILES:
        nodes = ast.walk(ast.parse(path.read_text()))
        names = [ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)]
        for name in [*names, *imports(path)]:
            if f"{name}.".startswith(tuple(f"{place}." for place in places)):
                found.add(path.name)
    assert found == {"_jax.py"}


def test_no_module_has_the_name_of_a_function():
    """A public function hides a module of its name: what is in that could not be reached."""
    modules = {path.stem for path in SRC.iterdir() if path.name != "__init__.py"}
    assert modules & set(gs.__all__) == {"optimizers", "precision", "transforms", "typing"}


# The public classes and functions of the package and its modules, by name.
PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (gs, gs.transforms, gs.optimizers, gs.optimizers.schedules, gs.precision)
    for name in module.__all__
    if not inspect.ismodule(getattr(module, name))
}


def public_objects():
    """Every public name, and every public method of a public class."""
    for name, value in PUBLIC.items():
        yield name, value
        if inspect.isclass(value):
            for attribute in dir(value):
                if not attribute.startswith("_"):
                    member = inspect.getattr_static(value, attribute)
                    if callable(member) or isinstance(member, (property, classmethod)):
                        yield f"{name}.{attribute}", getattr(value, attribute)


def test_every_public_name_is_described():
    """Each public class, function, method and property has a docstring, inherited ones counted."""
    silent = [name for name, value in public_objects() if not inspect.getdoc(value)]
    assert silent == []


@pytest.mark.parametrize("name", PUBLIC)
def test_public_docstrings_say_what_goes_in_and_out(name):
    """A public class or function names its arguments, what it raises, an example or its source."""
    value = PUBLIC[name]
    doc = inspect.getdoc(value)
    if issubclass(value, tuple) if inspect.isclass(value) else False:
        return
    assert any(section in doc for section in ("Args:", "Examples:")), name
    assert any(section in doc for section in ("Raises:", "Source:")), name


def test_names_are_sorted_and_real():
    """`__all__` holds each name once, in order, and every name exists."""
    assert gs.__all__ == sorted(set(gs.__all__), key=lambda n: (not n.isupper(), n[0].islower(), n))


def reference():
    """The modules whose members the reference lists."""
    pages = (ROOT / "docs" / "api").glob("*.md")
    names = {name for page in pages for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)}
    for name in sorted(names | {name.rpartition(".")[0] for name in names}):
        path = SRC.parent / name.replace(".", "/")
        if path.with_suffix(".py").exists() or (name in names and path.is_dir()):
            yield name


@pytest.mark.parametrize("name", ["gainstage", *reference()])
def test_a_module_of_the_reference_names_its_public_names(name):
    """What is public is in `__all__`, exists, and is described."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        pytest.skip(f"needs {error.name}")
    assert module.__all__
    assert [n for n in module.__all__ if not inspect.getdoc(getattr(module, n))] == []


def test_a_name_has_one_meaning():
    """No class, type or constant has the name of one in another module. `compat` and
    `interop.keras` have the names of other libraries."""
    found = defaultdict(set)
    for path in [p for p in FILES if p.parent.name != "compat" and p.stem != "keras_loss_scale"]:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].add(path)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                stored = [n for n in ast.walk(node) if isinstance(getattr(n, "ctx", 0), ast.Store)]
                for name in [n.id for n in stored if isinstance(n, ast.Name)]:
                    found[name].add(path)
    twice = {name for name, paths in found.items() if name[0].isupper() and len(paths) > 1}
    assert twice == set()


def test_templates_alone_escape_html():
    """Text gets into a page through templates that escape it; one drawing is marked as safe."""
    escaping, safe = set(), set()
    for path in FILES:
        tree = ast.parse(path.read_text())
        where = path.relative_to(SRC).as_posix()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {getattr(node, "module", ""), *(alias.name for alias in node.names)}
                escaping |= {where} if names & {"html", "xml", "xml.sax.saxutils", "cgi"} else set()
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called.endswith("escape") and called != "re.escape":
                escaping.add(where)
            if called.endswith("Markup"):
                safe.add(where)
            if isinstance(node, ast.Constant) and "&lt;" in str(node.value):
                escaping.add(where)
    assert escaping == set()
    assert safe == {"runs/curves.py"}
    pages = sorted((SRC / "templates").iterdir())
    assert pages
    for page in pages:
        text = page.read_text()
        assert not re.search(r"\bsafe\b|autoescape|<script|<link|<img|url\(|@import|http", text)


def test_one_table_of_options():
    """Type checkers and the documentation know the options of the table, with the same types."""
    table, keywords = get_type_hints(Arguments), get_type_hints(OptimizerOptions)
    types = {name: (get_args(option) or [option])[0] for name, option in table.items()}
    widened = {"name": str | None, "shard_state_over": str | Sequence[str] | None}
    assert keywords == types | widened
    section = inspect.getdoc(gs.optimizers.Optimizer).split("Args:")[1].split("\n\n")[0]
    assert set(re.findall(r"^    (\w+):", section, re.M)) == {"learning_rate", *types}
    assert set(inspect.signature(gs.optimizers.Optimizer).parameters) == {"learning_rate", *types}


def test_style():
    """Ruff finds nothing to say about code and tests."""
    pytest.importorskip("ruff")
    for command in (["check"], ["format", "--check"]):
        result = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *FOLDERS],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stdout


def checked(*words):
    """What a type checker prints, and its exit status."""
    pytest.importorskip(words[0])
    command = [sys.executable, "-m", *words]
    # basedpyright --verifytypes runs `python` of the PATH, whatever --pythonpath says.
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": folders},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "paths",
    [["tests/typed.py"], pytest.param(["src", "tests/typed.py"], marks=pytest.mark.thorough)],
    ids=["public", "all"],
)
def test_types(paths):
    """Pyright infers the types that `typed.py` says, finds the mistakes in it, and finds no error
    in what it uses, or in all sources."""
    result = checked("basedpyright", "--pythonpath", sys.executable, *paths)
    assert result.returncode == 0, result.stdout


@pytest.mark.thorough
def test_mypy_sees_the_same_types():
    """With `--strict`, mypy infers the types that `typed.py` says, and finds the mistakes in it."""
    result = checked("mypy", "--follow-imports", "silent", "tests/typed.py")
    assert result.returncode == 0, result.stdout


def test_all_public_types_are_known():
    """Pyright knows the type of every public name, except of classes that are derived from Keras's,
    which have none."""
    words = ["--pythonpath", sys.executable, "--ignoreexternal", "--outputjson"]
    result = checked("basedpyright", "--verifytypes", "gainstage", *words)
    names = json.loads(result.stdout)["typeCompleteness"]["symbols"]
    unclear = [n["name"] for n in names if not n["isTypeKnown"] or n["isTypeAmbiguous"]]
    assert {name.rpartition(".")[2] for name in unclear} == {"Audit", "FirstEpoch", "LogLossScale"}


@pytest.mark.slow
def test_mypy_finds_no_error():
    """With `--strict`, mypy finds no error in the sources."""
    result = checked("mypy", "src")
    assert result.returncode == 0, result.stdout
