"""`group_small`: the slots of small variables share buffers, and nothing else changes."""

import copy
import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import gainstage as gs
from gainstage.compat import dtensor

from table import ELEMENTWISE

SHAPES = [(3, 2), (5,), (), (100, 50), (7,), (4, 4)]  # the fourth is too large to be grouped
KINDS = ELEMENTWISE | {"mesh": lambda **o: dtensor.Adam(0.1, jit_compile=True, **o)}
OPTIONS = [
    {},
    {"clipnorm": 0.5, "weight_decay": 0.1},
    {"global_clipnorm": 0.5, "use_ema": True},
    {"clipvalue": 0.5, "gradient_accumulation_steps": 2},
]


def make(kind, dtype=np.float32, **options):
    rng = np.random.default_rng(0)
    variables = [
        gs.Variable(rng.normal(size=shape), dtype=dtype, name=f"v{i}")
        for i, shape in enumerate(SHAPES)
    ]
    opt = gs.LossScaleOptimizer(KINDS[kind](**options), initial_scale=8.0)
    opt.build(variables)
    return variables, opt


def train(variables, opt, steps=5):
    rng = np.random.default_rng(1)
    for step in range(steps):
        grads = [8 * rng.normal(size=shape) for shape in SHAPES]
        if step == 2:
            grads[1] = grads[1] * np.nan
        opt.apply([g.astype(v.dtype) for g, v in zip(grads, variables, strict=True)], variables)
    return variables


def cases():
    for kind, options in itertools.product(KINDS, OPTIONS):
        seldom = options and kind not in ("sgd", "adam")
        name = "-".join([kind, *options])
        yield pytest.param(kind, options, id=name, marks=[pytest.mark.slow] if seldom else [])


@pytest.mark.parametrize(("kind", "options"), list(cases()))
def test_a_grouped_step_is_the_same_step(kind, options):
    """Every rule with every option takes the same steps, a skipped one included."""
    if kind == "adamw" and "weight_decay" in options:
        options = {**options, "weight_decay": 0.01}
    alone, together = make(kind, **options), make(kind, group_small=True, **options)
    assert len(together[1].variables) < len(alone[1].variables)
    for a, b in zip(train(*alone), train(*together), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=2e-6, atol=1e-7)
    assert float(together[1].loss_scale) == 4.0


def test_float16_variables_are_grouped():
    """Half-precision weights share float32 buffers and stay float16 themselves."""
    alone, together = make("adam", np.float16), make("adam", np.float16, group_small=True)
    for a, b in zip(train(*alone), train(*together), strict=True):
        assert b.dtype == np.float16
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-3)


@pytest.mark.filterwarnings("ignore:No gradient for")
def test_a_variable_without_gradient_is_left_alone_in_its_group():
    """None for one of a group leaves its weight and its part of the buffers bit for bit."""
    (variables, opt), (twins, alone) = make("adam", group_small=True), make("adam")
    train(variables, opt)
    train(twins, alone)
    before = variables[1].numpy().tobytes()
    grads = [np.ones(shape, np.float32) for shape in SHAPES]
    for _ in range(2):
        opt.apply([grads[0], None, *grads[2:]], variables)
        alone.apply([grads[0], None, *grads[2:]], twins)
    assert variables[1].numpy().tobytes() == before
    train(variables, opt)
    train(twins, alone)
    for a, b in zip(variables, twins, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=2e-6, atol=1e-7)


def test_the_table_says_where_a_slot_is():
    """`groups` names each small variable, its shape and its place in the buffers."""
    variables, opt = make("sgd", group_small=True)
    assert opt.groups == [
        [["v0", [3, 2], 0], ["v1", [5], 6], ["v2", [], 11], ["v4", [7], 12], ["v5", [4, 4], 19]]
    ]
    opt.apply([np.full(shape, 8.0, np.float32) for shape in SHAPES], variables)
    (buffer,) = [slot for slot in opt.variables if "group_0" in slot.name]
    assert buffer.name == "sgd/group_0_momentum".replace("sgd", opt.inner_optimizer.name)
    assert buffer.shape == (35,)
    np.testing.assert_allclose(buffer.numpy(), -0.1, rtol=1e-6)
    assert make("sgd")[1].groups == []


@pytest.mark.parametrize(("count", "sizes"), [(33, [32]), (66, [32, 32, 2])])
def test_a_group_is_never_large(count, sizes):
    """At most 32 share a buffer, so that XLA compiles equal groups once; none has one alone."""
    variables = [gs.Variable(np.ones(2, np.float32), name=f"v{i}") for i in range(count)]
    opt = gs.SGD(0.5, 0.9, group_small=True)
    opt.build(variables)
    assert [len(group) for group in opt.groups] == sizes
    opt.apply([np.full(2, i, np.float32) for i in range(count)], variables)
    for i, variable in enumerate(variables):
        np.testing.assert_allclose(variable.numpy(), 1 - 0.5 * i)


def test_a_grouped_optimizer_is_saved_with_its_table():
    """A stored dictionary, a pickle and a copy continue alike; other groups are refused."""
    variables, opt = make("adam", group_small=True)
    train(variables, opt, 2)
    store = {}
    opt.save_own_variables(store)
    twins = [pickle.loads(pickle.dumps((variables, opt))), copy.deepcopy((variables, opt))]
    fresh, loaded = make("adam", group_small=True)
    for v, value in zip(fresh, variables, strict=True):
        v.assign(value)
    loaded.load_own_variables(store)
    twins.append((fresh, loaded))
    expected = [v.numpy().tolist() for v in train(variables, opt)]
    for twin in twins:
        assert [v.numpy().tolist() for v in train(*twin)] == expected
    with pytest.raises(ValueError, match="Expected the groups"):
        make("adam")[1].load_own_variables(store)
    del store["groups"]
    with pytest.raises(ValueError, match="Expected the groups"):
        loaded.load_own_variables(store)


def test_the_option_is_part_of_the_configuration():
    """`group_small` is described where it is set, and left out where it is not."""
    assert "group_small" not in gs.Adam().get_config()
    config = gs.Adam(group_small=True).get_config()
    assert gs.Adam.from_config(config).group_small is True
    with pytest.raises(TypeError, match="group_small"):
        gs.Adam(group_small=1)


class Normed(gs.SGD):
    """A rule that looks at a whole tensor, and so cannot be joined with others."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient / jnp.linalg.norm(gradient), variable, learning_rate)


def test_rules_that_cannot_be_grouped_are_not():
    """An `update_step` of one's own is called per variable unless it says `elementwise`."""
    variables = [gs.Variable([3.0, 4.0]), gs.Variable([1.0, 0.0])]
    opt = Normed(1.0, group_small=True)
    opt.apply([[3.0, 4.0], [2.0, 0.0]], variables)
    assert opt.groups == []
    np.testing.assert_allclose(variables[0].numpy(), [2.4, 3.2], rtol=1e-6)

    class Sign(gs.Optimizer):
        elementwise, calls = True, 0

        def update_step(self, gradient, variable, learning_rate):
            Sign.calls += 1
            self.assign_sub(variable, learning_rate * jnp.sign(gradient))

    variables = [gs.Variable([3.0, 4.0]), gs.Variable(1.0)]
    Sign(0.5, group_small=True).apply([[3.0, -4.0], 2.0], variables)
    assert Sign.calls == 1
    assert [v.numpy().tolist() for v in variables] == [[2.5, 4.5], 0.5]


def test_variables_on_a_mesh_are_not_grouped():
    """What is spread over devices keeps slots of its own, in its own layout."""
    mesh = jax.make_mesh((8,), ("x",))
    spread = NamedSharding(mesh, PartitionSpec("x"))
    variables = [gs.Variable(jax.device_put(np.ones(8), spread)) for _ in range(3)]
    opt = gs.Adam(0.1, group_small=True)
    opt.build(variables)
    assert opt.groups == []
    assert all(s.sharding.is_equivalent_to(spread, 1) for s in opt.variables if s.ndim)


@pytest.mark.filterwarnings("ignore:No gradient for")
def test_a_group_takes_gradients_of_several_dtypes():
    """With `group_small` gradients of float64, of float32 and missing ones may be mixed."""
    with jax.enable_x64(True):
        a, b, c = (gs.Variable([1.0, 2.0], dtype=jnp.float32) for _ in range(3))
        opt = gs.SGD(0.5, group_small=True)
        opt.apply([np.ones(2), np.ones(2, np.float32), None], [a, b, c])
        assert [v.numpy().tolist() for v in (a, b, c)] == [[0.5, 1.5], [0.5, 1.5], [1.0, 2.0]]


@pytest.mark.parametrize("grouped", [False, True])
def test_every_slot_starts_as_its_own_request_says(grouped):
    """With `group_small`, too, a slot is what the initializer of its variable returns."""

    class Anchored(gs.Optimizer):
        elementwise = True

        def build(self, var_list):
            super().build(var_list)
            for v in var_list:
                self.add_variable_from_reference(v, "start", lambda *_, v=v: v.value() + 0)

        def update_step(self, gradient, variable, learning_rate):
            start = self.get_slot(variable, "start")
            self.assign(variable, variable - learning_rate * (gradient + variable - start))

    weights = [gs.Variable([1.0, 1.0]), gs.Variable([5.0, 5.0, 5.0])]
    opt = Anchored(0.5, group_small=grouped)
    for _ in range(2):
        opt.apply([jnp.zeros(2), jnp.zeros(3)], weights)
        opt.build(weights)
    assert [w.numpy().tolist() for w in weights] == [[1.0, 1.0], [5.0, 5.0, 5.0]]


def scaled_sgd():
    w = gs.Variable([1.0, 2.0], name="w")
    return w, gs.LossScaleOptimizer(gs.SGD(0.5), initial_scale=2.0)


class TwoAverages(gs.SGD):
    """A rule whose slots have no names of their own, and one that SGD has too."""

    def build(self, var_list):
        super().build(var_list)
        self.firsts = [self.add_variable_from_reference(v) for v in var_list]
        self.seconds = [self.add_variable_from_reference(v) for v in var_list]
        self.own = self.add_optimizer_variables(var_list, "momentum", "ones")


@pytest.mark.parametrize("group_small", [False, True])
def test_slots_of_one_name_are_several(group_small):
    """Each request makes a slot, as in Keras; a second `build` gets those of the first."""
    variables = scaled_sgd()[0], gs.Variable([3.0, 4.0], name="b")
    opt = TwoAverages(0.5, momentum=0.5, group_small=group_small)
    for _ in range(2):
        opt.build(variables)
        slots = [opt.momentums[0], opt.firsts[0], opt.seconds[0], opt.own[0]]
        assert len(set(slots)) == 4
        assert len(opt.variables) == 2 + 4 * (1 if group_small else 2)
    assert [float(slots[0][0]) for slots in (opt.own, opt.momentums)] == [1, 0]
