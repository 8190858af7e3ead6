"""The page of operations and their dtypes says what is computed."""

import pytest
from docs.pages import DOCS

for needed in ("rich",):
    pytest.importorskip(needed)

from studies import dtypes_of_operations as study


def test_the_lists_are_those_of_the_programs():
    """Made again, they are those of the page."""
    assert study.tables() in (DOCS / "operations.md").read_text()


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("`jnp.tanh`", ["float16"]),
        ("`jnp.exp`", ["float32"]),
        ("`jnp.sum`, `jnp.mean`", ["float32"]),
        ("`jax.nn.softmax`", ["float16", "float32"]),
    ],
)
def test_an_operation_has_the_dtypes_that_torch_has_for_it(name, dtypes):
    """What torch's list has in float16 or float32 is so here; a softmax moves in half precision."""
    assert study.dtypes_of(study.FUNCTIONS[name]) == dtypes
