"""The slots that an optimizer's `build` adds."""

import jax.numpy as jnp
import numpy as np

import gainstage as gs
from gainstage.optimizers import Variable


def test_every_slot_starts_as_its_own_request_says():
    """A slot is what the initializer of its variable returns; a second `build` keeps it."""

    class Anchored(gs.optimizers.Optimizer):
        def build(self, var_list):
            super().build(var_list)
            for v in var_list:
                self.add_variable_from_reference(v, "start", lambda *_, v=v: v.value() + 0)

        def update_step(self, gradient, variable, learning_rate):
            start = self.get_slot(variable, "start")
            self.assign(variable, variable - learning_rate * (gradient + variable - start))

    weights = [Variable([1.0, 1.0]), Variable([5.0, 5.0, 5.0])]
    opt = Anchored(0.5)
    for _ in range(2):
        opt.apply([jnp.zeros(2), jnp.zeros(3)], weights)
        opt.build(weights)
    assert [w.numpy().tolist() for w in weights] == [[1.0, 1.0], [5.0, 5.0, 5.0]]


class TwoAverages(gs.optimizers.SGD):
    """A rule whose slots have no names of their own, and one that SGD has too."""

    def build(self, var_list):
        super().build(var_list)
        self.firsts = [self.add_variable_from_reference(v) for v in var_list]
        self.seconds = [self.add_variable_from_reference(v) for v in var_list]
        self.own = self.add_optimizer_variables(var_list, "momentum", "ones")


def test_slots_of_one_name_are_several():
    """Each request makes a slot, as in Keras; a second `build` gets those of the first."""
    variables = Variable([1.0, 2.0], name="w"), Variable([3.0, 4.0], name="b")
    opt = TwoAverages(0.5, momentum=0.5)
    for _ in range(2):
        opt.build(variables)
        slots = [opt.momentums[0], opt.firsts[0], opt.seconds[0], opt.own[0]]
        assert len(set(slots)) == 4
        assert len(opt.variables) == 2 + 4 * 2
    assert [float(slots[0][0]) for slots in (opt.own, opt.momentums)] == [1, 0]


def test_random_initializers_have_the_spread_of_keras():
    """Those by the number of inputs and outputs, and those without."""
    shape, opt = (16, 4096), gs.optimizers.SGD()
    fan_in, fans = 16, 16 + 4096
    for name, spread in {
        "glorot_normal": (2 / fans) ** 0.5,
        "glorot_uniform": (2 / fans) ** 0.5,
        "he_normal": (2 / fan_in) ** 0.5,
        "he_uniform": (2 / fan_in) ** 0.5,
        "lecun_normal": (1 / fan_in) ** 0.5,
        "lecun_uniform": (1 / fan_in) ** 0.5,
        "variance_scaling": (1 / fan_in) ** 0.5,
        "random_normal": 0.05,
        "random_uniform": 0.1 / 12**0.5,
    }.items():
        values = opt.add_variable(shape, name).numpy()
        assert abs(values.mean()) < 0.02 * spread, name
        np.testing.assert_allclose(values.std(), spread, rtol=0.02, err_msg=name)
