"""What a precision costs a Keras model is measured on its own loss, before `fit`."""

import itertools

import jax
import numpy as np
import pytest

from gainstage.__main__ import main

keras = pytest.importorskip("keras")

from gainstage.interop.keras import advise, autocast


def batch(number, size=32):
    rng = np.random.default_rng(number)
    x = rng.normal(size=(size, 16)).astype(np.float32)
    return x, np.sin(x[:, :1])


BATCHES = [batch(number) for number in range(4)]


def model_of(*layers, loss="mse"):
    model = keras.Sequential([keras.Input((16,)), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), loss)
    return model


def full():
    """With a penalty, a state that a call changes, and dropout."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return model_of(
        layers.Dense(24, "tanh", kernel_regularizer=keras.regularizers.L2(0.01)),
        layers.BatchNormalization(),
        layers.Dropout(0.2, seed=1),
    )


def prices(advice):
    return [cost.accuracy for cost in advice.candidates]


@pytest.fixture(scope="module")
def advice():
    return advise(full(), BATCHES, progress=False)


def test_it_measures_the_loss_of_compile_with_its_penalty(advice):
    """The errors are those of the model under autocast, differentiated as a function of the
    weights."""

    def gradients(model, scale, x, y):
        groups = model.trainable_variables, model.non_trainable_variables
        weights, others = ([v.value for v in group] for group in groups)

        def loss_fn(weights):
            found = model.stateless_call(weights, others, x, training=True, return_losses=True)
            return scale * (((found[0] - y) ** 2).mean() + sum(found[2]))

        return [np.asarray(g, "d") / scale for g in jax.jit(jax.grad(loss_fn))(weights)]

    for cost in advice.candidates:
        if cost.name in ("bfloat16", "float16"):
            errors = []
            for x, y in BATCHES:
                half = gradients(autocast(full(), cost.name), 2.0**8, x, y)
                exact = gradients(full(), 1.0, x, y)
                off = [np.linalg.norm(h - e) for h, e in zip(half, exact, strict=True)]
                errors.append(np.hypot.reduce(off) / np.hypot.reduce([*map(np.linalg.norm, exact)]))
            assert max(errors) == pytest.approx(cost.accuracy.error, rel=0.05)
    assert advice.recommended.name == "bfloat16"


def test_the_model_stays_as_it_is():
    """No weight, average, seed or metric changes, nor the optimizer or the class."""
    model = full()
    optimizer, kind = model.optimizer, type(model)
    before = [np.asarray(v.value) for v in (*model.variables, *model.metrics_variables)]
    advise(model, BATCHES[:2], progress=False)
    after = [np.asarray(v.value) for v in (*model.variables, *model.metrics_variables)]
    for wanted, found in zip(before, after, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert model.optimizer is optimizer
    assert type(model) is kind


class Data(keras.utils.PyDataset):
    """A dataset with a longer end than is looked at, and a shorter last batch."""

    def __len__(self):
        return 6

    def __getitem__(self, number):
        return batch(number, 32 if number < 5 else 7)


@pytest.mark.parametrize("kind", ["PyDataset", "generator", "under autocast", "weights"])
def test_batches_come_from_a_list_or_a_dataset(kind, advice):
    """Of a dataset the first four are used; a model under autocast is measured as it was without.
    Sample weights are part of a batch."""
    model = full()
    if kind == "PyDataset":
        found = advise(model, Data(), progress=False)
    elif kind == "generator":
        found = advise(model, map(batch, itertools.count()), progress=False)
    elif kind == "under autocast":
        found = advise(autocast(model), BATCHES, progress=False)
    else:
        some = [(x, y, np.ones(len(x))) for x, y in BATCHES]
        found = advise(model, some, progress=False)
    assert found.batches == 4
    np.testing.assert_allclose(prices(found), prices(advice), rtol=0.02, atol=1e-9)


def test_it_says_nothing_of_a_chain_that_fit_has_not(advice):
    """In bfloat16 `fit` scales nothing and skips nothing: a scale of 1 is for optax."""
    assert advice.recommended.name == "bfloat16"
    assert "the chain skips" not in str(advice)


def test_the_lines_of_each_row_are_those_for_fit(advice):
    """Each row's lines compile a model that computes in its dtype, with the scaling of the row."""
    dtypes, scaled = {}, {}
    for cost in advice.candidates:
        code = "\n".join(cost.code).replace("...", 'loss="mse"')
        scope = {"model": full(), "optimizer": keras.optimizers.SGD(0.01)}
        exec(code, scope)
        model = scope["model"]
        shape = jax.ShapeDtypeStruct((32, 16), np.float32)
        groups = model.trainable_variables, model.non_trainable_variables
        values = [[v.value for v in group] for group in groups]
        program = str(jax.make_jaxpr(model.stateless_call)(*values, shape))
        dtypes[cost.name] = [name for name in ("f16", "bf16") if f":{name}[" in program]
        scaled[cost.name] = float(getattr(model.optimizer, "loss_scale", 1.0)) > 1
    assert dtypes["float32"] == []
    assert dtypes["bfloat16"] == ["bf16"]
    assert dtypes["float16"] == dtypes["float16, unscaled"] == ["f16"]
    assert [name for name in scaled if scaled[name]] == ["float16"]
    assert str(advice).endswith(
        "    from gainstage.interop.keras import autocast\n"
        '    model = autocast(model, "bfloat16")\n'
        "    model.compile(optimizer, ...)"
    )


class Own(keras.Model):
    """A model with its own step of training."""

    def __init__(self):
        super().__init__()
        self.last = keras.layers.Dense(1)

    def call(self, x):
        return self.last(x)

    def train_step(self, state, data):
        return {}, state


def own():
    model = Own()
    model.compile("sgd", "mse")
    model(BATCHES[0][0])
    return model


def not_built():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


MISTAKES = {
    "no model": (lambda: 3, BATCHES, "Expected a Keras model; got 3"),
    "not compiled": (
        lambda: keras.Sequential([keras.Input((16,)), keras.layers.Dense(1)]),
        BATCHES,
        "built and compiled",
    ),
    "not built": (not_built, BATCHES, "built and compiled"),
    "one batch": (full, BATCHES[:1], "at least 2 batches; got 1"),
    "one batch, not in a list": (full, BATCHES[0], "list of batches"),
    "an array": (full, BATCHES[0][0], "list of batches, .* or a dataset"),
    "a number": (full, 3, "list of batches, .* or a dataset; got 3"),
    "a short last batch": (full, [*BATCHES, batch(5, 7)], "batch 4 differs from batch 0"),
    "a policy": (
        lambda: model_of(keras.layers.Dense(8, dtype="mixed_float16")),
        BATCHES,
        "got the policy 'mixed_float16'",
    ),
    "its own step": (own, BATCHES, "class Own has its own"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_cannot_be_measured_is_an_error(mistake):
    """Each mistake is named with what to do."""
    make, batches, words = MISTAKES[mistake]
    with pytest.raises((TypeError, ValueError), match=words):
        advise(make(), batches, progress=False)


MODULE = """
import keras, numpy as np

def what():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(16)])
    model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(4, 32, 16))
    return model, ((each, np.sin(each)) for each in x)

def pair():
    return 1, 2
"""


def test_the_command_takes_a_model_and_batches(tmp_path, monkeypatch, capsys):
    """`gainstage advise` of a function that returns (model, batches) says the lines for `fit`."""
    (tmp_path / "of_keras.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    assert main(["advise", "of_keras:what", "--batches", "3"]) == 0
    printed = capsys.readouterr().out
    assert "Measured on 3 batches" in printed
    assert 'model = autocast(model, "bfloat16")' in printed
    assert main(["advise", "of_keras:pair"]) == 1
    assert "or (model, batches) with a Keras model; got a tuple of 2" in capsys.readouterr().err
