"""Under JAX's strict settings, nothing of the library promotes dtypes or ranks in silence."""

import jax
import jax.numpy as jnp
import optax
import pytest

import gainstage as gs

W, X = jnp.full((3, 2), 0.5), jnp.ones((4, 3))


def loss_fn(w, x):
    """A loss that promotes nothing by itself."""
    return jnp.mean(jnp.square(jnp.matmul(x, w)))


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"retries": 2}, {"audit_every": 1}, {"microbatches": 2}])
@pytest.mark.parametrize("rule", [gs.DynamicLossScale(), gs.AdaptiveLossScale()])
def test_a_step_works_under_strict_promotion(dtype, options, rule):
    """Each kind of step, with all telemetry, takes the step that it takes otherwise."""

    def after_one(state):
        state, loss = gs.train_step(gs.autocast(loss_fn, dtype), **options)(state, X)
        return state.params, loss

    new = lambda: gs.TrainState.create(  # noqa: E731
        jnp.copy(W), optax.sgd(0.1), loss_scale=rule, telemetry=True, underflow_every=1
    )
    (params, loss) = after_one(new())
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        (expected, true) = after_one(new())
    assert params.tolist() == expected.tolist()
    assert loss == true


def test_parts_and_mixed_dtypes_work_under_strict_promotion():
    """A part with a local scale in half precision, and gradients of float16 beside float32."""
    part = gs.transforms.locally_scaled(lambda w, x: jnp.matmul(x, w), 2.0**8)
    w, x = W.astype("float16"), X.astype("float16")
    grads = jax.grad(lambda w: jnp.sum(part(w, x).astype("float32")))(w)
    assert grads.tolist() == [[4.0, 4.0]] * 3
    params = {"half": jnp.full(2, 0.5, "float16"), "full": jnp.full(2, 0.25)}
    with pytest.warns(UserWarning, match="Half-precision"):
        state = gs.TrainState.create(params, optax.sgd(1.0), loss_scale=gs.FixedLossScale(2.0))

    def sum_of_both(p):
        return jnp.sum(p["half"].astype("float32")) + jnp.sum(p["full"])

    state, _ = gs.train_step(sum_of_both)(state)
    assert state.params["half"].tolist() == [-0.5, -0.5]
    assert state.params["full"].tolist() == [-0.75, -0.75]
