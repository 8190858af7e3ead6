"""The difference between the log-probabilities of two programs for the same tokens."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy.typing as npt

from gainstage._scaling.gradients import float32_or_wider

CLIP = 0.2  # the clip range of PPO
SERIES = 12  # terms of exp(x) - 1 - x, enough for float32 up to |x| = 1


class Mismatch(NamedTuple):
    """The result of `logprob_mismatch`: float32 scalars. `ratio` is `exp(logp_b - logp_a)`."""

    mean_abs_diff: jax.Array  # of the log-probabilities, over tokens
    max_abs_diff: jax.Array
    mean_ratio: jax.Array  # over tokens
    max_ratio: jax.Array
    k1: jax.Array  # mean of -log ratio: an estimate of the KL divergence, which may be negative
    k3: jax.Array  # mean of ratio - 1 - log ratio: an estimate >= 0, with less variance
    mean_sequence_log_ratio: jax.Array  # of the sums over each sequence
    max_abs_sequence_log_ratio: jax.Array  # exp of it is the worst ratio of a sequence
    outside_clip: jax.Array  # share of tokens with a ratio below 0.8 or above 1.2


def logprob_mismatch(
    logp_a: npt.ArrayLike, logp_b: npt.ArrayLike, mask: npt.ArrayLike | None = None
) -> Mismatch:
    """Measures how far trainer and sampler disagree on the tokens that the sampler drew.

    In RL fine-tuning the two programs compute the same probabilities, but round differently. The
    difference biases the policy gradient; in bfloat16 it is many times larger than in float16. Call
    this function in each training step, also inside `jax.jit`, and log the result.

    Args:
        logp_a: log-probabilities of the tokens under the sampler, of shape (batch, length) and any
            floating dtype.
        logp_b: log-probabilities under the trainer, of the same shape.
        mask: an array of the same shape, true (or 1) for tokens that count, such as responses; None
            for all. Values at other tokens are ignored.

    Returns:
        A `Mismatch` of float32 scalars. All are NaN if no token counts, or if a difference at one
        that counts is NaN (one value is NaN, or both are -inf).

    Raises:
        TypeError: the log-probabilities are not floating.
        ValueError: the arrays are not all of one shape (batch, length).

    Examples:
        >>> import jax.numpy as jnp
        >>> from gainstage.diagnostics import logprob_mismatch
        >>> sampler = jnp.log(jnp.array([[0.5, 0.25], [0.5, 0.125]]))
        >>> trainer = jnp.log(jnp.array([[0.5, 0.375], [0.5, 0.125]]))
        >>> found = logprob_mismatch(sampler, trainer)
        >>> print(f"{found.max_ratio:.3f} {found.k1:.4f} {found.k3:.4f} {found.outside_clip:.2f}")
        1.500 -0.1014 0.0236 0.25

    Source: Schulman, 2020, "Approximating KL Divergence" (k1, k3); Qi et al., 2025,
    arXiv:2510.26788 (the mismatch, by dtype); Schulman et al., 2017, arXiv:1707.06347 (the clip).
    """
    a, b = (jnp.asarray(x) for x in (logp_a, logp_b))
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (a, b)):
        raise TypeError(f"Expected floating log-probabilities; got dtypes {a.dtype} and {b.dtype}.")
    counts = jnp.ones(a.shape, bool) if mask is None else jnp.asarray(mask).astype(bool)
    if a.ndim != 2 or not a.shape == b.shape == counts.shape:
        raise ValueError(
            f"Expected arrays of one shape (batch, length); got {a.shape} and {b.shape}"
            f"{'' if mask is None else f', with a mask of {counts.shape}'}."
        )
    dtype = float32_or_wider(jnp.promote_types(a.dtype, b.dtype))
    log_ratio = jnp.where(counts, b.astype(dtype) - a.astype(dtype), 0)
    sequence, in_use = log_ratio.sum(axis=1), counts.any(axis=1)

    def mean(x: jax.Array, of: jax.Array = counts) -> jax.Array:
        return jnp.where(of, x, 0).sum() / of.sum()

    # XLA:CPU drops NaN in `max`, so it is put back.
    broken = jnp.isnan(log_ratio).any() | ~counts.any()

    def largest(x: jax.Array, of: jax.Array = counts) -> jax.Array:
        return jnp.where(broken, jnp.nan, jnp.where(of, x, -jnp.inf).max(initial=-jnp.inf))

    ratio = jnp.exp(log_ratio)
    outside = jnp.where(jnp.isnan(ratio), jnp.nan, jnp.abs(jnp.expm1(log_ratio)) > CLIP)
    numbers = Mismatch(
        mean_abs_diff=mean(jnp.abs(log_ratio)),
        max_abs_diff=largest(jnp.abs(log_ratio)),
        mean_ratio=mean(ratio),
        max_ratio=largest(ratio),
        k1=-mean(log_ratio),
        k3=mean(_k3(log_ratio)),
        mean_sequence_log_ratio=mean(sequence, in_use),
        max_abs_sequence_log_ratio=largest(jnp.abs(sequence), in_use),
        outside_clip=mean(outside),
    )
    return Mismatch(*(x.astype(jnp.float32) for x in numbers))


def _k3(x: jax.Array) -> jax.Array:
    """exp(x) - 1 - x; near 0 by its series, because the difference would lose all digits."""
    series = jnp.zeros_like(x)
    for n in range(SERIES + 1, 1, -1):
        series = series * x + 1 / math.factorial(n)
    return jnp.where(jnp.abs(x) < 1, x * x * series, jnp.expm1(x) - x)
