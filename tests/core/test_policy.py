import jax.numpy as jnp
import numpy as np
import pytest

import gainstage as gs


@pytest.mark.parametrize(
    ("name", "compute", "variable"),
    [
        ("float32", "float32", "float32"),
        ("mixed_float16", "float16", "float32"),
        ("mixed_bfloat16", "bfloat16", "float32"),
        ("float16", "float16", "float16"),
        ("float8_e5m2", "float8_e5m2", "float8_e5m2"),
    ],
)
def test_names_are_those_of_keras(name, compute, variable):
    """A name stands for the dtypes to compute in and to keep, and round-trips."""
    policy = gs.precision.Policy(name)
    assert (policy.compute_dtype, policy.variable_dtype) == (compute, variable)
    assert gs.precision.Policy.from_config(policy.get_config()) == policy


def test_casting_leaves_other_leaves_alone():
    """Only floating arrays are cast; integers, Python numbers and None stay what they are."""
    policy = gs.precision.Policy("mixed_float16")
    tree = {"a": np.ones(2), "n": jnp.arange(3), "p": 2.5, "none": None, "v": gs.Variable([1.0])}
    cast = policy.cast_to_compute(tree)
    assert (cast["a"].dtype, cast["v"].dtype) == (jnp.float16, jnp.float16)
    assert (cast["n"].dtype, cast["p"], cast["none"]) == (jnp.int32, 2.5, None)
    assert policy.cast_to_variable(cast)["a"].dtype == jnp.float32


@pytest.mark.parametrize("name", ["mixed_int8", "int32", "half precision", "", None, 16])
def test_other_names_are_refused(name):
    """What is no policy is an error that says what there is."""
    with pytest.raises((ValueError, TypeError), match="for name; got"):
        gs.precision.Policy(name)
