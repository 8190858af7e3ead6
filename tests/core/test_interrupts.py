"""A step, a load or a recording that is interrupted leaves the state of before or of after it."""

import _signal
import contextlib
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import gainstage as gs
from gainstage._base.signals import deferred_signals
from gainstage.optimizers import SGD, Variable

SCRIPT = Path(__file__).parents[1] / "interrupted.py"


@pytest.mark.parametrize(
    ("trials", "elements", "kinds"),
    [
        (40, 200_000, ["apply", "step", "load", "record"]),
        pytest.param(1000, 1_000_000, [], marks=pytest.mark.slow),
    ],
)
def test_a_signal_at_any_moment_loses_nothing(trials, elements, kinds, tmp_path):
    """Whenever a handler raises, weights, slots and scale are all of before or all of after."""
    command = [sys.executable, str(SCRIPT), str(trials), "0", str(elements), str(tmp_path), *kinds]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert {kind: told["lost"] for kind, told in found.items()} == {kind: [] for kind in found}
    assert sum(told["interrupted"] for told in found.values()) > 0.9 * trials


def test_signals_wait_for_the_end():
    """Inside of `deferred_signals` no handler runs; at its end all do, even if the first raises."""
    seen = []

    def handler(number, frame):
        seen.append(number)
        raise InterruptedError(number)

    numbers = [signal.SIGUSR1, signal.SIGUSR2]
    before = [signal.signal(number, handler) for number in numbers]

    def nested():
        with deferred_signals(), deferred_signals():
            for number in numbers:
                signal.raise_signal(number)
            assert seen == []

    try:
        with pytest.raises(InterruptedError):
            nested()
        assert seen == numbers
        assert [signal.getsignal(number) for number in numbers] == [handler, handler]
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)


def test_other_threads_take_steps():
    """In a thread that is not the main one a step is taken as ever: no signal arrives there."""
    weight, opt = Variable(1.0), SGD(0.5)
    thread = threading.Thread(target=lambda: opt.apply([1.0], [weight]))
    thread.start()
    thread.join()
    assert float(weight) == 0.5


def fails(x):
    raise RuntimeError("from a callback")


def calling_back(call):
    """An optimizer whose rule calls back into Python, which raises, and its variable."""

    class CallingBack(SGD):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(call(gradient), variable, learning_rate)

    return CallingBack(0.5, momentum=0.9), Variable(jnp.ones(3), name="w")


SHAPE = jax.ShapeDtypeStruct((3,), jnp.float32)
CALLBACKS = {
    "pure": lambda x: jax.pure_callback(fails, SHAPE, x),
    "io": lambda x: jax.experimental.io_callback(fails, SHAPE, x),
    "in a branch": lambda x: jax.lax.cond(x[0] > 0, CALLBACKS["pure"], lambda x: x, x),
}


@pytest.mark.parametrize("call", CALLBACKS.values(), ids=CALLBACKS)
def test_a_callback_that_raises_changes_nothing(call):
    """An exception from Python code inside of a step leaves weights and slots as they were."""
    opt, weight = calling_back(call)
    opt.build([weight])
    step = gs.optimizers.jit(lambda g: opt.apply([g]), state=([weight], opt.variables), donate=True)
    before = [v.numpy().tolist() for v in (weight, *opt.variables)]
    for take in (lambda g: opt.apply([g]), step):
        with pytest.raises(jax.errors.JaxRuntimeError, match="from a callback"):
            take(jnp.ones(3))
        assert [v.numpy().tolist() for v in (weight, *opt.variables)] == before


def test_a_step_inside_of_a_loss_is_refused():
    """`apply` inside of the loss of `minimize` is an error, and changes nothing."""
    weight, opt = Variable(jnp.ones(3), name="w"), SGD(0.5)

    def loss():
        opt.apply([jnp.ones(3)], [weight])
        return (weight * weight).sum()

    with pytest.raises(ValueError, match="In a loss: move `apply` out of it, after `minimize`"):
        opt.minimize(loss, [weight])
    assert weight.numpy().tolist() == [1.0, 1.0, 1.0]
    opt.minimize(lambda: weight.value().sum(), [weight])
    assert weight.numpy().tolist() == [0.5, 0.5, 0.5]


def test_a_weight_that_is_its_own_gradient_is_trained():
    """A backward pass may return the weight itself, whose memory the step reuses."""

    @jax.custom_vjp
    def half_square(x):
        return (x * x).sum() / 2

    half_square.defvjp(lambda x: (half_square(x), x), lambda x, cotangent: (x,))
    weight, opt = Variable([1.0, 2.0]), SGD(0.25)
    loss = opt.minimize(lambda: half_square(weight.value()), [weight])
    assert (float(loss), weight.numpy().tolist()) == (2.5, [0.75, 1.5])


@pytest.mark.parametrize("moment", range(16))
def test_handlers_are_restored_though_one_raises_meanwhile(moment, monkeypatch):
    """A handler that raises while others are replaced or restored leaves each as it was."""
    numbers = [signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2]
    before = [signal.signal(number, lambda *_: None) for number in numbers]
    wanted, calls, real = list(map(signal.getsignal, numbers)), [], _signal.signal

    def replaced(number, handler):
        real(number, handler)
        calls.append(number)
        if len(calls) == moment + 1:
            raise InterruptedError(number)  # as a handler does that runs just now

    monkeypatch.setattr(_signal, "signal", replaced)
    try:
        with contextlib.suppress(InterruptedError), deferred_signals():
            pass
        assert list(map(signal.getsignal, numbers)) == wanted
    finally:
        monkeypatch.undo()
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old or signal.SIG_DFL)
