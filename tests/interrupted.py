"""Raises exceptions out of signal handlers at random moments, and looks what is left of the state.

Run as `python interrupted.py TRIALS SEED ELEMENTS FOLDER`; prints JSON: for each kind of call how
often it was interrupted, and what was wrong afterwards.

The state is a function of the number of steps taken, so that it can be seen whether all of it is of
one moment: after k steps every weight is -k and so is its moving average.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import gainstage as gs
from gainstage.diagnostics import JsonLines
from gainstage.optimizers import SGD

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1]
TENSORS = 10
GROWTH = 3
KINDS = ["apply", "minimize", "step", "uncompiled", "fresh", "load", "record"]


class Interruptedly(KeyboardInterrupt):
    """What the handlers raise."""

    @classmethod
    def is_behind(cls, error):
        """Whether it is the error, or what the error was raised for."""
        while error is not None and not isinstance(error, cls):
            error = error.__cause__ or error.__context__
        return error is not None


def interrupt(number, frame):
    raise Interruptedly(number)


class Run:
    """An optimizer that takes away 1 from every weight in a step."""

    def __init__(self, elements, jit_compile=True):
        self.weights = [
            gs.optimizers.Variable(jnp.zeros(elements), name=f"w{i}") for i in range(TENSORS)
        ]
        inner = SGD(1.0, use_ema=True, ema_momentum=0.0, jit_compile=jit_compile)
        rule = gs.DynamicLossScale(1.0, GROWTH, max_scale=2.0**4)
        self.opt = gs.optimizers.LossScaleOptimizer(inner, loss_scale=rule)
        self.opt.build(self.weights)
        self.step = gs.optimizers.jit(
            self.minimize, (self.weights, self.opt.variables), donate=True
        )
        self.ones = jnp.ones(elements)

    def minimize(self):
        self.opt.minimize(lambda: sum(w.value().sum() for w in self.weights), self.weights)

    def apply(self):
        self.opt.apply([self.ones * self.opt.loss_scale] * TENSORS)

    def load(self):
        steps = random.choice([0, 7, 8])
        self.opt.set_weights([np.asarray(x) for x in expected(self.opt, steps)])

    def values(self):
        return [v.numpy() for v in (*self.opt.variables, *self.weights)]

    def steps(self):
        """The number of steps that all of the state says, or an error."""
        steps = int(self.opt.iterations)
        for variable, want in zip(self.opt.variables, expected(self.opt, steps), strict=True):
            if not np.array_equal(variable.numpy(), want):
                raise AssertionError(f"{variable.name} is not that of {steps} steps")
        return steps


def expected(opt, steps):
    """The optimizer's state after so many steps."""
    scale = 2.0 ** min(steps // GROWTH, 4)
    known = {"step_counter": steps % GROWTH, "dynamic_scale": scale, "iteration": steps}
    names = [(v, v.name.split("/")[-1]) for v in opt.variables]
    rate = {"learning_rate": 1.0}
    return [np.full(v.shape, (known | rate).get(name, -steps), v.dtype) for v, name in names]


def check(run, before):
    """What is wrong after an interrupt in the step behind `before` steps; None if nothing."""
    try:
        steps = run.steps()
        values = [w.numpy() for w in run.weights]
        weights = {float(x) for value in values for x in (value.min(), value.max())}
        if weights != {-steps}:
            return f"weights {weights} after {steps} steps"
        if steps not in (before, before + 1):
            return f"{steps} steps after {before}"
        if any(v._is_bound for v in (*run.weights, *run.opt.variables)):
            return "a variable is still bound"
    except Exception as error:
        return repr(error)
    return None


def interrupted(call, delay):
    """Calls until a signal ends it; how many calls returned, and whether one was interrupted."""
    count, timer = 0, threading.Timer(delay, os.kill, (os.getpid(), random.choice(SIGNALS)))
    try:
        timer.start()
        end = time.monotonic() + delay + 20
        while time.monotonic() < end:
            call()
            count += 1
    except BaseException as error:
        if not Interruptedly.is_behind(error):
            raise
        return count, True
    return count, False


def timed(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main(trials, seed, elements, folder):
    random.seed(seed)
    for number in SIGNALS:
        signal.signal(number, interrupt)
    found = {}
    kinds = sys.argv[5:] or KINDS
    for kind in kinds:
        lost, hits = [], 0
        run = Run(elements, jit_compile=kind != "uncompiled")
        name = {"uncompiled": "apply", "fresh": "apply"}.get(kind, kind)
        path = Path(folder) / "run.jsonl"
        for trial in range(trials // len(kinds)):
            if kind == "fresh":  # its first step, with all that is traced and compiled for it
                run = Run(elements)
            if kind == "record":
                before, hit, wrong = recorded(path, trial)
            elif kind == "load":
                before, hit, wrong = loaded(run)
            else:
                call = getattr(run, name)
                if trial == 0 and kind != "fresh":
                    call()
                before = run.steps()
                usual = timed(call) if kind != "fresh" else 0.5
                before += kind != "fresh"
                count, hit = interrupted(call, random.uniform(0, 2 * usual))
                wrong = check(run, before + count)
            hits += hit
            if wrong:
                lost.append(wrong)
                run = Run(elements, jit_compile=kind != "uncompiled")
        found[kind] = {"interrupted": hits, "lost": lost}
    print(json.dumps(found))


def loaded(run):
    count, hit = interrupted(run.load, random.uniform(0, 2 * timed(run.load)))
    try:
        run.steps()
    except Exception as error:
        return count, hit, repr(error)
    return count, hit, None


def recorded(path, trial):
    """A recording that is interrupted, and gone on with; every line of it is whole."""
    path.unlink(missing_ok=True)
    written = []

    def write():
        n = len(written)
        written.append(n)
        run.write(n, loss=float(n))

    hit = False
    try:
        with JsonLines(path, every=3) as run:
            _, hit = interrupted(write, random.uniform(0, 0.005))
    except Interruptedly:
        hit = True
    lines = path.read_text().splitlines()
    try:
        records = map(json.loads, lines)
        steps = [record["step"] for record in records]
    except ValueError as error:
        return 0, hit, repr(error)
    whole = steps == list(range(len(steps))) and len(written) - len(steps) <= 1
    return 0, hit, None if whole else f"{len(steps)} of {len(written)} steps: {steps[-5:]}"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
