import copy
import dataclasses
import pickle
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gainstage as gs
from gainstage.compat import tf2, v1
from gainstage.optimizers import SGD, Adam, LossScaleOptimizer, Variable

from peers import fails, keras_step, live


def test_an_option_that_a_class_sets_is_not_given():
    """A class's own default gives way to the wrapper's option, without changing the object."""

    class Decaying(SGD):
        def __init__(self, learning_rate=0.1, weight_decay=0.5, clipvalue=3.0, **options):
            super().__init__(
                learning_rate, weight_decay=weight_decay, clipvalue=clipvalue, **options
            )

    var, inner = Variable(1.0), Decaying(1.0)
    opt = LossScaleOptimizer(inner, initial_scale=1.0, weight_decay=0.25, clipnorm=0.5)
    opt.apply([100.0], [var])
    assert float(var) == 0.25
    assert (inner.weight_decay, inner.clipvalue) == (0.5, 3.0)
    assert (opt.weight_decay, opt.clipnorm) == (0.25, 0.5)
    with pytest.raises(ValueError, match="weight_decay here and weight_decay on"):
        LossScaleOptimizer(Decaying(1.0, weight_decay=0.5), weight_decay=0.25)


def test_the_product_of_scale_and_factor_stays_within_the_bounds():
    """Dynamic scale times `loss_scale_factor` is from 2**-126 to 2**126."""
    large = LossScaleOptimizer(SGD(0.5), 2.0**126, loss_scale_factor=2.0**100)
    small = LossScaleOptimizer(SGD(0.5), 2.0**-100, loss_scale_factor=2.0**-100)
    assert (float(large.loss_scale), float(small.loss_scale)) == (2.0**126, 2.0**-126)


def test_it_works_inside_the_users_jit():
    """`minimize`, `apply` and `stateless_apply` give the same in the user's compiled function."""
    results = []
    for way in ("eager", "jit", "stateless"):
        w = Variable([1.0, 2.0])
        opt = LossScaleOptimizer(Adam(0.1), dynamic_growth_steps=2)
        opt.build([w])

        def loss(x, w=w):
            return (w.value() * x).sum() ** 2

        def step(x, opt=opt, w=w, loss=loss):
            opt.minimize(lambda: loss(x), [w])

        compiled = gs.optimizers.jit(step, ([w], opt.variables), donate=True)
        for x in ([1.0, 2.0], [np.inf, 1.0], [0.5, 1.0]):
            x = jnp.array(x)
            if way == "eager":
                step(x)
            elif way == "jit":
                compiled(x)
            else:
                grads = [g for g, _ in opt.compute_gradients(lambda x=x: loss(x), [w])]
                state = [v.value() for v in opt.variables]
                new, state = jax.jit(opt.stateless_apply)(state, grads, [w.value()])
                w.assign(new[0])
                opt.set_weights(state)
        assert int(opt.iterations) == 2
        results.append([v.numpy() for v in [w, *opt.variables]])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def test_forgetting_the_optimizers_state_is_a_clear_error():
    """A user's `jit` without `opt.variables` in its state is told which variable is missing."""
    w = Variable(1.0)
    opt = LossScaleOptimizer(SGD(0.1))
    opt.build([w])
    with pytest.raises(ValueError, match=r"'.*/.*' to be in the state"):
        gs.optimizers.jit(lambda g: opt.apply([g], [w]), [w])(1.0)
    unbuilt = LossScaleOptimizer(SGD(0.1, momentum=0.9))
    step = gs.optimizers.jit(lambda g: unbuilt.apply([g], [w]), [[w], unbuilt.variables])
    with pytest.raises(ValueError, match=r"outside of the traced function"):
        step(1.0)
    assert not unbuilt.built


def test_a_users_rule():
    """A rule of the user's own keeps its state among the variables and gets what it measures."""

    class State(NamedTuple):
        scale: jax.Array
        largest: jax.Array

    @dataclasses.dataclass(frozen=True)
    class Ceiling(gs.LossScale):
        margin: float = 2.0
        measures = ("max_abs",)

        def init(self):
            return State(jnp.float32(16.0), jnp.float32(0.0))

        def update(self, state, finite, *, max_abs):
            return State(state.scale, jnp.maximum(state.largest, max_abs * self.margin))

    var = Variable([0.0, 0.0])
    opt = LossScaleOptimizer(SGD(1.0), loss_scale=Ceiling())
    opt.apply([[16.0, np.inf]], [var])
    opt.apply([[16.0, -48.0]], [var])
    names = [v.name.split("/")[1] for v in opt.variables]
    assert names == ["dynamic_scale", "largest", "iteration", "learning_rate"]
    assert float(opt.variables[1]) == 6.0
    assert (opt.dynamic, opt.dynamic_counter) == (True, None)
    twin = LossScaleOptimizer.from_config(opt.get_config())
    assert twin.rule == Ceiling()


@pytest.mark.parametrize("how", ["apply", "minimize", "build", "copy", "pickle"])
def test_an_optimizer_with_a_past_can_be_wrapped(how):
    """An inner optimizer that was used, built, copied or stored works inside, with telemetry."""
    w, inner = Variable([1.0, 1.0]), SGD(0.5)
    if how == "minimize":
        inner.minimize(lambda: w.value().sum() * 0.0, [w])
    else:
        {"apply": lambda: inner.apply([[0.0, 0.0]], [w]), "build": lambda: inner.build([w]),
         "copy": int, "pickle": int}[how]()  # fmt: skip
    inner = copy.deepcopy(inner) if how == "copy" else inner
    inner = pickle.loads(pickle.dumps(inner)) if how == "pickle" else inner
    opt = LossScaleOptimizer(inner, 8.0, telemetry=True)
    if inner.built:
        opt.apply([jnp.array([8.0, 0.0])])
    else:
        opt.apply([jnp.array([8.0, 0.0])], [w])
    opt.apply([jnp.array([jnp.nan, 0.0])])
    assert w.numpy().tolist() == [0.5, 1.0]
    assert gs.diagnostics.report(opt).counts.tolist() == [[0, 1, 1, 1]]


@pytest.mark.parametrize("verb", ["apply", "apply_gradients", "compute_gradients"])
def test_a_step_that_would_be_bypassed_is_refused(verb):
    """A class that overrides how a step is taken is refused where the override is not called."""
    changed = type("Changed", (SGD,), {verb: lambda self, *args, **kwargs: None})
    wrappers = [LossScaleOptimizer, tf2.LossScaleOptimizer]
    for wrap in wrappers:
        with pytest.raises(TypeError, match=f"Changed overrides {verb}, which .* Override update_"):
            wrap(changed(0.5))
    if verb != "apply":
        old = type("Old", (v1.GradientDescentOptimizer,), {verb: lambda self, *args: None})
        with pytest.raises(TypeError, match=f"Old overrides {verb}"):
            v1.MixedPrecisionLossScaleOptimizer(old(0.5), 8.0)


def test_an_option_of_the_wrapper_is_not_set_inside():
    """An option that the wrapper has is refused on the inner one, where it would do nothing."""
    opt = LossScaleOptimizer(SGD(1.0), 1.0, clipnorm=1.0)
    with pytest.raises(ValueError, match=r"Expected clipnorm to be set on .* where it is 1\.0"):
        opt.inner_optimizer.clipnorm = 0.25
    opt.clipnorm = None
    with pytest.raises(ValueError, match=r"Expected clipnorm to be set on .* where it is None"):
        opt.inner_optimizer.clipnorm = 0.25


@pytest.mark.parametrize("scale", [0.1, 2.0**15, 2.0**27, 2.0**30])
def test_the_first_scale_is_the_one_that_was_given(scale):
    """Small ones in decimal notation, large ones to the last digit."""
    assert LossScaleOptimizer(SGD(), scale).initial_scale == scale
    if scale >= 1:
        assert tf2.LossScaleOptimizer(SGD(), initial_scale=scale).initial_scale == scale


def scaled_sgd():
    w = Variable([1.0, 2.0], name="w")
    return w, LossScaleOptimizer(SGD(0.5), initial_scale=2.0)


def test_read_only_parts_of_a_wrapper():
    """Rule, inner optimizer and first scale are settled, and an inner argument is set inside."""
    _, opt = scaled_sgd()
    for name in ("rule", "inner_optimizer", "initial_scale"):
        with pytest.raises(AttributeError):
            setattr(opt, name, None)
    with pytest.raises(AttributeError, match="momentum to be set on the inner optimizer"):
        opt.momentum = 0.9
    opt.remark = "free"
    assert opt.remark == "free"


def test_an_option_taken_back_is_no_longer_given():
    """An option of the inner optimizer set to None may be given to the wrapper."""
    sgd = SGD(1.0, clipnorm=1.0)
    sgd.clipnorm = None
    assert LossScaleOptimizer(sgd, clipvalue=3.0).clipvalue == 3.0


def test_computed_gradients_are_known_to_be_unscaled():
    """`tf2` gradients from `compute_gradients` need no reminder to unscale them."""
    w = Variable(1.0)
    opt = tf2.LossScaleOptimizer(SGD(0.25))
    opt.apply_gradients(opt.compute_gradients(lambda: w**2, [w]))
    assert float(w) == 0.5


def test_a_wrapper_that_fails_leaves_the_inner_optimizer_free():
    """A wrong mesh is refused before anything has changed: another wrapper may be made."""
    meshes = [jax.make_mesh((8,), ("data",)), jax.make_mesh((4,), ("data",))]
    layout = jax.sharding.NamedSharding(meshes[0], jax.sharding.PartitionSpec("data"))
    inner, w = SGD(0.5), Variable(jax.device_put(np.ones(8, np.float32), layout))
    inner.build([w])
    with pytest.raises(ValueError, match="Expected variables on the mesh"):
        LossScaleOptimizer(inner, mesh=meshes[1])
    with pytest.raises(ValueError, match=r"Expected a jax.sharding.Mesh for mesh; got 3"):
        LossScaleOptimizer(inner, mesh=3)
    LossScaleOptimizer(inner).apply([jnp.full(8, 2.0**15)], [w])
    assert w.numpy().tolist() == [0.5] * 8


def test_a_loss_that_is_given_reaches_the_rule():
    """In a loop of one's own `apply(..., loss=loss)` tells the rule what `minimize` would have."""
    w = Variable([1.0])
    opt = LossScaleOptimizer(SGD(0.1), loss_scale=gs.AdaptiveLossScale(2.0**10))
    opt.apply([[1.0]], [w], loss=1.0)
    scale = float(opt.loss_scale)
    opt.apply([[float("inf")]], loss=float("nan"))
    assert float(opt.loss_scale) == scale
    opt.apply([[float("inf")]], loss=1.0)
    assert float(opt.loss_scale) < scale


def test_the_eager_apply_is_the_pure_one():
    """Keras's `LossScaleOptimizer.apply` fails on JAX; ours does what `stateless_apply` does."""
    var = Variable([1.0, 2.0])
    opt = LossScaleOptimizer(SGD(0.5), initial_scale=4.0)
    opt.build([var])
    grads, state = [jnp.array([4.0, 8.0])], [v.value() for v in opt.variables]
    (weights,), state = opt.stateless_apply(state, grads, [var.value()])
    opt.apply(grads, [var])
    assert var.numpy().tolist() == weights.tolist() == [0.5, 1.0]
    assert [float(v) for v in opt.variables] == [float(s) for s in state]

    with live("keras") as keras:
        theirs = keras.Variable([1.0, 2.0])
        peer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=4.0)
        try:
            peer.apply(grads, [theirs])
            works = np.asarray(theirs.value).tolist() == [0.5, 1.0]
        except jax.errors.UnexpectedTracerError:
            works = False
        fails(keras, not works)


@pytest.mark.parametrize(
    "arguments",
    [{"initial_scale": v} for v in (-1, 0, np.nan)]
    + [{"dynamic_growth_steps": v} for v in (0, -5)],
    ids=str,
)
def test_scales_that_cannot_work_are_refused(arguments):
    """Keras takes a scale of -1, 0 or nan and growth periods of 0 or -5; ours refuses them."""
    (name,) = arguments
    with pytest.raises(ValueError, match=rf"Expected .* for {name}; got "):
        LossScaleOptimizer(SGD(), **arguments)

    with live("keras") as keras:
        try:
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), **arguments)
            refused = False
        except (TypeError, ValueError):
            refused = True
        fails(keras, not refused)


def test_a_wrapper_is_not_wrapped_and_keeps_the_inner_factor():
    """Keras nests wrappers and erases the inner factor; ours refuses and keeps it in force."""
    inner = SGD(0.5, loss_scale_factor=8.0)
    opt = LossScaleOptimizer(inner, initial_scale=2.0)
    assert (inner.loss_scale_factor, float(opt.loss_scale)) == (8.0, 16.0)
    var = Variable(1.0)
    opt.apply([16.0], [var])
    assert float(var) == 0.5
    with pytest.raises(TypeError, match="not wrapped"):
        LossScaleOptimizer(opt)

    with live("keras") as keras:
        inner = keras.optimizers.SGD(0.5, loss_scale_factor=8.0)
        wrapped = keras.optimizers.LossScaleOptimizer(inner)
        try:
            keras.optimizers.LossScaleOptimizer(wrapped)
            refused = False
        except (TypeError, ValueError):
            refused = True
        fails(keras, inner.loss_scale_factor is None or not refused)


def test_options_and_exclusions_of_the_wrapper_act():
    """On Keras's wrapper a `clipnorm` set later and an exclusion from decay have no effect."""
    w, b = Variable(0.0, name="w"), Variable(1.0, name="b")
    opt = LossScaleOptimizer(SGD(1.0, weight_decay=0.5), initial_scale=1.0)
    opt.exclude_from_weight_decay(var_names=["b"])
    opt.clipnorm = 1.0
    opt.apply([-100.0, 0.0], [w, b])
    assert (float(w), float(b)) == (1.0, 1.0)
    assert opt.get_config()["clipnorm"] == 1.0
    with pytest.raises(ValueError, match="at most one"):
        opt.clipvalue = 1.0

    with live("keras") as keras:
        theirs = [keras.Variable(0.0, name="w"), keras.Variable(1.0, name="b")]
        inner = keras.optimizers.SGD(1.0, weight_decay=0.5)
        peer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1.0)
        peer.exclude_from_weight_decay(var_names=["b"])
        peer.clipnorm = 1.0
        keras_step(peer, theirs)(jnp.float32(-100.0), jnp.float32(0.0))
        fails(keras, [float(v.value) for v in theirs] != [1.0, 1.0])
