"""Every transformation of optax under `with_loss_scale` does bit for bit what it does alone."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import Literal
from optax import contrib
from small_floats import with_small

import gainstage as gs

RATE = 0.25
MASK = {"w": True, "b": False}
LABELS = {"w": "one", "b": "two"}
SGD, ADAM = optax.sgd(RATE, momentum=0.5), optax.adam(RATE)
PARTS = {"one": ADAM, "two": SGD}
WANTED = {"w": np.float32([[0.3, -0.7, 1.1], [-0.2, 0.9, 0.4]]), "b": np.float32([0.5, -1.3])}


def muon_dimensions(params):
    return jax.tree.map(lambda _: contrib.MuonDimensionNumbers(), params)


# How to call a factory that needs more than a learning rate. A new one of optax is called with a
# rate or with nothing, and shows here if that is not enough.
CALLS = {
    "MultiSteps": lambda: optax.MultiSteps(ADAM, 2).gradient_transformation(),
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
    "add_decayed_weights": lambda: optax.add_decayed_weights(0.1),
    "add_noise": lambda: optax.add_noise(0.1, 0.55, key=3),
    "apply_every": lambda: optax.apply_every(2),
    "apply_if_finite": lambda: optax.apply_if_finite(ADAM, 5),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), ADAM),
    "clip": lambda: optax.clip(0.1),
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(0.1),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(0.1),
    "conditionally_mask": lambda: optax.conditionally_mask(ADAM, lambda step: step % 2 == 0),
    "conditionally_transform": lambda: optax.conditionally_transform(ADAM, lambda step: step > 1),
    "differentially_private_aggregate": lambda: contrib.differentially_private_aggregate(
        1.0, 0.1, key=3
    ),
    "dpsgd": lambda: contrib.dpsgd(RATE, 1.0, 0.1, seed=3),
    "ema": lambda: optax.ema(0.9),
    "flatten": lambda: optax.flatten(ADAM),
    "freeze": lambda: optax.freeze(MASK),
    "galore": lambda: contrib.galore(RATE, rank=1, update_proj_gap=2),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        lambda step: RATE / (1 + step)
    ),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adam)(RATE),
    "masked": lambda: optax.masked(ADAM, MASK),
    "measure_with_ema": lambda: optax.measure_with_ema(lambda updates: updates, 0.9),
    "mechanize": lambda: contrib.mechanize(ADAM),
    "multi_transform": lambda: optax.multi_transform(PARTS, LABELS),
    "named_chain": lambda: optax.named_chain(("one", ADAM), ("two", SGD)),
    "noisy_sgd": lambda: optax.noisy_sgd(RATE, key=3),
    "partition": lambda: optax.partition(PARTS, LABELS),
    "reduce_on_plateau": lambda: optax.chain(SGD, contrib.reduce_on_plateau(patience=1)),
    "sam": lambda: contrib.sam(ADAM, optax.sgd(0.1), sync_period=2),
    "scale": lambda: optax.scale(-RATE),
    "scale_by_backtracking_linesearch": lambda: optax.chain(
        SGD, optax.scale_by_backtracking_linesearch(3)
    ),
    "scale_by_galore": lambda: contrib.scale_by_galore(rank=1, update_proj_gap=2),
    "scale_by_muon": lambda: optax.masked(
        contrib.scale_by_muon(weight_dimension_numbers=muon_dimensions), MASK
    ),
    "scale_by_schedule": lambda: optax.scale_by_schedule(lambda step: -RATE / (1 + step)),
    "scale_by_zoom_linesearch": lambda: optax.chain(SGD, optax.scale_by_zoom_linesearch(3)),
    "schedule_free": lambda: contrib.schedule_free(SGD, RATE),
    "selective_transform": lambda: optax.selective_transform(ADAM, freeze_mask=MASK),
    "snapshot": lambda: optax.snapshot("norm", optax.tree.norm),
    "sophia": lambda: contrib.sophia(RATE, update_interval=2),
    "split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(ADAM),
    "stateless": lambda: optax.stateless(lambda updates, params: updates),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda g, p: -g),
    "trace": lambda: optax.trace(0.9),
    "with_extra_args_support": lambda: optax.with_extra_args_support(ADAM),
}
# What update is given beside gradients and parameters: the value, the gradient, the function.
VALUE, SEARCH = ("value",), ("value", "grad", "value_fn")
EXTRA = {
    "polyak_sgd": VALUE,
    "scale_by_polyak": VALUE,
    "momo": VALUE,
    "momo_adam": VALUE,
    "reduce_on_plateau": VALUE,
    "lbfgs": SEARCH,
    "scale_by_backtracking_linesearch": SEARCH,
    "scale_by_zoom_linesearch": SEARCH,
    "sophia": ("obj_fn",),
    "hutchinson_estimator_diag_hessian": ("obj_fn",),
}
EXCLUDED = {
    "schedule_free_eval_params": "returns parameters",
    "lookahead": "takes and returns pairs of parameters",
}


def factories():
    """Every public function of optax and optax.contrib that makes a transformation, by name."""
    found = {"MultiSteps": optax.MultiSteps}  # the only class among them
    for module in (optax, contrib):
        for name, value in vars(module).items():
            if not name.islower() or name.startswith("_") or not callable(value):
                continue
            makes = getattr(inspect.signature(value), "return_annotation", "")
            own = module is contrib and inspect.isfunction(value)
            if own or "GradientTransformation" in str(makes):
                found[name] = value
    return found


FACTORIES = factories()


def make(name):
    if name in CALLS:
        return CALLS[name]()
    parameters = inspect.signature(FACTORIES[name]).parameters
    return FACTORIES[name](**({"learning_rate": RATE} if "learning_rate" in parameters else {}))


def loss(params, factor=1.0):
    parts = jax.tree.map(lambda p, wanted: ((p - wanted) ** 2).sum(), params, WANTED)
    return sum(jax.tree.leaves(parts)) * factor


def given(name, value, grads):
    known = {"value": value, "grad": grads, "value_fn": loss, "obj_fn": loss}
    return {key: known[key] for key in EXTRA.get(name, ())}


def per_example(name, grads):
    """Differential privacy asks for one gradient for each example of a batch."""
    if name in ("dpsgd", "differentially_private_aggregate"):
        return jax.tree.map(lambda g: jnp.stack([g, g / 2]), grads)
    return grads


def bits(tree):
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in map(jnp.asarray, jax.tree.leaves(tree))
    ]


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(bits(actual), bits(expected), strict=True):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def test_table_has_every_factory():
    """Each public factory of the installed optax is tried, or excluded with a reason."""
    assert len(FACTORIES) > 100
    assert set(CALLS) | set(EXTRA) | set(EXCLUDED) <= set(FACTORIES)


def one_by_one(fn, *args):
    """A function of pytrees that is traced once, as by `jit`, and run operation by operation.

    Nothing is fused, so that two programs round alike, and next to nothing is compiled.
    """
    program, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    structure = jax.tree.structure(shapes)

    def run(*args):
        return jax.tree.unflatten(structure, run_each(program, jax.tree.leaves(args)))

    return run


def run_each(program, args):
    """The results of a program, with the operations of compiled functions in it one by one too."""
    values = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    values |= dict(zip(program.jaxpr.invars, args, strict=True))
    read = lambda v: v.val if isinstance(v, Literal) else values[v]  # noqa: E731
    for eqn in program.jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        if eqn.primitive.name == "jit":
            results = run_each(eqn.params["jaxpr"], operands)
        else:
            results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
            results = results if eqn.primitive.multiple_results else [results]
        values |= dict(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in program.jaxpr.outvars]


def stepping(name, tx, differentiate):
    """The pure step of a loop, with everything that the transformation may ask for."""

    def step(params, state, factor):
        value, grads = differentiate(state)(params, factor)
        grads = per_example(name, grads)
        updates, state = tx.update(grads, state, params, **given(name, value, grads))
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.ones_like, WANTED)
    state = tx.init(params)
    return one_by_one(step, params, state, jnp.float32(1.0)), params, state


# Made with a rate or with nothing, and with a state of another kind than Adam's.
OTHER_STATES = {"adam", "adafactor", "lbfgs", "muon", "rprop", "zero_nans"}


def cases():
    """What is called in a way of its own, as thorough ones the optimizers that a rate makes, and as
    slow ones their parts."""
    for name in sorted(set(FACTORIES) - set(EXCLUDED)):
        usual = name not in CALLS and name not in EXTRA and name not in OTHER_STATES
        part = name.startswith("scale_by")
        seldom = pytest.mark.slow if part else pytest.mark.thorough
        yield pytest.param(name, marks=[seldom] * (part or usual))


@pytest.mark.as_users
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", list(cases()))
def test_scaled_run_is_bit_equal_to_a_plain_one(name):
    """At a scale of `2**15` weights and state are those of plain optax, which never saw the step
    whose loss was inf; that step changes no bit."""
    tx = optax.with_extra_args_support(make(name))
    plain, params, state = stepping(name, tx, lambda _: jax.value_and_grad(loss))
    differentiate = functools.partial(gs.value_and_grad, with_small(loss))
    scaled, scaled_params, scaled_state = stepping(name, gs.with_loss_scale(tx), differentiate)
    for factor in (1.0, 1.0, np.inf, 1.0):
        before = scaled_params, scaled_state.inner
        scaled_params, scaled_state = scaled(scaled_params, scaled_state, jnp.float32(factor))
        if factor == 1.0:
            params, state = plain(params, state, jnp.float32(factor))
            before = params, state
        assert scaled_state.applied == (factor == 1.0)
        assert_same((scaled_params, scaled_state.inner), before)
    assert gs.transforms.current_scale(scaled_state) == 2.0**14


PER_EXAMPLE = {"dpsgd", "differentially_private_aggregate"}


@pytest.mark.as_users
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", list(cases()))
def test_each_transformation_steps_a_state_as_in_plain_optax(name):
    """`train_step` gives a transformation what it asks for: after three steps, and one whose loss
    was inf, the weights are those of plain optax. One for gradients of each example says so."""
    tx = optax.with_extra_args_support(make(name))
    params = jax.tree.map(jnp.ones_like, WANTED)
    if name in PER_EXAMPLE:
        with pytest.raises(TypeError, match=r"each example.*jax\.vmap\(gainstage\.value_and_grad"):
            gs.TrainState.create(params, tx)
        return
    step, state = gs.train_step(loss, donate=False), gs.TrainState.create(params, tx)

    @jax.jit
    def plain(params, inner):
        value, grads = jax.value_and_grad(loss)(params)
        updates, inner = tx.update(grads, inner, params, **given(name, value, grads))
        return optax.apply_updates(params, updates), inner

    inner = tx.init(params)
    for factor in (1.0, 1.0, np.inf, 1.0):
        state, _ = step(state, factor)
        assert state.applied == (factor == 1.0)
        if factor == 1.0:
            params, inner = plain(params, inner)
    for found, expected in zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
