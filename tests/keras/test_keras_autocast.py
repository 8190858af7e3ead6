"""Float32 models of Keras under `autocast`: in half precision, and otherwise as they were."""

import copy
import functools
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gainstage as gs

keras = pytest.importorskip("keras")

from gainstage.interop.keras import LossScaleOptimizer, autocast, compile, find_plan

# Keras itself, where it saves a model or sets a rate with numpy 2.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Keras.s trainer stores:UserWarning"),  # models beside ours
]


def data(size=128):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(size, 16)).astype(np.float32)
    return x, (x[:, :3] @ np.array([[1.0], [-2.0], [0.5]])).astype(np.float32)


def functional(dropout=0.1):
    inputs = keras.Input((16,))
    h = keras.layers.Dense(16, "gelu", kernel_regularizer="l2")(inputs)
    h = keras.layers.Dropout(dropout, seed=1)(keras.layers.BatchNormalization()(h))
    return keras.Model(inputs, keras.layers.Dense(1)(h))


def sequential():
    return keras.Sequential([keras.Input((16,)), keras.layers.Dense(16, "tanh"), last()])


def last():
    return keras.layers.Dense(1)


@keras.saving.register_keras_serializable("tests")
class Subclass(keras.Model):
    """A model with a `call` and a `train_step` of its own, as Keras's guide writes it."""

    def __init__(self, width=16, **kwargs):
        super().__init__(**kwargs)
        self.width = width
        self.first, self.last = keras.layers.Dense(width, "relu"), last()

    def call(self, x, training=False):
        return self.last(self.first(x))

    def compute_loss_and_updates(self, weights, others, x, y, training=False, optimizer=None):
        predicted, others = self.stateless_call(weights, others, x, training=training)
        loss = self.compute_loss(x, y, predicted)
        with keras.StatelessScope(zip(self.optimizer.variables, optimizer, strict=True)):
            return self.optimizer.scale_loss(loss), (loss, others)

    def train_step(self, state, data):
        weights, others, optimizer, metrics = state
        grad_fn = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (_, (loss, others)), grads = grad_fn(weights, others, *data, True, optimizer)
        weights, optimizer = self.optimizer.stateless_apply(optimizer, grads, weights)
        return {"loss": loss}, (weights, others, optimizer, metrics)


def without_dropout():
    """Keras does not save the seed of dropout."""
    return functional(0.0)


MODELS = {"functional": functional, "sequential": sequential, "subclass": Subclass}
SAVED = {"without_dropout": without_dropout, "sequential": sequential}


def built(kind, plan=None, optimizer=None, **options):
    keras.utils.set_random_seed(0)
    model = (MODELS | SAVED)[kind]()
    model(np.ones((1, 16), np.float32))
    model = model if plan is None else autocast(model, plan)
    model.compile(optimizer or adam(), "mse", **options)
    return model


def adam():
    """An optimizer under a scale at which no step is skipped."""
    return LossScaleOptimizer(keras.optimizers.Adam(0.02), initial_scale=2.0**8)


def weights_of(model):
    return [np.asarray(v.value) for v in model.variables]


def halves(model, training=True, dtype="f16"):
    """How many results of a call are in half precision."""
    values = [[v.value for v in each] for each in model_variables(model)]
    call = lambda weights, others, x: model.stateless_call(weights, others, x, training=training)  # noqa: E731
    return str(jax.make_jaxpr(call)(*values, data(16)[0])).count(f":{dtype}[")


def model_variables(model):
    return model.trainable_variables, model.non_trainable_variables


def trained(kind, plan):
    """A model after three epochs, and its losses."""
    x, y = data()
    model = built(kind, plan)
    losses = model.fit(x, y, 16, 3, verbose=0, shuffle=False).history["loss"]
    assert {str(w.dtype) for w in weights_of(model)} <= {"float32", "uint32"}
    assert model.predict(x, verbose=0).dtype == np.float32
    return model, losses


@functools.cache
def losses_in_float32(kind):
    return trained(kind, None)[1]


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        *((kind, "float16") for kind in MODELS),
        ("functional", "bfloat16"),
        pytest.param("sequential", "bfloat16", marks=pytest.mark.thorough),
        pytest.param("subclass", "bfloat16", marks=pytest.mark.thorough),
    ],
)
def test_fit_ends_where_float32_does(kind, plan):
    """`fit` in half precision has the loss of float32, and weights and results in float32."""
    exact = losses_in_float32(kind)
    model, losses = trained(kind, plan)
    assert halves(model, dtype={"float16": "f16", "bfloat16": "bf16"}[plan])
    np.testing.assert_allclose(exact, losses, rtol=0.01 if plan == "float16" else 0.05)


def test_evaluate_predict_and_batches_are_in_half_precision():
    """Without training, the numbers are those of float32 but for rounding, and not the same."""
    x, y = data()
    exact, half = built("functional"), built("functional", "float16")
    for run in (
        lambda model: model.predict(x, verbose=0),
        lambda model: model.evaluate(x, y, verbose=0),
        lambda model: model.test_on_batch(x, y),
        lambda model: model.predict_on_batch(x),
        lambda model: model.train_on_batch(x, y),
    ):
        wanted, found = run(exact), run(half)
        np.testing.assert_allclose(found, wanted, rtol=0.01, atol=2e-3)
        assert not np.array_equal(wanted, found)


@pytest.mark.parametrize("options", [{"steps_per_execution": 2}, {"run_eagerly": True}], ids=str)
def test_options_of_compile_change_no_number(options):
    """Several steps in one execution, or none compiled, train as one compiled step after another.

    The eager one is compared after one step: its rounding is another."""
    x, y = data(32)
    weights = []
    for each in ({}, options):
        model = built("sequential", "float16", **each)
        model.fit(x, y, 16, 1, verbose=0, shuffle=False)
        weights.append(weights_of(model))
    for wanted, found in zip(*weights, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=1e-4)


def test_float16_is_scaled():
    """`compile` wraps an optimizer, which skips steps, and scales in float16, unless it is told not
    to."""
    sgd = keras.optimizers.SGD
    for plan, scale in (("float16", 2.0**15), ("bfloat16", 1.0)):
        model = built("sequential", plan, sgd())
        assert isinstance(model.optimizer, LossScaleOptimizer)
        assert float(model.optimizer.loss_scale) == scale
    assert isinstance(autocast(built("sequential", None, sgd())).optimizer, LossScaleOptimizer)
    plain = built("sequential", "float16", sgd(), auto_scale_loss=False).optimizer
    assert not isinstance(plain, keras.optimizers.LossScaleOptimizer)
    for own in (
        keras.optimizers.LossScaleOptimizer(sgd()),
        sgd(loss_scale_factor=1024.0),
    ):
        assert built("sequential", "float16", own).optimizer is own


def test_a_compile_of_ones_own():
    """A model's own `compile` gets the arguments that it takes, and its optimizer is wrapped."""

    class Own(keras.Sequential):
        def compile(self, optimizer, my_loss):
            super().compile(optimizer=optimizer, loss=my_loss)

    model = autocast(Own([keras.Input((16,)), last()]))
    model.compile("sgd", my_loss="mse")
    assert isinstance(model.optimizer, LossScaleOptimizer)
    assert np.isfinite(model.fit(*data(), verbose=0).history["loss"][0])


def test_small_gradients_are_not_lost():
    """Gradients below the smallest float16 number train the weights, as in float32."""
    x, y = data()
    changes = []
    for plan in (None, "float16"):
        model = built("sequential", plan, keras.optimizers.SGD(1e6), loss_weights=1e-8)
        before = weights_of(model)
        model.fit(x, y, 16, 1, verbose=0, shuffle=False)
        changes.append([a - b for a, b in zip(weights_of(model), before, strict=True)])
    for wanted, found in zip(*changes, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0.02, atol=2e-4)


def test_a_model_that_is_compiled_and_trained_goes_on():
    """`autocast` takes a model in the middle of its training: nothing is lost or reset."""
    x, y = data()
    model = built("functional", None, keras.optimizers.Adam(0.02))
    model.fit(x, y, 16, 1, verbose=0)
    before = weights_of(model)
    steps = int(model.optimizer.iterations.value)
    autocast(model)
    for wanted, found in zip(before, weights_of(model), strict=True):
        np.testing.assert_array_equal(found, wanted)
    model.fit(x, y, 16, 1, verbose=0)
    assert halves(model)
    assert int(model.optimizer.inner_optimizer.iterations.value) > steps


@pytest.mark.parametrize(
    ("kind", "with_plan"),
    [
        pytest.param("without_dropout", False, id="float16-without_dropout"),
        pytest.param("sequential", True, id="plan-sequential"),
        pytest.param("sequential", False, id="float16-sequential", marks=pytest.mark.thorough),
        pytest.param("without_dropout", True, id="plan-without", marks=pytest.mark.thorough),
    ],
)
def test_a_saved_model_goes_on(kind, with_plan, tmp_path):
    """A model that is saved and loaded, pickled or copied trains on to the same bits."""
    x, y = data()
    plan = (
        find_plan(built(kind), [(x, y)], max_error=0.005, progress=False)
        if with_plan
        else "float16"
    )
    model = built(kind, plan)
    model.fit(x, y, 16, 1, verbose=0, shuffle=False)
    model.save(tmp_path / "model.keras")
    others = {
        "loaded": keras.saving.load_model(tmp_path / "model.keras"),
        "pickled": pickle.loads(pickle.dumps(model)),
        "copied": copy.deepcopy(model),
    }
    model.fit(x, y, 16, 1, verbose=0, shuffle=False)
    for other in others.values():
        assert halves(other) == halves(model)
        other.fit(x, y, 16, 1, verbose=0, shuffle=False)
        for wanted, found in zip(weights_of(model), weights_of(other), strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_a_saved_subclass_is_under_autocast(tmp_path):
    """A model of the user's own class keeps its methods and its plan in a file."""
    x, y = data()
    model = built("subclass", "bfloat16")
    model.fit(x, y, 16, 1, verbose=0)
    model.save(tmp_path / "model.keras")
    other = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(other, Subclass)
    assert other.width == 16
    assert halves(other, dtype="bf16")
    np.testing.assert_array_equal(other.predict(x, verbose=0), model.predict(x, verbose=0))


def test_clones():
    """A clone of a functional model or of one's own class is under autocast."""
    for kind in ("functional", "subclass"):
        model = built(kind, "float16")
        clone = keras.models.clone_model(model)
        clone(np.ones((1, 16), np.float32))
        assert halves(clone) == halves(model)
    assert halves(built("functional", "float16").from_config(model_config())) > 0


def model_config():
    return built("functional", "float16").get_config()


def test_masks_reach_the_loss():
    """The mask of an embedding leaves padding out of the loss, as in float32."""
    ids = np.array([[1, 2, 0, 0], [3, 1, 2, 0]], np.int32)
    target = np.ones((2, 4, 1), np.float32)
    losses = []
    for plan in (None, "float16"):
        keras.utils.set_random_seed(0)
        embedding = keras.layers.Embedding(4, 8, mask_zero=True)
        layers = [embedding, keras.layers.LSTM(8, return_sequences=True), last()]
        model = keras.Sequential([keras.Input((4,), dtype="int32"), *layers])
        model = model if plan is None else autocast(model)
        model.compile("sgd", "mse")
        losses.append(model.evaluate(ids, target, verbose=0))
    target[ids == 0] = 1e3  # of no consequence
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-3)
    np.testing.assert_allclose(model.evaluate(ids, target, verbose=0), losses[1], rtol=1e-6)


def test_several_inputs_and_outputs():
    """Inputs and outputs by name, with frozen weights and their own losses, train as before."""
    x, y = data()
    losses = []
    for plan in (None, "float16"):
        keras.utils.set_random_seed(0)
        a, b = keras.Input((8,), name="a"), keras.Input((8,), name="b")
        h = keras.layers.Dense(16, "relu", trainable=False)(keras.layers.Concatenate()([a, b]))
        outputs = {"y": keras.layers.Dense(1, name="y")(h), "z": keras.layers.Dense(2, name="z")(h)}
        model = keras.Model({"a": a, "b": b}, outputs)
        model = model if plan is None else autocast(model)
        sgd = LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=2.0**8)
        model.compile(sgd, {"y": "mse", "z": "mae"}, metrics={"y": ["mae"]})
        inputs, targets = {"a": x[:, :8], "b": x[:, 8:]}, {"y": y, "z": x[:, :2]}
        history = model.fit(inputs, targets, 16, 2, verbose=0, shuffle=False).history
        losses.append([history[name] for name in sorted(history)])
    np.testing.assert_allclose(*losses, rtol=0.01)


def test_layers_that_the_policy_breaks():
    """What Keras's `mixed_float16` makes infinite in the forward pass trains under autocast."""

    class Norm(keras.layers.Layer):
        def call(self, x):
            return x / keras.ops.sqrt(keras.ops.sum(x * x, axis=-1, keepdims=True))

    x, y = data()
    found = {}
    for how in ("float32", "mixed_float16", "autocast"):
        keras.utils.set_random_seed(0)
        dtype = "mixed_float16" if how == "mixed_float16" else "float32"
        layers = [
            keras.layers.Rescaling(300.0, dtype=dtype),
            keras.layers.Dense(16, dtype=dtype),
            Norm(dtype=dtype),
            keras.layers.Dense(1, dtype="float32"),
        ]
        model = keras.Sequential([keras.Input((16,)), *layers])
        model = autocast(model) if how == "autocast" else model
        model.compile(keras.optimizers.SGD(0.1), "mse")
        found[how] = model.fit(x, y, 16, 3, verbose=0, shuffle=False).history["loss"][-1]
    np.testing.assert_allclose(found["autocast"], found["float32"], rtol=0.01)
    assert not abs(found["mixed_float16"] / found["float32"] - 1) < 0.05


def test_a_plan_is_measured_on_the_loss_of_compile():
    """`find_plan` keeps in float32 what rounding would spoil; `fit` then uses its plan."""
    x, y = data()
    x = 300 + x  # features with an offset
    losses, plans = [], []
    for with_plan in (False, True):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(16), keras.layers.BatchNormalization(), last()]
        model = keras.Sequential([keras.Input((16,)), *layers])
        model.compile(adam(), "mse")
        if with_plan:
            plan = find_plan(model, [(x[:64], y[:64])], max_error=0.005, progress=False)
            assert model.optimizer is not None
            assert plan.measured.error <= 0.005
            autocast(model, plan)
            assert plan.entries[0].dtype == "float32"
            assert halves(model) > 0
            assert halves(model, training=False) == 0
            plans.append(plan)
        losses.append(model.fit(x, y, 16, 3, verbose=0, shuffle=False).history["loss"])
        model.evaluate(x, y, verbose=0)
    np.testing.assert_allclose(*losses, rtol=0.01)


def test_a_plan_keeps_a_budget_on_batches_of_a_dataset():
    """Of what yields batches four are taken; wide layers are in float8 within the budget, and the
    model trains under the plan."""

    def dataset():
        rng = np.random.default_rng(0)
        while True:
            x = rng.normal(size=(64, 32)).astype("float32")
            yield x, np.tanh(x[:, :1])

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(32, "tanh"), keras.layers.Dense(32, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((32,)), *layers])
    model.compile("adam", "mse")
    bounds = {"max_noise": 0.05, "max_bias": 0.2, "card": None}
    plan = find_plan(model, dataset(), dtype="float8", **bounds, progress=False)
    assert plan.measured.fits(0.05, 0.2)
    products = [o.dtype for o in plan.entries if o.name == "dot_general"]
    assert products == ["float8", "float8"]  # the third, of one column, is no row
    model = autocast(model, plan)
    model.compile("adam", "mse")
    fit = functools.partial(model.fit, steps_per_epoch=20, epochs=2, shuffle=False, verbose=0)
    losses = fit(dataset()).history["loss"]
    assert losses[1] < losses[0]


def test_a_plan_of_another_model_is_refused():
    """A plan fits the model that it was measured on; the error names a layer that is not there."""
    x, y = data()
    plan = find_plan(built("functional"), [(x, y)], max_error=0.005, progress=False)
    model = built("sequential", plan)
    with pytest.raises(ValueError, match=r"the plan was made for, with dense\w* \(dot_general\)"):
        model.fit(x, y, verbose=0)


def test_a_skipped_step_keeps_the_state():
    """Under autocast, also after Keras's own policies, a bad batch changes no moving mean."""
    x, y = data(16)
    x[0, 0] = np.nan
    kept = functools.partial(compile, optimizer=adam(), loss="mse", dtype=None)
    for order in ((autocast,), (kept, autocast), (autocast, autocast)):
        model = built("functional")
        for each in order:
            model = each(model)
        before = weights_of(model)
        model.fit(x, y, 16, verbose=0)
        for wanted, found in zip(before, weights_of(model), strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_autocast_again():
    """Another plan takes the place of the first."""
    model = autocast(built("sequential", "float16"), "bfloat16")
    assert halves(model) == 0
    assert halves(model, dtype="bf16")


def test_one_warning_if_nothing_is_cast():
    """A model that casts for itself is told, once for each line that traces it."""

    class Own(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(shape[-1], 1))

        def call(self, x):
            return keras.ops.cast(
                keras.ops.cast(x, "bfloat16") @ keras.ops.cast(self.w, "bfloat16"), "float32"
            )

    model = autocast(keras.Sequential([keras.Input((16,)), Own()]))
    model.compile("sgd", "mse")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(2):
            model.fit(*data(), verbose=0)
    assert len(told) == 1
    assert "no product in float16" in str(told[0].message)


def test_what_is_refused():
    """What is no float32 model or no plan is refused, and changes nothing."""
    with pytest.raises(TypeError, match="Expected a Keras model; got 3"):
        autocast(3)
    with pytest.raises(TypeError, match="Expected a Keras model; got 3"):
        find_plan(3, [data()])
    model = sequential()
    with pytest.raises(ValueError, match="got 'int8'"):
        autocast(model, "int8")
    assert type(model) is keras.Sequential
    mixed = keras.Sequential([keras.Input((16,)), keras.layers.Dense(1, dtype="mixed_float16")])
    with pytest.raises(
        ValueError, match=r"policy 'mixed_float16' in layer 'dense_?\d*'.*set_dtype"
    ):
        autocast(mixed)
    with pytest.raises(ValueError, match="built and compiled"):
        find_plan(model, [data()])
    with pytest.raises(TypeError, match="list of batches"):
        find_plan(built("functional"), data())
    with pytest.raises(ValueError, match="at least 2 batches; got 1"):
        find_plan(built("functional"), [data()])


@pytest.mark.filterwarnings("ignore:autocast has computed no product in float8")
def test_a_model_in_float8_gets_a_loss_scale():
    """Its other products are in float16, so `fit` scales the loss, and trains."""
    model = autocast(sequential(), "float8")
    model.compile(keras.optimizers.SGD(0.01), "mse")
    x, y = data()
    losses = model.fit(x, y, epochs=2, verbose=0).history["loss"]
    assert losses[1] < losses[0]
    assert type(model.optimizer).__name__ == "LossScaleOptimizer"


def test_a_mesh():
    """Under Keras's `DataParallel`, `fit` is the same on 8 devices."""
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    x, y = data()
    losses = [built("functional", "float16").fit(x, y, 16, 2, verbose=0, shuffle=False).history]
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=jax.devices()[:8]))
    try:
        model = built("functional", "float16")
        losses.append(model.fit(x, y, 16, 2, verbose=0, shuffle=False).history)
    finally:
        keras.distribution.set_distribution(None)
    np.testing.assert_allclose(losses[1]["loss"], losses[0]["loss"], rtol=1e-3)


def test_a_loop_of_ones_own():
    """`stateless_call` in a loop of `gs.train_step` is in half precision too."""
    model = autocast(functional())
    weights, others = ([v.value for v in each] for each in model_variables(model))

    def loss_fn(weights, others, x, y):
        predicted, others = model.stateless_call(weights, others, x, training=True)
        return jnp.mean((predicted - y) ** 2), others

    state = gs.TrainState.create(weights, __import__("optax").sgd(0.05), extra=others)
    step, first = gs.train_step(loss_fn), None
    for _ in range(20):
        state, loss = step(state, *data())
        first = loss if first is None else first
    assert loss < first / 2


def test_a_model_that_has_predicted_predicts_in_half_precision():
    """`autocast` reaches programs that Keras compiled before it."""
    model, x = built("sequential", None), data()[0]
    exact = model.predict(x, verbose=0)
    autocast(model)
    half = model.predict(x, verbose=0)
    assert (half != exact).any()
    np.testing.assert_allclose(half, exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("loss_scale", [None, 8.0])
def test_the_autocast_of_functions_names_the_one_of_models(loss_scale):
    """`gs.autocast(model)` says what to write, and leaves the model as it is."""
    model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(TypeError, match=r"gainstage\.interop\.keras\.autocast\(model\); its"):
        gs.autocast(model, "bf16", loss_scale=loss_scale)
    assert type(model) is keras.Sequential
