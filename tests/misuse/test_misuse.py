"""What somebody may write by mistake: it works, is refused, warns once, or is found by `lint`."""

import re
import textwrap
import warnings

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs

from misuse.cases import CASES

KINDS = ("works", "refused", "warns", "lints")


def half(w, x):
    """A loss of float16 products, which overflows at a scale of about 2**15."""
    return jnp.mean((x.astype("float16") @ w.astype("float16")).astype("float32") ** 2)


def plain(w, *batch):
    """A loss in float32, times the batch if there is one."""
    return jnp.sum(w * w) * jnp.prod(jnp.asarray(batch, jnp.float32))


def scope():
    names = {"gs": gs, "jax": jax, "jnp": jnp, "np": np, "optax": optax, "nnx": nnx}
    names |= {"half": half, "plain": plain, "sgd": optax.sgd(0.1), "NAN": jnp.float32(jnp.nan)}
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
        warnings.simplefilter("always")
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


def test_the_table_is_one():
    """Each row has a kind, a text where something is said, and another code than the others."""
    assert {kind for kind, *_ in CASES.values()} == set(KINDS)
    assert all(bool(match) == (kind != "works") for kind, match, _ in CASES.values())
    assert len({code for *_, code in CASES.values()}) == len(CASES)
