"""The operations of a program as JAX traces it."""

from jax.extend.core import jaxprs_in_params


def equations(program):
    """All equations of what `jax.make_jaxpr` returns, and of the programs inside of it."""
    for eqn in getattr(program, "jaxpr", program).eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


def is_call(eqn):
    """Whether an equation is one of those that have programs inside of them."""
    return any(True for _ in jaxprs_in_params(eqn.params))
