"""What decides the speed of a step and can be read off its program, whatever the clock says."""

import itertools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs
from gainstage.optimizers import SGD, LossScaleOptimizer, Variable
from gainstage.optimizers._step.optimizer_step import StepInputs

pytestmark = pytest.mark.as_users

# A few of the shapes of ResNet-50, and one that no power of two divides.
SHAPES = [(7, 7, 3, 64), (3, 3, 256, 256), (2048, 1000), (999,)]
KINDS = {
    "sgd": (lambda **o: SGD(0.01, 0.9, **o), {}),
    "adam": (lambda **o: gs.optimizers.Adam(0.01, **o), {}),
    "clipped": (lambda **o: gs.optimizers.Adam(0.01, **o), {"global_clipnorm": 1.0}),
    "each clipped": (lambda **o: SGD(0.01, 0.9, **o), {"clipnorm": 1.0}),
    "averaged": (lambda **o: gs.optimizers.Adam(0.01, **o), {"use_ema": True}),
}
MOST = 0.01  # the part of the weights' bytes that a step may take on the way


def make(kind, shapes, dtype, **more):
    rule, options = KINDS[kind]
    variables = [Variable(np.ones(s, np.float32), name=f"v{i}") for i, s in enumerate(shapes)]
    opt = LossScaleOptimizer(rule(**options, **more))
    opt.build(variables)
    return variables, opt, [jnp.ones(shape, dtype) for shape in shapes]


def through_jit(variables, opt, grads):
    step = gs.optimizers.jit(opt.apply, (variables, opt.variables), donate=True)
    return step.lower(grads).compile(), [*variables, *opt.variables]


def through_apply(variables, opt, grads):
    opt.apply(grads)
    return opt._kept.program.lower(StepInputs(grads, None)).compile(), [
        *variables,
        *opt.variables,
    ]


def through_stateless_apply(variables, opt, grads):
    step = jax.jit(lambda w, s, g: opt.stateless_apply(s, g, w), donate_argnums=(0, 1))
    values = [[v.value() for v in group] for group in (variables, opt.variables)]
    return step.lower(*values, grads).compile(), [*variables, *opt.variables]


def bytes_of(variables):
    return sum(v.size * v.dtype.itemsize for v in variables)


def large_copies(compiled, size=4096):
    """The copies of whole arrays that a program makes."""
    shapes = re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", compiled.as_text())
    return [shape for shape in shapes if np.prod([int(n) for n in shape.split(",")]) >= size]


def gates():
    """All kinds through `jit`, and Adam in both dtypes and in all ways of float32."""
    ways, dtypes = [through_jit, through_apply, through_stateless_apply], ["float32", "float16"]
    for kind, dtype, way in itertools.product(KINDS, dtypes, ways):
        other = (kind != "adam") + (dtype != "float32") + (way is not through_jit)
        yield pytest.param(kind, dtype, way, marks=[pytest.mark.thorough] * (other > 1))


@pytest.mark.parametrize(("kind", "dtype", "through"), list(gates()))
def test_a_step_stores_nothing_on_the_way(kind, dtype, through):
    """Temporary memory stays below 1 % of the weights', all state is updated in place, uncopied."""
    variables, opt, grads = make(kind, SHAPES, dtype)
    compiled, in_place = through(variables, opt, grads)
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < MOST * bytes_of(variables) + 2**16
    assert memory.alias_size_in_bytes == bytes_of(in_place)
    assert not large_copies(compiled)


@pytest.mark.parametrize("few", [20, pytest.param(60, marks=pytest.mark.thorough)])
def test_programs_grow_linearly(few):
    """Four times the tensors are about four times the program, and no sixteenfold compilation."""
    sizes, seconds, beta = [], [], time.time_ns() % 10**6 / 10**7  # no run has compiled it before
    for count in (few, 4 * few):
        variables, opt, grads = make("adam", [(64,)] * count, jnp.float32, beta_1=beta)
        step = gs.optimizers.jit(opt.apply, (variables, opt.variables), donate=True)
        lowered = step.lower(grads)
        start = time.perf_counter()
        sizes.append(len(lowered.compile().as_text()))
        seconds.append(time.perf_counter() - start)
    assert sizes[1] < 5 * sizes[0]
    assert seconds[1] < 10 * seconds[0]


@pytest.mark.parametrize("tx", [optax.sgd(0.1, 0.9), optax.adam(0.01)], ids=["sgd", "adam"])
def test_an_optax_loop_stores_nothing_on_the_way(tx, monkeypatch):
    """`with_loss_scale` in an optax loop: what is kept is decided in the kernels that compute
    it."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)  # else gradients may be on several
    params = {f"w{i}": jnp.ones(shape) for i, shape in enumerate(SHAPES)}
    tx = gs.with_loss_scale(tx)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    arguments = (params, tx.init(params), params)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()
    memory, weights = compiled.memory_analysis(), sum(p.nbytes for p in params.values())
    assert memory.temp_size_in_bytes < MOST * weights + 2**16
    state = sum(x.nbytes for x in jax.tree.leaves(arguments[1]))
    # Those of the last step, which no step reads.
    state -= arguments[1].applied.nbytes + arguments[1].is_scaled.nbytes
    assert memory.alias_size_in_bytes == weights + state
    assert not large_copies(compiled)


def test_a_half_precision_gradient_is_stored_once():
    """XLA for CPU computes it transposed: the check and the update share one array in order."""
    w = Variable(np.ones((192, 320), np.float32))
    opt = LossScaleOptimizer(gs.optimizers.Adam(0.01))
    opt.build([w])

    def step(x):
        half = jnp.float16
        return opt.minimize(lambda: ((x.astype(half) @ w.value().astype(half)) ** 2).mean(), [w])

    program = gs.optimizers.jit(step, ([w], opt.variables), donate=True)
    text = program.lower(jnp.ones((64, 192))).compile().as_text()
    main = text[text.index("\nENTRY") :]
    assert len(re.findall(r"= f32\[192,320\]\S* (fusion|copy)\(\S*dot", main)) == 1
    assert not re.findall(r"= f32\[192,320\]\{0,1\}", main)
