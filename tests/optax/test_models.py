"""Models of Flax NNX and Equinox are recognised: `using` and filters are not needed."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilations import compilations

import gainstage as gs
from gainstage import xray
from gainstage.__main__ import main
from gainstage.diagnostics import StepRecorder
from gainstage.transforms import apply_updates

nnx, eqx = pytest.importorskip("flax.nnx"), pytest.importorskip("equinox")
HALF = jnp.float16
X = np.random.default_rng(0).standard_normal((16, 4), np.float32)
Y = X[:, :1]
BAD = X * np.float32(1e6)  # overflows in float16


def nnx_model():
    rngs = nnx.Rngs(0)
    return nnx.Sequential(
        nnx.Linear(4, 8, dtype=HALF, rngs=rngs),
        nnx.BatchNorm(8, rngs=rngs),
        nnx.Dropout(0.1, rngs=rngs),
        nnx.Linear(8, 1, dtype=HALF, rngs=rngs),
    )


def nnx_loss(model, x, y):
    return jnp.mean((model(x).astype("float32") - y) ** 2)


class Net(eqx.Module):
    """Has every kind of leaf: arrays, a function, a float, a bool, a key and None."""

    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout
    key: jax.Array
    flag: bool
    none: None

    def __init__(self):
        self.mlp = eqx.nn.MLP(4, 1, 8, 1, activation=lambda x: x * 0.5, key=jax.random.key(0))
        self.dropout = eqx.nn.Dropout(0.1)
        self.key, self.flag, self.none = jax.random.key(1), True, None

    def __call__(self, x):
        return self.mlp(self.dropout(x, key=self.key))


def eqx_loss(model, x, y):
    assert model.flag is True
    half = jax.tree.map(lambda a: a.astype(HALF) if eqx.is_inexact_array(a) else a, model)
    return jnp.mean((jax.vmap(half)(x.astype(HALF)).astype("float32") - y) ** 2)


def nnx_parameters(model):
    return nnx.state(model, nnx.Param)


def eqx_parameters(model):
    return eqx.filter(model, eqx.is_inexact_array)


# A model, its loss, what differentiates it, its parameters, and its update.
KINDS = {
    "nnx": (nnx_model, nnx_loss, nnx.value_and_grad, nnx_parameters),
    "equinox": (Net, eqx_loss, eqx.filter_value_and_grad, eqx_parameters),
}
EACH = pytest.mark.parametrize("kind", KINDS)


def make_nnx():
    """What `--like` of the X-ray of a file calls."""
    return nnx_model()


def values(tree):
    """The arrays of a tree, and its other leaves; keys as numbers."""
    keys = (
        jax.random.key_data(x)
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        else x
        for x in jax.tree.leaves(tree)
    )
    return [np.asarray(x) if isinstance(x, jax.Array) else x for x in keys]


def assert_same(tree, other):
    """Both have the same structure, and the same leaves bit for bit."""
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for a, b in zip(values(tree), values(other), strict=True):
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        else:
            assert a is b or a == b


def transformation():
    return gs.with_loss_scale(optax.adamw(0.05), telemetry=True, underflow_every=2)


@EACH
def test_init_keeps_the_state_of_the_parameters_alone(kind):
    """`tx.init(model)` returns the state that `tx.init` of its parameters returns."""
    make, _, _, parameters = KINDS[kind]
    tx, model = transformation(), make()
    assert_same(tx.init(model), tx.init(parameters(model)))


@EACH
@pytest.mark.parametrize("has_aux", [False, True])
def test_a_train_step_takes_a_model(kind, has_aux):
    """`train_step` without `using` takes the steps that it takes with it, a skipped one too, by one
    program."""
    make, loss, using, parameters = KINDS[kind]
    tx = transformation()
    found, explicit = make(), make()
    if kind == "equinox":  # a lambda of each is another function
        explicit = eqx.tree_at(lambda m: m.mlp.activation, explicit, found.mlp.activation)
    one = gs.TrainState.create(found, tx)
    other = gs.TrainState.create(explicit, tx).replace(opt_state=tx.init(parameters(explicit)))
    fun = (lambda model, x, y: (loss(model, x, y), x[0])) if has_aux else loss
    step, given = (gs.train_step(fun, has_aux=has_aux, **how) for how in ({}, {"using": using}))
    for i, x in enumerate((X, X, BAD, X)):
        with compilations() as compiled:
            one, *found = step(one, x, Y)
        assert i == 0 or compiled == []
        other, *expected = given(other, x, Y)
        assert len(found) == 1 + has_aux
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert_same(one, other)
    assert 0 < one.info.skipped_steps < 4
    assert len(gs.diagnostics.report(one, one.params).names) == len(
        gs.diagnostics.report(other).names
    )


@EACH
def test_a_step_in_three_calls_takes_a_model(kind):
    """`value_and_grad` and `apply_updates` take a model, as with explicit parts."""
    make, loss, using, parameters = KINDS[kind]
    tx, model = transformation(), make()
    state = tx.init(model)
    given = gs.value_and_grad(loss, state, using=using)(model, X, Y)
    if kind == "nnx":
        model = make()  # the call above has advanced the averages and the key
    found = gs.value_and_grad(loss, state)(model, X, Y)
    assert_same(found, given)
    updates = tx.update(found[1], state, parameters(model))
    expected = apply_updates(jax.tree.map(lambda p: p, parameters(model)), *updates)
    model = apply_updates(model, *updates)
    assert_same(parameters(model), expected)
    assert type(model) is type(make())


@EACH
def test_an_update_takes_a_model(kind):
    """`tx.update(grads, state, model)` is that with the model's parameters, which AdamW decays."""
    make, loss, _, parameters = KINDS[kind]
    tx, model = transformation(), make()
    state = tx.init(model)
    _, grads = gs.value_and_grad(loss, state)(model, X, Y)
    assert_same(tx.update(grads, state, model), tx.update(grads, state, parameters(model)))


@pytest.mark.parametrize("how", ["step", "update"])
@pytest.mark.parametrize("part", ["optimizer", "opt_state"])
def test_what_an_nnx_optimizer_has_wrapped_is_refused(how, part):
    """An `nnx.Optimizer`, or its `opt_state`, in the place of the state of `tx.init` is named."""
    tx, model = transformation(), nnx_model()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    given, kind = {
        "optimizer": (optimizer, "Optimizer"),
        "opt_state": (optimizer.opt_state, "a LossScaleState of OptArray"),
    }[part]
    message = rf"state that tx\.init returned for opt_state; got {kind}\. .* = tx\.init\(params\)"
    step, state = gs.train_step(nnx_loss), gs.TrainState.create(model, tx).replace(opt_state=given)
    with pytest.raises(TypeError, match=message):
        step(state, X, Y) if how == "step" else tx.update(nnx_parameters(model), given)


class Adapted(nnx.Module):
    """A linear layer with an adapter of low rank, which alone is trained."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        base = nnx.Linear(4, 1, rngs=rngs)
        self.layer = nnx.LoRA(4, 2, 1, base_module=base, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


def of_adapters(fun, has_aux):
    return nnx.value_and_grad(fun, argnums=nnx.DiffState(0, nnx.LoRAParam), has_aux=has_aux)


def some_of(tx):
    state = gs.TrainState.create(Adapted(), tx)
    return gs.train_step(nnx_loss, using=of_adapters)(state, X, Y)


def all_of(tx):
    state = gs.TrainState.create(Adapted(), tx)
    return gs.train_step(nnx_loss, using=jax.value_and_grad)(state, X, Y)


def fewer(tx):
    grads = {"w": jnp.ones(2)}
    return tx.update(grads, tx.init({**grads, "b": jnp.ones(2)}), grads)


@pytest.mark.parametrize(
    ("attempt", "place"),
    [
        pytest.param(some_of, r"mu\['layer'\]\['base_module'\]\['bias'\]", id="some variables"),
        pytest.param(all_of, r"mu\.layer\.base_module\.bias", id="jax.value_and_grad"),
        pytest.param(fewer, r"mu\['b'\]", id="dictionaries"),
    ],
)
def test_a_state_of_other_parameters_says_what_to_pass(attempt, place):
    """Gradients of other parameters than `tx.init` got are named, with the remedy."""
    with pytest.raises(ValueError, match=rf"differ in .*{place}.* `using` selects .* leave"):
        attempt(transformation())


def test_an_error_of_the_transformation_is_its_own():
    """What `tx` raises for the parameters that it was made for is not explained away."""

    def fails(updates, state, params=None):
        raise ValueError("an error of the user's")

    tx = gs.with_loss_scale(optax.GradientTransformation(optax.adam(0.1).init, fails))
    with pytest.raises(ValueError, match="of the user's"):
        tx.update(jnp.ones(3), tx.init(jnp.ones(3)))


def test_adapters_of_a_model_are_trained_alone():
    """`using` with the state of some variables trains these and leaves the others alone."""
    tx, model = transformation(), Adapted()
    before = jax.tree.map(np.asarray, nnx_parameters(model))
    opt_state = tx.init(nnx.state(model, nnx.LoRAParam))
    state = gs.TrainState.create(model, tx).replace(opt_state=opt_state)
    step = gs.train_step(nnx_loss, using=of_adapters)
    for _ in range(3):
        state, _ = step(state, X, Y)
    model = state.params
    frozen = nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
    for path, value in nnx.to_flat_state(frozen):
        np.testing.assert_array_equal(value[...], dict(nnx.to_flat_state(before))[path][...])
    assert np.any(model.layer.lora_b[...] != 0)


def test_layers_of_an_nnx_model_have_optimizers_of_their_own():
    """The first key of a parameter's path is its label: one layer is trained, one is not."""

    class Net(nnx.Module):
        def __init__(self):
            self.body = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
            self.head = nnx.Linear(4, 1, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.head(self.body(x))

    def labels(params):
        return jax.tree_util.tree_map_with_path(lambda p, _: p[0].key, params)

    parts = {"body": optax.set_to_zero(), "head": optax.sgd(0.1)}
    model = Net()
    before = [np.asarray(layer.kernel[...]) for layer in (model.body, model.head)]
    state = gs.TrainState.create(model, optax.multi_transform(parts, labels))
    model = gs.train_step(nnx_loss)(state, X, Y)[0].params
    after = [np.asarray(layer.kernel[...]) for layer in (model.body, model.head)]
    same = [np.array_equal(old, new) for old, new in zip(before, after, strict=True)]
    assert same == [True, False]


def test_init_names_a_leaf_that_is_no_array():
    """A dictionary of models is not recognised: the error says to pass its parameters."""
    message = r"got <.*> for `params\['a'\]\.mlp\.activation`. .*equinox\.filter\(params"
    with pytest.raises(TypeError, match=message):
        transformation().init({"a": Net()})


@EACH
def test_an_x_ray_takes_a_model(kind):
    """`xray` without `using` finds what it finds with it."""
    make, loss, using, _ = KINDS[kind]
    one = xray(loss, make(), BAD, Y, scale=2.0, prescribe=False)
    other = xray(loss, make(), BAD, Y, scale=2.0, using=using, prescribe=False)
    assert not one.finite
    assert str(one) == str(other)
    assert one.causes[0].kind == other.causes[0].kind


@EACH
def test_an_xray_of_a_file_takes_a_model(kind, tmp_path, monkeypatch, capsys):
    """The X-ray of a step file that `train_step` filled needs `--like`, and no `--using`."""
    make, loss, _, _ = KINDS[kind]
    recorder = StepRecorder(tmp_path / "bad.safetensors")
    state, _ = gs.train_step(loss)(gs.TrainState.create(make(), transformation()), BAD, Y)
    assert recorder.write(0, state.info, state.params, BAD, Y)
    monkeypatch.chdir(tmp_path)
    name = __name__
    words = ["--loss", f"{name}:{loss.__name__}", "--like", f"{name}:{make.__name__}"]
    status = main(["xray", "bad.safetensors", *words])
    said = capsys.readouterr()
    assert (status, said.err) == (0, "")
    assert "NOT finite" in said.out


def aux_loss(model, x, y):
    return nnx_loss(model, x, y), {"mean": x.mean()}


def test_an_xray_of_a_file_of_a_loss_with_aux_names_its_option(tmp_path, monkeypatch, capsys):
    """Without `--has-aux` the error names the option, without a traceback; with it, it runs."""
    recorder = StepRecorder(tmp_path / "bad.safetensors")
    state = gs.TrainState.create(nnx_model(), transformation())
    state, *_ = gs.train_step(aux_loss, has_aux=True)(state, BAD, Y)
    assert recorder.write(0, state.info, state.params, BAD, Y)
    monkeypatch.chdir(tmp_path)
    words = ["bad.safetensors", "--loss", f"{__name__}:aux_loss", "--like", f"{__name__}:make_nnx"]
    assert main(["xray", *words]) == 1
    said = capsys.readouterr().err
    assert f"{__name__}:aux_loss returns (loss, aux), pass --has-aux." in said
    assert "Traceback" not in said
    assert main(["xray", *words, "--has-aux"]) == 0
    assert "NOT finite" in capsys.readouterr().out


@EACH
def test_an_explicit_function_wins(kind):
    """`using` differentiates a model, if it is given."""
    make, loss, using, _parameters = KINDS[kind]
    calls = []

    def mine(fun, **options):
        calls.append(options)
        return using(fun, **options)

    state = gs.TrainState.create(make(), transformation())
    gs.value_and_grad(loss, state.opt_state, using=mine)(state.params, X, Y)
    xray(loss, make(), X, Y, scale=1.0, using=mine, prescribe=False, compiled=False)
    gs.train_step(loss, using=mine)(state, X, Y)
    assert calls == [{"has_aux": True}] * 3


@EACH
def test_argnums_choose_the_model(kind):
    """The argument that is differentiated decides, not the first one."""
    make, loss, _using, _parameters = KINDS[kind]
    state, model = transformation().init(make()), make()

    def swapped(x, y, model):
        return loss(model, x, y)

    first = gs.value_and_grad(loss, state)(make(), X, Y)
    assert_same(gs.value_and_grad(swapped, state, argnums=2)(X, Y, make()), first)
    if kind == "equinox":  # NNX itself takes no negative ones
        assert_same(gs.value_and_grad(swapped, state, argnums=-1)(X, Y, make()), first)
    _, (own, of_x) = gs.value_and_grad(swapped, state, argnums=(2, 0))(X, Y, model)
    for found, expected in zip(values(own), values(first[1]), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-2)  # another float16 program
    assert of_x.shape == X.shape
    if kind == "equinox":  # an NNX model is changed in the call, so only NNX differentiates
        _, of_x = gs.value_and_grad(swapped, state)(X, Y, make())
        assert of_x.shape == X.shape


def test_other_variables_of_an_nnx_model():
    """`argnums=nnx.DiffState(...)` chooses variables of a model without `using`."""
    model, state = nnx_model(), transformation().init(jnp.ones(1))
    wrt = nnx.DiffState(0, nnx.All(nnx.Param, nnx.PathContains("bias")))
    found, given = (
        gs.value_and_grad(nnx_loss, state, argnums=wrt, **more)(nnx_model(), X, Y)
        for more in ({}, {"using": nnx.value_and_grad})
    )
    assert_same(found, given)
    assert 0 < len(jax.tree.leaves(found[1])) < len(jax.tree.leaves(nnx_parameters(model)))


def test_a_plain_pytree_has_the_program_of_jax():
    """Loss, gradients and update of a plain pytree are traced as with `jax.value_and_grad`."""
    params, tx = {"w": jnp.ones((4, 3)), "b": jnp.ones(3, HALF)}, transformation()
    state = tx.init(params)

    def loss(params, x):
        return jnp.mean(x @ params["w"] + params["b"])

    def step(using, params, state):
        value, grads = gs.value_and_grad(loss, state, **using)(params, X)
        updates, state = tx.update(grads, state, params)
        return apply_updates(params, updates, state), state, value

    programs = [
        jax.make_jaxpr(functools.partial(step, using))(params, state)
        for using in ({}, {"using": jax.value_and_grad})
    ]
    assert str(programs[0]) == str(programs[1])


def test_recognition_imports_no_library():
    """A plain loop imports neither Flax nor Equinox."""
    code = """
import sys, gainstage as gs, jax.numpy as jnp, optax
state = gs.TrainState.create(jnp.ones(2), optax.sgd(0.1))
gs.train_step(lambda w: (w**2).sum())(state)
print([name for name in ("flax", "equinox") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_nnx_optimizer_is_no_transformation():
    """The error is short, and says what to pass instead."""
    optimizer = nnx.Optimizer(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), optax.adam(0.1), wrt=nnx.Param)
    for build in (gs.with_loss_scale, functools.partial(gs.TrainState.create, jnp.ones(2))):
        with pytest.raises(TypeError, match=r"Pass its `tx`\.") as found:
            build(optimizer)
        assert len(str(found.value)) <= 600
