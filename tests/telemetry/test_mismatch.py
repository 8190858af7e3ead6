"""`diagnostics.logprob_mismatch`: how far a sampler and a trainer disagree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gainstage as gs


def by_numpy(a, b, mask):
    """The same in float64, written down from the definitions."""
    a, b = np.float64(a), np.float64(b)
    log_ratio = (b - a)[mask]
    ratio = np.exp(log_ratio)
    sums = np.array([(y - x)[m].sum() for x, y, m in zip(a, b, mask, strict=True) if m.any()])
    # Where |x| is small float64 too loses exp(x) - 1 - x: there x**2 / 2 + x**3 / 6 is exact.
    small = log_ratio**2 / 2 + log_ratio**3 / 6
    k3 = np.where(np.abs(log_ratio) < 1e-4, small, np.expm1(log_ratio) - log_ratio)
    return gs.diagnostics.Mismatch(
        np.abs(log_ratio).mean(),
        np.abs(log_ratio).max(),
        ratio.mean(),
        ratio.max(),
        -log_ratio.mean(),
        k3.mean(),
        sums.mean(),
        np.abs(sums).max(),
        (np.abs(ratio - 1) > 0.2).mean(),
    )


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("size", [1e-6, 1e-3, 0.1, 3.0])
def test_it_is_exact(size, jitted):
    """All numbers are those of float64, from differences of 1e-6 to 3, with a mask and without,
    inside of jit and outside; each is a float32 scalar."""
    rng = np.random.default_rng(0)
    a = -rng.exponential(size=(5, 300)).astype(np.float32)
    b = (a + size * rng.normal(size=a.shape)).astype(np.float32)
    some = rng.random(a.shape) < 0.7
    some[3] = False
    measure = (
        jax.jit(gs.diagnostics.logprob_mismatch) if jitted else gs.diagnostics.logprob_mismatch
    )
    for mask in (None, some, some.astype(np.int32)):
        found = measure(a, b, mask)
        expected = by_numpy(a, b, np.ones(a.shape, bool) if mask is None else mask.astype(bool))
        for name, one, other in zip(found._fields, found, expected, strict=True):
            assert (one.shape, one.dtype) == ((), jnp.float32)
            # Means of what is of both signs are as exact as the sum of their terms.
            atol = 1e-6 * size if name in ("k1", "mean_sequence_log_ratio") else 0
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=atol, err_msg=name)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_it_computes_in_float32(dtype):
    """Half-precision log-probabilities are upcast before anything is computed."""
    a, b = jnp.array([[-1.0, -2.0]], dtype), jnp.array([[-1.25, -2.0]], dtype)
    found = gs.diagnostics.logprob_mismatch(a, b)
    expected = by_numpy(a, b, np.ones((1, 2), bool))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_what_is_masked_does_not_matter():
    """Padding may hold anything, also NaN or inf on both sides."""
    a = jnp.array([[-1.0, jnp.nan], [-jnp.inf, -2.0]])
    b = jnp.array([[-1.5, 0.0], [-jnp.inf, -2.0]])
    found = gs.diagnostics.logprob_mismatch(a, b, jnp.array([[1, 0], [0, 1]]))
    assert float(found.mean_abs_diff) == 0.25
    assert float(found.max_abs_sequence_log_ratio) == 0.5
    assert all(map(np.isfinite, found))


def test_a_nan_is_not_lost():
    """A NaN in a token that counts makes all numbers NaN, however many tokens there are; so does
    a mask that leaves none."""
    a = jnp.zeros((2, 5000))
    assert all(map(np.isnan, gs.diagnostics.logprob_mismatch(a, a.at[1, 77].set(jnp.nan))))
    assert all(map(np.isnan, gs.diagnostics.logprob_mismatch(a, a, jnp.zeros(a.shape))))


def test_equal_log_probabilities_agree():
    """Of the same numbers on both sides all differences are 0, and all ratios 1."""
    a = -jnp.arange(1.0, 7.0).reshape(2, 3)
    assert [float(x) for x in gs.diagnostics.logprob_mismatch(a, a)] == [0, 0, 1, 1, 0, 0, 0, 0, 0]


def test_wrong_arguments_are_errors():
    """Arrays of other shapes or dtypes are refused, with what was given."""
    a = jnp.zeros((2, 3))
    for wrong in ((a, a[0]), (a[0], a[0]), (a, a, jnp.ones(2))):
        with pytest.raises(ValueError, match=r"Expected arrays of one shape \(batch, length\)"):
            gs.diagnostics.logprob_mismatch(*wrong)
    with pytest.raises(TypeError, match="Expected floating log-probabilities; got dtypes int32"):
        gs.diagnostics.logprob_mismatch(a.astype(int), a)
