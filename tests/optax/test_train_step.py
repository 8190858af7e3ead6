"""`train_step`: the loop that is written out elsewhere, as one call."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilations import compilations

import gainstage as gs
from gainstage.training import train_step as compiled_steps
from gainstage.training.train_step import TrainStepOptions

X, Y = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4), np.ones((8, 1), np.float32)


def loss_fn(params, x, y):
    hidden = jax.nn.relu(x.astype("float16") @ params["w"].astype("float16") + params["b"])
    return jnp.mean((hidden.astype("float32").sum(1, keepdims=True) - y) ** 2)


def first():
    return {"w": jnp.linspace(-0.5, 0.5, 12).reshape(4, 3), "b": jnp.zeros(3, jnp.float16)}


def written_out(tx):
    """The same step in three calls."""

    def step(params, opt_state, *batch):
        loss, grads = gs.value_and_grad(loss_fn, opt_state)(params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return gs.transforms.apply_updates(params, updates, opt_state), opt_state, loss

    return jax.jit(step)


TRANSFORMATIONS = {
    "adam": lambda: gs.with_loss_scale(optax.adam(0.1)),
    "clipped": lambda: gs.with_loss_scale(
        optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5))
    ),
    "growing": lambda: gs.with_loss_scale(
        optax.adam(0.1), gs.DynamicLossScale(2.0**30, increment_period=2)
    ),
    "adaptive": lambda: gs.with_loss_scale(optax.sgd(0.1), gs.AdaptiveLossScale(), telemetry=True),
    "value": lambda: gs.with_loss_scale(
        optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1))
    ),
    "inside": lambda: optax.chain(gs.with_loss_scale(optax.sgd(0.1)), optax.scale(0.5)),
}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=[pytest.mark.slow] * (name in ("clipped", "value")))
        for name, make in TRANSFORMATIONS.items()
    ],
)
def test_it_takes_the_steps_of_the_loop(make):
    """Params, state and losses are those of the loop in three calls, overflows included."""
    tx = make()
    one, other = gs.train_step(loss_fn), written_out(tx)
    state, params = gs.TrainState.create(first(), tx), first()
    opt_state = tx.init(params)
    for i in range(8):
        batch = (X * (np.inf if i == 3 else 1), Y)
        with compilations() as compiled:
            state, loss_a = one(state, *batch)
        assert i == 0 or compiled == []
        params, opt_state, loss_b = other(params, opt_state, *batch)
        for x, y in zip(
            jax.tree.leaves((state.params, state.opt_state, loss_a)),
            jax.tree.leaves((params, opt_state, loss_b)),
            strict=True,
        ):
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.as_users
def test_a_skipped_step_changes_nothing_but_the_scale():
    """On a bad batch params and the state of the wrapped transformation keep every bit."""
    step, params = gs.train_step(loss_fn), first()
    params["w"] = params["w"].at[0, 0].set(1e-42)  # subnormal
    state, _ = step(gs.TrainState.create(params, optax.adam(0.1)), X, Y)
    before = jax.tree.map(np.asarray, (state.params, state.opt_state.inner))
    scale = float(state.loss_scale)
    state, loss = step(state, X * np.nan, Y)
    assert np.isnan(loss)
    assert float(state.loss_scale) == scale / 2
    assert not state.applied
    after = state.params, state.opt_state.inner
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert old.tobytes() == np.asarray(new).tobytes()


@pytest.mark.as_users
def test_gradients_are_stored_once():
    """The compiled step neither copies the parameters nor stores true gradients beside scaled ones,
    and reuses the memory of its state."""
    shape = (512, 512)

    def product(params, x):
        return ((x @ params) ** 2).mean()

    planned = jax.ShapeDtypeStruct(shape, jnp.float32)
    state = jax.eval_shape(lambda w: gs.TrainState.create(w, optax.adam(0.1)), planned)
    memory = gs.train_step(product).lower(state, planned).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 3 * 4 * 512**2
    assert memory.temp_size_in_bytes <= 2.5 * 4 * 512**2  # the product, the gradient

    state = gs.TrainState.create(jnp.ones(shape), optax.adam(0.1))
    gs.train_step(product, donate=False)(state, jnp.ones(shape))
    params = state.params
    assert not params.is_deleted()
    gs.train_step(product)(state, jnp.ones(shape))
    assert params.is_deleted()


def test_the_types_know_each_option():
    """What a type checker accepts as an option of `train_step` is what the function takes."""
    taken = set(inspect.signature(gs.train_step).parameters) - {"loss_fn", "has_aux"}
    assert set(TrainStepOptions.__annotations__) == taken


@pytest.mark.parametrize("microbatches", [1, 2])
def test_no_rank_is_promoted_implicitly(microbatches):
    """With `jax_numpy_rank_promotion="raise"`, a step with telemetry and an audit is computed."""

    def product(params, x):
        return ((x @ params["w"] + params["b"][None]) ** 2).mean()

    params = {"w": jnp.ones((32, 8)), "b": jnp.ones(8)}
    with jax.numpy_rank_promotion("raise"):
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
        state = gs.TrainState.create(params, tx, telemetry=True, underflow_every=1)
        step = gs.train_step(gs.autocast(product), microbatches=microbatches, audit_every=1)
        for _ in range(2):
            state, _ = step(state, jnp.ones((64, 32)))
        assert gs.diagnostics.report(state)
    assert state.info.applied_steps == 2


def test_errors_name_the_remedy():
    """A parameter that is a number, and an option of another type."""
    number = gs.TrainState.create({"w": 1.0}, optax.adam(0.1))
    with pytest.raises(TypeError, match=r"Expected arrays in params; got 1\.0\. Make it an array"):
        gs.train_step(lambda p: p["w"] ** 2)(number)
    with pytest.raises(TypeError, match="Expected a bool for donate; got 1"):
        gs.train_step(loss_fn, donate=1)


PARAMETERS_IN_THE_STATE = {
    "prodigy": lambda: optax.contrib.prodigy(),
    "cocob": lambda: optax.contrib.cocob(),
    "dowg": lambda: optax.contrib.dowg(),
    "mechanize": lambda: optax.contrib.mechanize(optax.sgd(0.1)),
    "lbfgs": lambda: optax.scale_by_lbfgs(),
}


@pytest.mark.parametrize("name", PARAMETERS_IN_THE_STATE)
def test_a_state_that_begins_with_the_parameters_is_donated(name):
    """An `init` that puts the parameters themselves into the state needs no copy by the user."""
    tx = gs.with_loss_scale(PARAMETERS_IN_THE_STATE[name]())
    step, other = gs.train_step(loss_fn), gs.train_step(loss_fn, donate=False)
    a, b = gs.TrainState.create(first(), tx), gs.TrainState.create(first(), tx)
    for _ in range(3):
        a, _ = step(a, X, Y)
        b, _ = other(b, X, Y)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def same_memory(array):
    """Another array with the same buffer."""
    other = jax.device_put(array, jax.devices()[0])
    assert other is not array
    assert other.unsafe_buffer_pointer() == array.unsafe_buffer_pointer()
    return other


@pytest.mark.parametrize("second", [lambda z: z, same_memory], ids=["same array", "same memory"])
def test_tied_weights_and_parameters_in_the_batch_are_donated(second):
    """A buffer that is there twice, in the parameters or also in the batch, is copied: the step
    does not fail, and what the batch holds stays readable."""
    step = gs.train_step(lambda p, old: (p["a"] * p["b"] - old["a"]).sum())
    z = jnp.full(4, 2.0)
    state = gs.TrainState.create({"a": z, "b": second(z)}, optax.sgd(0.5))
    state, _ = step(state, {"a": jnp.zeros(4)})
    assert state.params["a"].tolist() == state.params["b"].tolist() == [1] * 4
    for expected in (0.5, 0.25):  # the last step's result, as parameters and as a target
        target = jax.tree.map(second, state.params)
        state, _ = step(state, target)
        assert state.params["a"].tolist() == [expected] * 4
        assert np.isfinite(target["a"]).all()


def test_a_key_of_the_extra_may_be_in_the_batch():
    """A key is donated as any other array, and copied where the batch has it too."""

    def loss_fn(w, extra, key):
        return (w * jax.random.uniform(key)).sum(), {"key": jax.random.split(extra["key"])[0]}

    state = gs.TrainState.create(jnp.ones(2), optax.sgd(0.1), extra={"key": jax.random.key(0)})
    step, other = gs.train_step(loss_fn), gs.train_step(loss_fn, donate=False)
    same = jax.tree.map(jnp.copy, state)
    for _ in range(3):
        key = state.extra["key"]
        state, _ = step(state, key)
        same, _ = other(same, same.extra["key"])
        assert jax.random.key_data(key).shape == (2,)  # it is not deleted
    np.testing.assert_array_equal(state.params, same.params)


def test_a_large_array_beside_the_loss_is_not_read():
    """Logits that a loss returns as aux are not looked at, as they cost bandwidth; a count is."""
    large = 64, 4096

    def program(has_large):
        def loss_fn(w, x):
            logits = x * w
            aux = {"count": logits.sum(), **({"logits": logits} if has_large else {})}
            return (logits**2).mean(), aux

        state = gs.TrainState.create(jnp.float32(1.0), optax.sgd(0.1))
        lowered = gs.train_step(loss_fn, has_aux=True).lower(state, jnp.ones(large))
        return lowered.as_text()

    compared = "-> tensor<64x4096xi1>"
    assert program(has_large=True).count(compared) == program(has_large=False).count(compared)


def test_a_state_that_is_changed_in_place_is_stepped_as_it_is():
    """What a step notes of the state that it returns holds for no other state: arrays that were
    replaced or tied in its dictionary, another structure, and a copy count as they are."""
    step, plain = gs.train_step(tied), gs.train_step(tied, donate=False)
    state = gs.TrainState.create({"a": jnp.ones(3), "b": jnp.ones(3)}, optax.sgd(0.1, 0.9))
    state, _ = step(state, 1.0)

    def both(state):
        copy = jax.tree.map(jnp.copy, state)
        (new, loss), (other, expected) = step(state, 1.0), plain(copy, 1.0)
        np.testing.assert_array_equal(loss, expected)
        jax.tree.map(np.testing.assert_array_equal, new, other)
        return new

    state.params["a"] = jnp.full(3, 5.0)
    state = both(state)
    state.params["a"] = state.params["b"]
    state = both(state)
    state.params["b"] = 2.0 * np.ones(3, np.float32)
    state = both(state)
    state = both(state.replace(loss_scale=2.0**4))
    del state.params["a"], state.opt_state.inner[0].trace["a"]
    state = both(state)
    assert list(state.params) == ["b"]
    assert state.step == 6


def tied(params, x):
    return sum((w * x).sum() ** 2 for w in params.values())


def test_a_returned_state_is_stepped_without_a_look_at_its_leaves(monkeypatch):
    """The second step asks no leaf where it lies; one with a state of another origin does."""
    step, looks = gs.train_step(tied), []
    look = compiled_steps.on_one_mesh
    count = lambda *args: looks.append(0) or look(*args)  # noqa: E731
    monkeypatch.setattr(compiled_steps, "on_one_mesh", count)
    state = gs.TrainState.create({"a": jnp.ones(3)}, optax.sgd(0.1))
    for _ in range(3):
        state, _ = step(state, 1.0)
    assert len(looks) == 1
    step(jax.tree.map(jnp.copy, state), 1.0)
    assert len(looks) == 2


def test_an_array_of_the_state_in_the_batch_is_copied_first():
    """A loss may use the moments of the last step, in every step, and they stay readable."""
    step = gs.train_step(lambda w, m: ((w - m) ** 2).sum())
    state, moments = gs.TrainState.create(jnp.ones(100), optax.adam(0.5)), jnp.zeros(100)
    for _ in range(3):
        state, _ = step(state, moments)
        assert not moments.is_deleted()
        moments = state.opt_state.inner[0].mu


@pytest.mark.parametrize("flag", ["debug_nans", "debug_infs"])
def test_a_debug_flag_names_the_operation(flag):
    """Under a debug flag nothing is donated, so JAX can run the step again and name the operation;
    the parameters are those of before."""
    step = gs.train_step(lambda w, x: jnp.log(w * x).sum())
    state = gs.TrainState.create(jnp.ones(3), optax.sgd(0.5))
    with getattr(jax, flag)(True):
        state, _ = step(state, 1.0)
        bad = -1.0 if flag == "debug_nans" else 0.0
        with pytest.raises(FloatingPointError, match="log"):
            step(state, bad)
    assert state.params.tolist() == [0.5, 0.5, 0.5]


def test_telemetry_and_scale_are_read_after_later_steps(tmp_path):
    """The loop of the pages records every step without waiting, although the step donates: scale
    and telemetry of earlier steps stay readable."""
    state = gs.TrainState.create(first(), optax.adam(0.1), telemetry=True, underflow_every=10)
    step, seen = gs.train_step(loss_fn), []
    with gs.diagnostics.JsonLines(tmp_path / "run.jsonl") as run:
        for i in range(120):
            batch = (X * (np.inf if i == 7 else 1), Y)
            before = state.params["w"]
            with compilations() as compiled:
                state, loss = step(state, *batch)
            assert i == 0 or compiled == []
            run.write(i, state.info, loss=loss)
            seen.append((state.loss_scale, state.applied))
            assert before.is_deleted()
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 120
    assert [float(scale) for scale, _ in seen] == [2.0**15] * 7 + [2.0**14] * 113
    assert [bool(applied) for _, applied in seen] == [i != 7 for i in range(120)]


def test_an_error_of_the_loss_is_not_explained_away():
    """What a callback or the loss raises reaches the caller, although the step donates."""

    def fails(params, x):
        jax.debug.callback(lambda: {}["missing"])
        return loss_fn(params, x, Y)

    def wrong(params, x):
        raise TypeError("an error of the user's")

    def run(loss):
        state = gs.TrainState.create(first(), optax.sgd(0.5))
        jax.block_until_ready(gs.train_step(loss)(state, X))
        jax.effects_barrier()

    for loss, message in ((fails, "missing"), (wrong, "of the user's")):
        with pytest.raises(Exception, match=message):
            run(loss)


class Tensor:
    """An array of another library, which no NumPy array can be made of."""

    def __array__(self):
        raise RuntimeError("call numpy() on the tensor")


@pytest.mark.parametrize("kind", ["key", "traced"])
def test_the_error_of_a_loss_is_kept_with_every_batch(kind):
    """A loss that raises a TypeError does so too if its batch has a typed key or is traced."""
    state, key = gs.TrainState.create(jnp.ones(3), optax.sgd(0.5)), jax.random.key(0)
    step = gs.train_step(lambda w, key: (w * jax.random.normal(key, (5,))).sum())
    step = jax.jit(step) if kind == "traced" else step
    with pytest.raises(TypeError, match=r"incompatible shapes for broadcasting: \(3,\), \(5,\)"):
        step(state, key)


def test_an_array_of_another_library_in_the_batch_is_named():
    """What JAX takes for no array is named, also if NumPy takes it for none."""
    step = gs.train_step(lambda w, x: (w * x).sum())
    with pytest.raises(
        TypeError, match=r"Expected arrays, numbers or models .*Tensor object.* `batch\[0\]`"
    ):
        step(gs.TrainState.create(jnp.ones(3), optax.sgd(0.5)), Tensor())
