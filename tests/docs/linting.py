"""Lints each step of a program while it runs.

`python linting.py SCRIPT WORDS` runs a script so; faults end it with 1.
"""

import functools
import runpy
import sys
from pathlib import Path

import jax

import gainstage as gs
from gainstage.optimizers import LossScaleOptimizer
from gainstage.training.train_step import TrainStep

EXAMPLES = Path(__file__).parents[2] / "examples"
# The modules whose calls of `jax.jit` are steps, or parts of one: pages and examples.
OURS = {"__main__", "docs", "origins", *(path.stem for path in EXAMPLES.glob("*.py"))}


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


def wrong(faults):
    """The faults, but that float32 needs no scale: these steps show the scale on small numbers."""
    return [fault for fault in faults if fault.kind != "needless scale"]


def watched(patch):
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

        patch(kind, name, call)

    patch(jax, "jit", linting_jit)
    lint_calls(TrainStep, "__call__")
    lint_calls(gs.optimizers.jit, "__call__")
    lint_calls(LossScaleOptimizer, "minimize")
    return found


def main(script, *words):
    """Runs a script, and says what is found in its steps."""
    sys.argv = [script, *words]
    found = watched(setattr)
    runpy.run_path(script, run_name="__main__")
    if faults := wrong(found.faults):
        sys.exit("\n".join(map(str, faults)))


if __name__ == "__main__":
    main(*sys.argv[1:])
