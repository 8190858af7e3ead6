"""A warning names the user's line, whoever called the library."""

import functools
import os
import warnings
from pathlib import Path

import jax
import pytest

from gainstage._base.warn import is_installed, warn


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_the_lines_of_libraries_are_passed_over(folder):
    """Frames of Python, of JAX and of what is installed stand between the warning and its line."""
    trainer = os.path.join(os.sep, "opt", folder, "trainer.py")
    names = {}
    exec(compile("def fit(step):\n    step()", trainer, "exec"), names)
    step = jax.jit(functools.partial(warn, "Look at this."))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names["fit"](step)
    assert [(str(w.message), w.filename) for w in caught] == [("Look at this.", __file__)]


def test_what_is_the_users_own():
    """A project is the user's, also with such a name, and so is what is typed at a prompt."""
    assert not any(map(is_installed, [__file__, "<stdin>", "/home/me/site-packages.py"]))
    assert all(map(is_installed, [jax.__file__, os.__file__, "<frozen runpy>"]))
    assert is_installed(str(Path(warn.__code__.co_filename).with_name("checks.py")))
