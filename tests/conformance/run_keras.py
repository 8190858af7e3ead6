"""Runs the optimizer tests that Keras ships in its wheel on the classes of gainstage.

`python tests/conformance/run_keras.py` prints every failure that `keras_known.json` does not list,
and every entry of that list that did not fail; `--list` prints all failures with their errors.
Each test runs as it is in the installed wheel, in one or both of two ways:

- native: `SGD`, `Adam`, the schedules, ... in the place of Keras's, on variables of ours;
- wrapper: `gainstage.interop.keras.LossScaleOptimizer` around Keras's own optimizers.

What the tests read that is private to Keras, an adapter answers from our state; where they take
`value` for an attribute, ours is a method.
"""

import functools
import itertools
import json
import os
import re
import sys
import traceback
import types
import unittest
import warnings
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras

import gainstage as gs
from gainstage.interop.keras import LossScaleOptimizer
from gainstage.optimizers import SGD, Variable

KNOWN = Path(__file__).with_name("keras_known.json")
FOLDER = Path(keras.__file__).parent / "src/optimizers"
OURS = {
    name: getattr(gs.optimizers, name)
    for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta")
}
OPTIMIZERS = [f"{name.lower()}_test" for name in OURS]
MODES = {
    "native": [
        *OPTIMIZERS,
        "optimizer_test",
        "loss_scale_optimizer_test",
        "schedules/learning_rate_schedule_test",
    ],
    "wrapper": ["loss_scale_optimizer_test"],
}


def clipped(optimizer, grads):
    """Gradients as our clip options leave them: what a step of plain gradient descent takes off."""
    options = {name: getattr(optimizer, name) for name in ("clipnorm", "clipvalue")}
    probe = SGD(1.0, **options, global_clipnorm=optimizer.global_clipnorm)
    variables = [Variable(jnp.zeros(jnp.shape(g))) for g in grads]
    probe.apply(grads, variables)
    return [-v.value() for v in variables]


def native():
    """What the tests import, by name, for the classes of gainstage themselves, which answer to what
    the tests know of the inside of Keras's optimizers."""
    cls = gs.optimizers.Optimizer
    cls._clip_gradients = clipped
    cls._accumulated_gradients = property(lambda o: o._store.accumulators)
    cls._model_variables_moving_average = property(lambda o: o._store.averages)
    cls._iterations = property(lambda o: o._store.steps)
    backend = types.SimpleNamespace(**vars(keras.src.backend))
    backend.Variable = lambda *args, **kwargs: Variable(*args, **kwargs)
    optimizers = types.SimpleNamespace(**OURS, schedules=gs.optimizers.schedules)
    optimizers.get, optimizers.serialize = gs.optimizers.get, gs.optimizers.serialize
    optimizers.deserialize = gs.optimizers.deserialize
    return {
        **OURS,
        "backend": backend,
        "optimizers": optimizers,
        "schedules": gs.optimizers.schedules,
        "LossScaleOptimizer": gs.optimizers.LossScaleOptimizer,
    }


def wrapper():
    """The same for our wrapper around optimizers of Keras."""
    return {"LossScaleOptimizer": LossScaleOptimizer}


def load(mode, name, replaced):
    """A test module of the wheel, with other classes in the place of those it imports."""
    path = FOLDER / f"{name}.py"
    source = path.read_text()
    if mode == "native":
        # What the tests take for an attribute is a method of our variables.
        source = re.sub(r"\.value\b(?!\()", ".value()", source)
    module = types.ModuleType(f"{mode}_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    exec(compile(source, str(path), "exec"), vars(module))
    vars(module).update({k: v for k, v in replaced.items() if k in vars(module)})
    return module


class Result(unittest.TestResult):
    """Keeps what each test ended with: None, or the last line of its error."""

    def __init__(self):
        super().__init__()
        self.ended = {}

    def startTest(self, test):  # noqa: N802
        super().startTest(test)
        self.ended[test.id()] = None

    def addError(self, test, err):  # noqa: N802
        self.ended[test.id()] = "".join(traceback.format_exception_only(*err[:2])).strip()

    addFailure = addError  # noqa: N815

    def addSkip(self, test, reason):  # noqa: N802
        self.ended.pop(test.id(), None)


def same_type(self, expected, *args, **kwargs):
    """`assertRaisesRegex` without the text, which is ours."""
    return self.assertRaises(expected, *args[1:], **kwargs)  # noqa: PT027


def is_skipped(test):
    """Whether pytest would skip a test: one for another backend."""
    method = getattr(test, test._testMethodName)
    marks = getattr(method, "pytestmark", [])
    return any(mark.name == "skipif" and mark.args[0] for mark in marks)


def tests_of(mode):
    """Every test of a mode, with what it needs of an adapter."""
    replaced = {"native": native, "wrapper": wrapper}[mode]()
    ours = {
        **OURS,
        "LossScaleOptimizer": gs.optimizers.LossScaleOptimizer,
        **vars(gs.optimizers.schedules),
    }
    for name in MODES[mode]:
        module = load(mode, name, replaced)
        for test in itertools.chain(*unittest.defaultTestLoader.loadTestsFromModule(module)):
            case = type(test)
            case.assertRaisesRegex = same_type
            if hasattr(case, "_skip_test_for_stateless"):  # Keras's `apply` fails on JAX, ours not
                case._skip_test_for_stateless = lambda self, stateless: None
            if mode == "native":  # Keras does not know our classes
                check = keras.src.testing.TestCase.run_class_serialization_test
                case.run_class_serialization_test = functools.partialmethod(
                    check, custom_objects=ours
                )
            if not is_skipped(test):
                yield test


def run(mode):
    """Every test of a mode by name, with None or its error."""
    result = Result()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        unittest.TestSuite(tests_of(mode)).run(result)
    return result.ended


def compare(ended, known):
    """The failures that are not listed, and the listed ones that are none."""
    failed = {name for name, error in ended.items() if error}
    return sorted(failed - set(known)), sorted(set(known) - failed)


def main():
    """Runs the modes that are named, by default all; ends with an error if the failures are not
    those that are listed."""
    # Each program runs once or twice. Not at the top: pytest imports this file for its doctests.
    jax.config.update("jax_disable_most_optimizations", True)
    ended, modes = {}, [mode for mode in MODES if mode in sys.argv] or list(MODES)
    for mode in modes:
        ended |= run(mode)
    known = json.loads(KNOWN.read_text())
    listed = known["failures"].items()
    known["failures"] = {n: e for n, e in listed if n.startswith(tuple(f"{m}_" for m in modes))}
    if "--list" in sys.argv:
        for name, error in ended.items():
            if error:
                print(f"{name}: {error.splitlines()[0][:300]}")
    unexpected, gone = compare(ended, known["failures"])
    same = keras.__version__ == known["keras"]
    for mode in modes:
        of_mode = {n: e for n, e in ended.items() if n.startswith(f"{mode}_")}
        passed = sum(error is None for error in of_mode.values())
        print(f"{mode}: {passed} of {len(of_mode)} tests of Keras {keras.__version__} pass")
    for name in unexpected:
        print(f"unexpected failure: {name}: {ended[name]}")
    for name in gone if same else ():
        print(f"no failure any more: {name}")
    return bool(unexpected or (same and gone))


if __name__ == "__main__":
    sys.exit(main())
