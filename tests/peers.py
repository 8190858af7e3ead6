"""Other libraries, held against what a test of ours has just shown.

The behaviours were found in keras 3.15.1, jmp 0.0.4, mpx 0.1.8 (the package is called
mixed_precision_for_JAX), flax 0.12.8, jaxamp 0.0.4 and optax 0.2.8. Our half of a test comes first
and always runs; then the peer's, where the peer is installed and has not been mended since.
"""

import contextlib
import warnings

import jax
import pytest


@contextlib.contextmanager
def live(name):
    """A peer's module, whose warnings are its own affair; the test is skipped from here without."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip(
            name, reason=f"{name} is not installed: ours holds", exc_type=ImportError
        )


def fails(peer, failed):
    """What a peer should still be doing wrong, or else the test is skipped from here."""
    if not failed:
        pytest.skip(f"{peer.__name__} {getattr(peer, '__version__', '')}: mended there; ours holds")


def keras_step(opt, variables):
    """A step of Keras on JAX, by the only method that works there."""
    opt.build(variables)
    pure = jax.jit(opt.stateless_apply)

    def step(*grads):
        new = pure([v.value for v in opt.variables], list(grads), [v.value for v in variables])
        for kept, values in zip((variables, opt.variables), new, strict=True):
            for variable, value in zip(kept, values, strict=True):
                variable.assign(value)

    return step
