"""Any sequence of what users do with an optimizer: it stays what float64 numpy computes."""

import copy
import functools
import pickle

import jax
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from transfers import through_a_store, through_arrays

import gainstage as gs
from gainstage.optimizers import SGD, Adam

from grid import SHAPES, random_gradients, values
from oracles import Oracle, keras_step

FIRST, GROWTH, RATES, CLIPS = 2.0**6, 3, (1 / 64, 1 / 32), (0.7, 1.4)
SETS = {  # class, its options, those of the wrapper
    "momentum and decay": (SGD, {"momentum": 0.9, "weight_decay": 0.1}, {}),
    "a clip of all": (Adam, {"global_clipnorm": CLIPS[0]}, {}),
    "averages": (Adam, {"amsgrad": True, "use_ema": True, "ema_momentum": 0.8,
                           "ema_overwrite_frequency": 3}, {}),
    "a fixed scale and microbatches": (SGD, {"momentum": 0.9, "gradient_accumulation_steps": 2},
                                       {"loss_scale": gs.FixedLossScale(FIRST)}),
}  # fmt: skip


WAYS = st.sampled_from(["eager", "jit", "pure", "vetoed"])
PLACES = st.integers(0, len(SHAPES) - 1)


def made(name):
    """Three variables and a scaled optimizer for them."""
    cls, options, scaled = SETS[name]
    rng = np.random.default_rng(1)
    variables = [
        gs.optimizers.Variable(rng.normal(size=s), name=f"v{i}") for i, s in enumerate(SHAPES)
    ]
    scaled = scaled or {"initial_scale": FIRST, "dynamic_growth_steps": GROWTH}
    opt = gs.optimizers.LossScaleOptimizer(cls(RATES[0], **options), telemetry=True, **scaled)
    opt.build(variables)
    return variables, opt


@functools.cache
def compiled(name):
    """What all runs of a set share: variables, optimizer, its steps, and the first values."""
    variables, opt = made(name)
    step = gs.optimizers.jit(opt.apply, (variables, opt.variables), donate=True)
    first = [[np.asarray(x) for x in group] for group in values(variables, opt.variables)]
    return variables, opt, step, first


@functools.cache
def pure(name, rate, clip):
    """The step as a pure function; rate and clip are constants of it."""
    _, opt, _, _ = compiled(name)
    return jax.jit(functools.partial(opt.stateless_apply))


def assign(variables, new):
    for variable, value in zip(variables, new, strict=True):
        variable.assign(value)


def bits(*groups):
    return [np.asarray(x).tobytes() for group in groups for x in group]


def through_pickle(opt, other):
    other.load_state(pickle.loads(pickle.dumps(opt.state())))


class Optimizing(RuleBasedStateMachine):
    """Steps of all kinds, settings and transfers, beside the oracle."""

    @initialize(name=st.sampled_from(list(SETS)))
    def start(self, name):
        self.name = name
        self.variables, self.opt, self.jitted, first = compiled(name)
        assign(self.variables, first[0])
        assign(self.opt.variables, first[1])
        cls, options, scaled = SETS[name]
        self.oracle = Oracle(first[0], cls.__name__, RATES[0], **options)
        self.scale, self.good, self.moves = FIRST, 0, not scaled
        self.rng = np.random.default_rng(2)
        self.rate, self.clip = RATES[0], options.get("global_clipnorm")
        self.opt.learning_rate = self.rate
        if self.clip:
            self.opt.inner_optimizer.global_clipnorm = self.clip

    def take(self, way, grads):
        """One step, in one of the ways."""
        if way in ("eager", "vetoed"):
            self.opt.apply(grads, self.variables, apply_if=way == "eager")
        elif way == "jit":
            self.jitted(grads)
        else:
            weights, state = values(self.variables, self.opt.variables)
            new = pure(self.name, self.rate, self.clip)(state, grads, weights)
            assign([*self.variables, *self.opt.variables], [*new[0], *new[1]])

    @rule(way=WAYS)
    def finite_step(self, way):
        """A step of finite gradients, which may be vetoed."""
        self.step(way)

    @rule(way=WAYS, place=PLACES, bad=st.sampled_from([np.inf, -np.inf, np.nan]))
    def bad_step(self, way, place, bad):
        """A step in whose gradients one element is bad."""
        self.step(way, place, bad)

    def step(self, way="eager", place=0, bad=None):
        """A step of true gradients times the scale."""
        true = random_gradients(self.rng)
        grads = [np.array(g * self.scale, np.float32) for g in true]
        if bad is not None:
            grads[place].reshape(-1)[-1] = bad
        before = bits(values(self.variables)[0], self.slots())
        self.take(way, grads)
        if bad is None and way != "vetoed":
            self.oracle.lr = self.rate
            self.oracle.step([np.float64(g) for g in true])
        else:
            assert bits(values(self.variables)[0], self.slots()) == before
        if self.moves:
            self.scale, self.good = keras_step(GROWTH, (self.scale, self.good), bad is None)

    def slots(self):
        """The state of the inner optimizer."""
        return [v.value() for v in self.opt.inner_optimizer.variables]

    @rule(rate=st.sampled_from(RATES), way=WAYS)
    def set_rate(self, rate, way):
        """The rate of the next steps, and one of them."""
        self.opt.learning_rate = self.rate = rate
        self.step(way)

    @precondition(lambda self: getattr(self, "clip", None))
    @rule(clip=st.sampled_from(CLIPS), way=WAYS)
    def set_clip(self, clip, way):
        """The clip of the next steps, and one of them."""
        self.opt.inner_optimizer.global_clipnorm = self.clip = clip
        self.oracle.o = self.oracle.o | {"global_clipnorm": clip}
        self.step(way)

    @rule(through=st.sampled_from([through_a_store, through_arrays, through_pickle]))
    def save_and_load(self, through):
        """What is saved and loaded by another optimizer of the same options has the same bits."""
        _, other = loader(self.name)
        through(self.opt, other)
        kept = bits(*values(self.opt.variables))
        assert bits(*values(other.variables)) == kept
        assign(self.opt.variables, [np.zeros(v.shape, v.dtype) for v in self.opt.variables])
        through(other, self.opt)
        assert bits(*values(self.opt.variables)) == kept
        self.step()

    @rule()
    def copy(self):
        """A copy has the same values, and steps of its own."""
        before = bits(*values(self.variables, self.opt.variables))
        variables, other = copy.deepcopy((self.variables, self.opt))
        assert bits(*values(variables, other.variables)) == before
        variables[0].assign(variables[0].value() + 1)
        other.variables[0].assign(other.variables[0].value() + 1)
        assert bits(*values(self.variables, self.opt.variables)) == before

    @invariant()
    def is_the_oracle(self):
        """Weights, scale and count are what the oracle has."""
        if not hasattr(self, "oracle"):
            return
        for mine, true in zip(self.variables, self.oracle.w, strict=True):
            np.testing.assert_allclose(mine.numpy(), true, rtol=2e-5, atol=2e-6)
        if self.moves:
            assert float(self.opt.dynamic_scale) == self.scale
            assert int(self.opt.dynamic_counter) == self.good
        window = self.oracle.o.get("gradient_accumulation_steps", 1)
        assert int(self.opt.iterations) == self.oracle.it // window


@functools.cache
def loader(name):
    """Another optimizer of a set, which loads what the first one has saved."""
    return made(name)


def test_any_sequence_of_uses_is_what_numpy_computes():
    """Steps in three ways, finite, not finite or vetoed; rates and clips that are set; state that
    is saved, loaded and copied: weights, scale and counts are those of the oracle after each."""
    run_state_machine_as_test(
        Optimizing,
        settings=settings(
            max_examples=30, stateful_step_count=16, deadline=None, derandomize=True, database=None
        ),
    )
