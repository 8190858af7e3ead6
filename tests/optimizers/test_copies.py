"""Copies of optimizers, and optimizers from a pickle: what they train."""

import copy
import pickle

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from gainstage.optimizers import SGD, LossScaleOptimizer, Variable

COPY = {"deepcopy": copy.deepcopy, "pickle": lambda opt: pickle.loads(pickle.dumps(opt))}
MAKE = {
    "plain": lambda: SGD(0.25, momentum=0.5),
    "scaled": lambda: LossScaleOptimizer(SGD(0.25, momentum=0.5)),
}


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize("duplicate", COPY.values(), ids=COPY)
def test_a_copy_trains_its_own_variables(make, duplicate):
    """A copy goes on where the original was, on its public `trainable_variables`, and changes
    nothing of the original."""
    w, opt = Variable(1.0, name="w"), make()
    assert opt.trainable_variables == []
    opt.minimize(lambda: w**2, [w])
    again = duplicate(opt)
    (own,) = again.trainable_variables
    assert (own.name, float(own), own is w) == ("w", float(w), False)
    before = float(w)
    for each, variable in ((again, own), (opt, w)):
        each.minimize(lambda variable=variable: variable**2, [variable])
    assert float(own) == float(w) != before


@pytest.mark.parametrize("duplicate", COPY.values(), ids=COPY)
def test_the_error_for_a_variable_of_the_original_says_what_to_do(duplicate):
    """A copy does not know the original's variables; the error names its own list."""
    w, opt = Variable(1.0, name="w"), SGD(0.25)
    opt.minimize(lambda: w**2, [w])
    with pytest.raises(ValueError, match=r"another variable of that name.*`trainable_variables`"):
        duplicate(opt).minimize(lambda: w**2, [w])


def test_an_optimizer_on_a_mesh_is_copied_but_not_pickled():
    """Devices cannot be pickled; the error says how to save the state, and that way works."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))

    def make():
        w = Variable(jax.device_put(jnp.ones(jax.device_count()), sharding), name="w")
        opt = LossScaleOptimizer(SGD(0.25, 0.5, mesh=mesh))
        opt.build([w])
        return w, opt

    w, opt = make()
    opt.apply([w.value()])
    again = copy.deepcopy(opt)
    (own,) = again.trainable_variables
    again.apply([own.value()])
    assert own.sharding == again.inner_optimizer.momentums[0].sharding == sharding
    for each in (opt, w):
        with pytest.raises(TypeError, match=r"on a mesh cannot be pickled.*`load_state`"):
            pickle.dumps(each)
    _, other = make()
    other.load_state(pickle.loads(pickle.dumps(jax.device_get(opt.state()))))
    momentums = [each.inner_optimizer.momentums[0].numpy() for each in (other, opt)]
    assert (momentums[0] == momentums[1]).all()
