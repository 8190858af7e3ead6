"""What somebody may write by mistake: it works, is refused, warns once, or is found by `lint`."""

import re
import textwrap
import threading
import warnings

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_floats import SMALL

import gainstage as gs

from misuse.cases import CASES

KINDS = ("works", "refused", "warns", "lints")


def half(w, x):
    """A loss of float16 products, which overflows at a scale of about 2**15."""
    return jnp.mean((x.astype("float16") @ w.astype("float16")).astype("float32") ** 2)


def plain(w, *batch):
    """A loss that needs a loss scale, by a number in float16; times the batch if there is one."""
    return SMALL * jnp.sum(w * w) * jnp.prod(jnp.asarray(batch, jnp.float32))


def scope():
    names = {"gs": gs, "jax": jax, "jnp": jnp, "np": np, "optax": optax, "nnx": nnx}
    names |= {
        "half": half,
        "plain": plain,
        "SMALL": SMALL,
        "sgd": optax.sgd(0.1),
        "NAN": jnp.float32(jnp.nan),
    }
    return names | {"w": jnp.ones(3), "W": jnp.ones((4, 1)), "X": jnp.ones((8, 4))}


@pytest.mark.parametrize(("kind", "match", "code"), CASES.values(), ids=CASES)
def test_it_works_or_says_what_is_wrong(kind, match, code):
    """Nothing fails in silence: the row says which of the four it is."""
    if kind == "lints":
        names = scope()
        exec(code if "args" in code else f"def step():\n{textwrap.indent(code, '    ')}", names)
        found = gs.lint(names["step"], *names.get("args", ()))
        assert any(re.search(match, fault.text, re.S) for fault in found), found
        return
    raised = None
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")  # each line is told once
        try:
            exec(code, scope())
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            raised = error
    told = [str(warning.message) for warning in found]
    if kind == "refused":
        assert raised is not None
        assert re.search(match, str(raised), re.S), raised
        assert len(str(raised)) <= 600
        return
    if raised is not None:
        raise raised
    if kind == "works":
        assert told == []
    else:
        assert len(told) == 1, told
        assert re.search(match, told[0], re.S), told[0]
        assert len(told[0]) <= 600
        assert found[0].filename == "<string>"  # the line of the user, not one inside of a library


# Loops that are told, unasked, that their gradients have no loss scale, and loops that are right.
NOT_SCALED = re.compile("multiplied|get_unscaled_gradients to be called")
UNSCALED = [
    name for name, (kind, match, _) in CASES.items() if kind == "warns" and NOT_SCALED.search(match)
]
SCALED = [
    "a scaled loss, and no rule", "by hand", "scales by hand that are right",
    "SAM with a scaled grad_fn", "scale_loss inside of value_and_grad, for a penalty and for a log",
    "gradients times the scale", "compute_gradients and apply_gradients",
    "all ways to scale in tf2",
]  # fmt: skip


def test_a_warning_does_not_depend_on_what_ran_before(monkeypatch):
    """In both orders, and in two threads at once, each loop is told what it is told alone."""
    names = [name for pair in zip(UNSCALED, SCALED, strict=False) for name in pair]
    names += UNSCALED[len(SCALED) :] + SCALED[len(UNSCALED) :]
    heard = threading.local()
    found = []

    def said(names):
        told = {}
        for name in names:
            heard.now = told[name] = []
            exec(CASES[name][2], scope())
        found.append(
            {name: [bool(NOT_SCALED.search(text)) for text in told[name]] for name in names}
        )

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda text, *_: heard.now.append(str(text)))
        said(names)
        said(names[::-1])
        threads = [threading.Thread(target=said, args=[order]) for order in (names, names[::-1])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    wanted = {name: [True] for name in UNSCALED} | {name: [] for name in SCALED}
    assert len(UNSCALED) >= 5
    assert found == [wanted] * 4


def test_the_table_is_one():
    """Each row has a kind, a text where something is said, and another code than the others."""
    assert {kind for kind, *_ in CASES.values()} == set(KINDS)
    assert all(bool(match) == (kind != "works") for kind, match, _ in CASES.values())
    assert len({code for *_, code in CASES.values()}) == len(CASES)
