"""The code of each page runs and prints what the page says; and no step that a page, an example or
a table of conformance shows as right is accused by `lint`."""

import functools
import importlib
import re
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from conformance import test_optax, test_torch
from docs.pages import NEEDS, PAGES, ROOT, TESTED, run
from docs.test_migrating import SECTIONS
from docs.test_origins import CASES as ORIGINS
from docs.test_origins import origins
from docs.test_ways_in import BLOCK, WAYS
from docs.test_ways_in import NEEDS as NEEDS_OF_WAYS

import gainstage as gs
from gainstage.optimizers import LossScaleOptimizer
from gainstage.transforms.train_step import TrainStep

pytestmark = [pytest.mark.repo, pytest.mark.thorough]
EXAMPLES = ROOT / "examples"
# The modules whose calls of `jax.jit` are steps, or parts of one: pages and examples.
OURS = {"docs", "origins", *(path.stem for path in EXAMPLES.glob("*.py"))}


class Linted:
    """What `lint` finds in all steps that are called, each at its first call."""

    def __init__(self):
        self.faults, self.seen, self._lints = [], set(), False

    def look(self, key, step, *args, **kwargs):
        """Lints a step, if it is new and not inside of another that is linted."""
        if key in self.seen or self._lints:
            return
        self.seen.add(key)
        self._lints = True
        try:
            self.faults += gs.lint(step, *args, **kwargs)
        finally:
            self._lints = False

    def check(self):
        if not self.seen:
            pytest.skip("it takes no step of its own")
        assert wrong(self.faults) == []


def wrong(faults):
    """The faults, but that float32 needs no scale: these steps show the scale on small numbers."""
    return [fault for fault in faults if fault.kind != "needless scale"]


@pytest.fixture
def linted(monkeypatch):
    """What is found in the steps of a test."""
    return watched(monkeypatch)


def watched(monkeypatch):
    """Lints what `jax.jit` and `gs.optimizers.jit` compile, each `train_step`, and `minimize`."""
    found, jit = Linted(), jax.jit

    def linting_jit(fun=None, **options):
        if fun is None:
            return functools.partial(linting_jit, **options)
        compiled = jit(fun, **options)
        is_ours = sys._getframe(1).f_globals["__name__"] in OURS
        if not is_ours or options.keys() & {"static_argnums", "static_argnames"}:
            return compiled

        def call(*args, **kwargs):
            found.look(call, compiled, *args, **kwargs)
            return compiled(*args, **kwargs)

        call.lower, call.trace = compiled.lower, compiled.trace
        return functools.update_wrapper(call, fun)

    def lint_calls(kind, name):
        method = getattr(kind, name)

        def call(self, *args, **kwargs):
            if getattr(self, "built", True):  # an optimizer is built in its first step
                arrays = () if kind is LossScaleOptimizer else args
                step = functools.partial(method, self, *args[len(arrays) :], **kwargs)
                found.look(self, step, *arrays)
            return method(self, *args, **kwargs)

        monkeypatch.setattr(kind, name, call)

    monkeypatch.setattr(jax, "jit", linting_jit)
    lint_calls(TrainStep, "__call__")
    lint_calls(gs.optimizers.jit, "__call__")
    lint_calls(LossScaleOptimizer, "minimize")
    return found


@pytest.mark.as_users
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page not in TESTED and "```python" in page.read_text()],
    ids=lambda page: page.stem,
)
def test_a_page(page, capsys, tmp_path, monkeypatch, linted):
    """All blocks of a page run one after the other; a block of text behind one is what that
    prints."""
    for library in NEEDS.get(page.stem, []):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    for printed, output in run(page, capsys.readouterr):
        assert not output or printed == output
    assert wrong(linted.faults) == []


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras
@pytest.mark.parametrize("page", WAYS, ids=lambda page: page.stem)
def test_a_way_in(page, tmp_path, monkeypatch, linted):
    """The script of each way in."""
    for library in NEEDS_OF_WAYS.get(page.stem, []):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    exec(
        "".join(code for code, _ in re.findall(BLOCK, page.read_text(), re.S)), {"__name__": "docs"}
    )
    linted.check()


@pytest.mark.parametrize(
    ("page", "title"),
    [(page, title) for page, title in ORIGINS if title.startswith("Gainstage")],
    ids=lambda value: getattr(value, "stem", value),
)
def test_what_replaces_another_library(page, title, linted):
    """The examples of Gainstage on the pages for those who come from elsewhere."""
    if title != "Gainstage" and (reason := origins.missing(title)):
        pytest.skip(reason)
    list(origins.run(page, title))
    linted.check()


@pytest.mark.parametrize("title", [title for title in SECTIONS if "```python" in SECTIONS[title]])
def test_the_migration_guide(title, linted):
    """The blocks of each section of the guide."""
    scope = {"__name__": "docs"}
    for block in re.findall(r"```python\n(.*?)```", SECTIONS[title], re.S):
        exec(block, scope)
    linted.check()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("library", ["optax", "haiku", "linen", "nnx", "equinox"])
def test_an_example_of_a_library(library, monkeypatch, linted):
    """The examples that train the same network with each library."""
    for needed in (
        "sklearn",
        {"optax": "jax", "linen": "flax", "nnx": "flax"}.get(library, library),
    ):
        pytest.importorskip(needed)
    monkeypatch.syspath_prepend(EXAMPLES)
    importlib.import_module(f"digits_{library}").train("float16", 0)
    linted.check()


def test_the_example_of_a_language_model(tmp_path, monkeypatch, linted):
    """Microbatches, a sharded state, and a bad step on purpose."""
    pytest.importorskip("flax")
    pytest.importorskip("orbax.checkpoint")
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("language_model")
    example.train(example.QUICK, tmp_path, jax.devices()[:2])
    linted.check()


def test_the_example_of_reinforcement_learning(monkeypatch, linted):
    """Supervised steps, then those of GRPO."""
    monkeypatch.syspath_prepend(EXAMPLES)
    importlib.import_module("grpo").main(["--quick"])
    linted.check()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", sorted(set(test_optax.FACTORIES) - set(test_optax.EXCLUDED)))
def test_a_transformation_of_optax(name, monkeypatch):
    """The step of the table of conformance, of every public transformation."""
    monkeypatch.setattr(test_optax, "one_by_one", lambda step, *_: step)
    tx = gs.loss_scaled(optax.with_extra_args_support(test_optax.make(name)))
    differentiate = functools.partial(gs.value_and_grad, test_optax.loss)
    step, params, state = test_optax.stepping(name, tx, differentiate)
    assert wrong(gs.lint(step, params, state, jnp.float32(1.0))) == []


@pytest.mark.parametrize("case", ["plain", "clipping", "accumulation", "penalty", "losses"])
def test_a_run_that_is_that_of_torch(case, monkeypatch):
    """All steps of a run of the table of conformance, as one program."""
    monkeypatch.setattr(test_torch, "joined", lambda params: params)
    scaler = test_torch.Scaler(128.0, interval=1)
    assert wrong(gs.lint(lambda: test_torch.in_optax(case, scaler))) == []
