"""What holds the code together: who may know of whom, and how far a gradient has to go."""

import ast
import functools
import importlib
import inspect
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs
from gainstage._programs import operations
from gainstage.optimizers._step.options import Arguments, OptimizerOptions

pytestmark = pytest.mark.repo

SRC = Path(gs.__file__).parent
FILES = sorted(SRC.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}
# Keras has no public way to say where a variable lies.
FOREIGN = {("interop/keras_optimizer.py", "mirror._layout")}


def classes():
    """Every class that is defined in a file of the package, with its syntax tree."""
    for path, tree in TREES.items():
        name = ".".join(("gainstage", *path.relative_to(SRC).with_suffix("").parts))
        found = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        if found and not name.endswith("__main__"):
            module = importlib.import_module(name)
            yield from ((getattr(module, node.name), node) for node in found)


@functools.cache
def attributes(node, store):
    """The names of attributes of `self` that a class loads, or stores, in its methods."""
    found = [part for part in ast.walk(node) if isinstance(part, ast.Attribute)]
    own = [part for part in found if getattr(part.value, "id", None) == "self"]
    return {part.attr for part in own if isinstance(part.ctx, ast.Store) == store}


@functools.cache
def source(cls):
    """The syntax tree of a class of another package."""
    return ast.parse(textwrap.dedent(inspect.getsource(cls)))


def test_no_class_counts_on_its_subclasses():
    """What a method loads from `self`, its class or a base defines; a subclass need not."""
    found = dict(classes())
    defined = defaultdict(set)
    for cls in found:
        for base in cls.__mro__:
            defined[cls] |= vars(base).keys() | inspect.get_annotations(base).keys()
            node = found.get(base)
            outside = base.__module__.partition(".")[0] in ("builtins", "typing", "_thread")
            if node is None and not outside:
                node = source(base)
            defined[cls] |= attributes(node, store=True) if node else set()
    missing = []
    for cls, node in found.items():
        below = [other for other in found if cls in other.__mro__[1:]]
        for name in attributes(node, store=False) - defined[cls]:
            owners = [other.__name__ for other in below if name in defined[other]]
            missing += [f"{cls.__name__}.{name}, of {owners}"] if owners else []
    assert missing == []


def test_no_object_is_changed_from_outside():
    """An attribute is assigned by methods of its own class alone, or through a public property."""
    ours, public = set(), set()
    for cls, node in classes():
        ours |= attributes(node, store=True)
        settable = inspect.getmembers(cls, lambda x: isinstance(x, property) and x.fset)
        public |= {name for name, _ in settable if not name.startswith("_")}
    found = []
    for path, tree in TREES.items():
        own = set()
        for node in [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]:
            names = attributes(node, store=True)
            inside = [part for part in ast.walk(node) if isinstance(part, ast.Attribute)]
            own |= {part for part in inside if part.attr in names}
        for part in ast.walk(tree):
            stored = isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store | ast.Del)
            if not stored or part in own or part.attr not in ours - public:
                continue
            where = path.relative_to(SRC).as_posix(), ast.unparse(part)
            if where not in FOREIGN:
                found.append(f"{where[0]}:{part.lineno} {where[1]}")
    assert found == []


# What the rooms around the optimizers read of other objects that has no public name, and why.
PRIVATE = {
    "compat/v1.py": {  # classes of the same room
        "opt._use_locking", "opt._optimizer", "loss_scale._state", "self._inner._read_numbers",
        "self._inner._slots",
    },
    "distributed/processes.py": {"os._exit"},
    "distributed/watchdog.py": {"os._exit"},
    "interop/keras.py": {"getattr(optimizer, 'inner_optimizer', optimizer)._iterations"},  # Keras's
    "interop/keras_autocast.py": {  # Keras's
        "model._flatten_layers", "self._plain._unpickle_model",
        "model._begin", "model._plain",  # a model of this file
    },
    "interop/keras_log.py": {"self.model.optimizer.inner_optimizer._iterations"},  # Keras's
    "interop/keras_loss_scale.py": {  # Keras's, and a `KerasOptimizer`'s, of the same room
        "optimizer._accumulated_gradients", "self.inner_optimizer._iterations", "inner._iterations",
        "self.dynamic_scale._value", "count._value", "inner._u_product",
        "optimizer._mirror", "inner_optimizer._ours", "optimizer._ours", "inner_optimizer._step",
    },
    "interop/keras_measured.py": {"model._call_has_training_arg"},  # Keras's
    "interop/keras_mirrors.py": {"mirror._is_of_gainstage", "mirror._layout"},  # Keras's variable
    "interop/keras_settings.py": {"optimizer._learning_rate"},  # Keras's
    # The state of `Optax`, of the same room, and two methods that `MultiOptimizer` overrides.
    "optimizers/multi.py": {"optimizer._state", "optimizer._update_all", "optimizer._wants_loss"},
}  # fmt: skip


# What tests read that has no public name, and why.
TOLD = {
    # What `NamedTuple` and `enum` have.
    "": {"_replace", "_asdict", "_fields"},
    # The buffer of an array: after `value()` a step would copy it, which is what is tested.
    "core/test_compiled.py": {"_value", "_runner", "_store"},  # and the program of an eager `apply`
    "core/test_gates.py": {"_runner"},  # the same
    "core/test_variable.py": {"_value", "_checked"},  # a plan; the gradients that a step keeps
    "programs.py": {"_value"},  # a plan
    "lowered.py": {"_value"},  # a plan
    "interrupted.py": {"_is_bound"},  # what an interrupt may leave
    # Keras's own names, some of them given to our classes so that its tests run on them.
    "conformance/run_keras.py": {
        "_store", "_iterations", "_ours", "_mirror", "_testMethodName", "_skip_test_for_stateless",
    },
    "keras/test_keras_fit.py": {"_iterations"},
    "keras/test_inner_optimizers.py": {"_u_product"},
    "conformance/test_torch.py": {"_get_growth_tracker"},  # torch's
    "docs/test_tunix.py": {"_has_aux"},  # Tunix's
}  # fmt: skip


def test_tests_use_public_names():
    """A test loads no private attribute, or it stands in a list with the reason."""
    found = defaultdict(set)
    tests = SRC.parents[1] / "tests"
    for path in tests.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
                owner = ast.unparse(node.value)
                if owner not in ("self", "cls", "super()") and node.attr not in TOLD[""]:
                    found[path.relative_to(tests).as_posix()].add(node.attr)
    assert found == {file: names for file, names in TOLD.items() if file}


def test_optimizers_are_asked_through_one_file():
    """Other rooms reach into no private attribute of an optimizer or variable: what they may ask
    beside what users may stands in `optimizers/_internals.py`, or in a list with a reason."""
    found = defaultdict(set)
    for path, tree in TREES.items():
        where = path.relative_to(SRC).as_posix()
        rooms = ("compat/", "distributed/", "interop/", "runs/", "optimizers/multi.py")
        if not where.startswith(rooms):
            continue
        parts = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        for part in [part for part in parts if re.match(r"_[^_]", part.attr)]:
            if ast.unparse(part.value) in ("self", "cls", "super()"):
                continue
            if part.attr not in ("_asdict", "_replace", "_fields"):  # of a NamedTuple
                found[where].add(ast.unparse(part))
    assert found == PRIVATE


def test_one_table_of_options():
    """Type checkers and the documentation know the options of the table, with the same types."""
    table, keywords = get_type_hints(Arguments), get_type_hints(OptimizerOptions)
    types = {name: (get_args(option) or [option])[0] for name, option in table.items()}
    widened = {"name": str | None, "shard_state_over": str | Sequence[str] | None}
    assert keywords == types | widened
    section = inspect.getdoc(gs.optimizers.Optimizer).split("Args:")[1].split("\n\n")[0]
    assert set(re.findall(r"^    (\w+):", section, re.M)) == {"learning_rate", *types}
    assert set(inspect.signature(gs.optimizers.Optimizer).parameters) == {"learning_rate", *types}


def test_one_place_reads_decides_and_advances():
    """Gradients are read, a step decided on and the scale updated in one place of the package."""
    calls = defaultdict(list)
    for path, tree in TREES.items():
        imported = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("gainstage.")
            for alias in node.names
        }
        for node in ast.walk(tree):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if name in imported or name == "policy.take":
                calls[name].append(path.relative_to(SRC).as_posix())
    for name in ("read_gradients", "policy.take"):
        assert calls[name] == ["_scaling/scaled_step.py"]
    # A recorded run is replayed with other rules: there is no step to be skipped.
    assert calls["advance"] == ["_scaling/scaled_step.py", "runs/other_rules.py"]
    # Each face makes its loss scale in one place: rule, telemetry and policy are one value.
    faces = ["compat/stateful_scale.py", "interop/keras_loss_scale.py"]
    faces += ["optimizers/loss_scale_optimizer.py", "optimizers/optimizer.py"]
    assert calls["ScaledStep"] == [*faces, "transforms/loss_scaled.py"]


def test_one_module_runs_through_programs():
    """The equations of a jaxpr are run through, and looked into, in one module."""
    found = set()
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            named = isinstance(node, ast.Attribute) and node.attr == "eqns"
            if named or (isinstance(node, ast.Constant) and node.value == "eqns"):
                found.add(path.relative_to(SRC).as_posix())
    assert found == {"_programs/jaxprs.py"}


def test_an_operation_stands_in_one_row_of_one_table():
    """The traits of the operations of JAX are written once; no other file lists operations."""
    names = [name for row, _ in operations.OPERATIONS for name in row.split()]
    assert sorted(names) == sorted(set(names))
    found = set()
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            each = node.elts if isinstance(node, ast.Set | ast.List | ast.Tuple) else []
            words = {part.value for part in each if isinstance(part, ast.Constant)}
            if len(words & set(names)) > 6:
                found.add(path.relative_to(SRC).as_posix())
    assert found == set()


def test_one_place_tells_why_a_step_was_skipped():
    """Whether a recorded loss is finite is asked in one file, which decides on the cause;
    alarms, report, replayed rules and Keras's log use it."""
    found, asked = set(), set()
    for path, tree in TREES.items():
        where = path.relative_to(SRC).as_posix()
        if not where.startswith(("runs/", "interop/keras_log")):
            continue
        for node in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
            name = ast.unparse(node.func).rpartition(".")[2]
            about = " ".join(map(ast.unparse, node.args)).replace("loss_scale", "")
            if name in ("isfinite", "isinf", "isnan") and "loss" in about:
                found.add(where)
            asked |= {where} if name in ("cause_of", "why_skipped") else set()
    assert found == {"runs/skip_causes.py"}
    files = ("runs/alarms.py", "runs/findings.py", "runs/other_rules.py", "interop/keras_log.py")
    assert asked >= set(files)


def test_templates_alone_escape_html():
    """Text gets into a page through templates that escape it; one drawing is marked as safe."""
    escaping, safe = set(), set()
    for path, tree in TREES.items():
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


def passed(trace, variables=False):
    """The named functions of the package that are called, and their files, without what Python 3.14
    makes of annotations, and without those of `Variable` unless they are asked for."""
    called = set()

    def note(frame, event, arg):
        if event == "call":
            called.add(frame.f_code)

    sys.setprofile(note)
    try:
        trace()
    finally:
        sys.setprofile(None)
    names = set()
    for code in called:
        path = Path(code.co_filename)
        inner = code.co_qualname.rpartition(".")[2].startswith(("<", "__annotate__"))
        of_variable = code.co_qualname.startswith(("Variable.", "_operator."))
        if SRC in path.parents and not inner and (variables or not of_variable):
            names.add((path.relative_to(SRC).as_posix(), code.co_qualname))
    return len(names), len({file for file, _ in names})


def test_a_step_is_a_short_way():
    """A traced `apply` of a scaled Adam passes at most 85 functions, in 13 files."""
    variables = [gs.Variable(np.ones(shape, np.float32)) for shape in [(8, 8), (8,)]]
    opt = gs.LossScaleOptimizer(gs.optimizers.Adam(0.1))
    opt.build(variables)
    opt.scale_loss(1.0)
    step = gs.functionalize(opt.apply, [*variables, *opt.variables])
    values = [variable.value() for variable in (*variables, *opt.variables)]
    functions, files = passed(lambda: jax.make_jaxpr(step)(values, values[:2]))
    assert functions <= 85
    assert files <= 13


def test_a_step_of_the_optax_loop_is_shorter():
    """Loss, gradients and update of a scaled optax loop pass at most 40 functions."""
    params = {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}
    tx = gs.loss_scaled(optax.adam(0.1))

    def step(params, state):
        loss, grads = gs.value_and_grad(lambda p: (p["w"] @ p["b"]).sum(), state)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = tx.init(params)
    assert passed(lambda: jax.make_jaxpr(step)(params, state))[0] <= 40


def test_whole_ways_do_not_grow():
    """With all that makes the step, watches it and warns: a `train_step` that is made and called
    passes at most 120 functions in 23 files, `minimize` from the constructors on 259 in 37."""
    tx, params = gs.loss_scaled(optax.adam(0.1)), {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}
    state = tx.init(params)

    def train():
        step = gs.train_step(lambda p, x: (p["w"] @ x + p["b"]).sum(), tx)
        step(params, state, jnp.ones(8))

    def minimize():
        w, b = (gs.Variable(np.ones(shape, np.float32)) for shape in [(8, 8), (8,)])
        opt = gs.LossScaleOptimizer(gs.optimizers.Adam(0.1))
        opt.minimize(lambda: (w.value() @ b.value()).sum(), [w, b])

    for way, functions, files in ((train, 120, 23), (minimize, 259, 37)):
        found = passed(way, variables=True)
        assert all(n <= most for n, most in zip(found, (functions, files), strict=True)), found
