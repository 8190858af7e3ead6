"""What public reports of mixed precision compute, in their essence: small products, and others.

They are no part of the corpus. Rules that did not ask for the cost were wrong in most of them,
without a word.
"""

import jax
import jax.numpy as jnp

from . import Function


def invariant_masses(w, v, e):
    """Of particles that move nearly in parallel, by products of four-vectors."""
    v = (v + jnp.array([1.0, 0.0, 0.0])) * jnp.exp(e)[..., None]
    m = jnp.concatenate([jnp.linalg.norm(v, axis=-1, keepdims=True), v], -1)
    mass = jnp.einsum("bim,bjm->bij", m * jnp.array([1.0, -1.0, -1.0, -1.0]), m)
    return jnp.mean(jnp.tanh(jnp.log(jnp.maximum(mass, 0) + 1e-6)[..., None] @ w / 10) ** 2)


def turned(angle):
    """Rotations in the plane with a step along it, as matrices."""
    c, s, zero, one = jnp.cos(angle), jnp.sin(angle), 0 * angle, 1 + 0 * angle
    rows = [c, -s, one], [s, c, zero], [zero, zero, one]
    return jnp.stack([jnp.stack(row, -1) for row in rows], -2)


def chain_of_joints(a, z):
    """The end of an arm of twelve joints, near its target."""

    def end(angles):
        whole = jnp.eye(3)
        for angle in angles:
            whole = whole @ turned(angle)
        return whole[:2, 2]

    aim = jax.vmap(end)(z)
    return jnp.mean((jax.vmap(end)(z + 1e-3 * a) - aim) ** 2)


def points_in_frames(t, p, q):
    """Points in the frames of residues, as in the loss of a folded protein."""
    turn = jnp.linalg.qr(q)[0]
    local = jnp.einsum("rij,spj->rspi", turn, p[:, None] + t - p[None, :])
    near = jnp.einsum("rij,spj->rspi", turn, p[:, None] - p[None, :])
    return jnp.mean(jnp.sqrt(jnp.sum((local - near) ** 2, -1) + 1e-4))


def values_of_a_critic(w, h, d, r):
    """Temporal differences of values that are far larger than they are."""
    value = lambda h: (h @ jnp.abs(w))[:, 0]  # noqa: E731
    h, after = jax.nn.relu(h + 1), jax.nn.relu(h + 1) + 0.01 * d
    reward = jax.lax.stop_gradient(value(h) - 0.99 * value(after) + 0.02 * r)
    return jnp.mean((reward + 0.99 * jax.lax.stop_gradient(value(after)) - 0.9 * value(h)) ** 2)


def prefix_sums_in_a_scan(w, x):
    """Sums of sums, which grow to thousands."""
    total = jax.lax.associative_scan(jnp.add, jax.nn.softplus(x @ w))
    return jnp.mean(jnp.tanh(total / 1000) ** 2)


def differences_over_a_step(w, v, x):
    """The slope of a network by its values on both sides."""
    net = lambda x: jnp.tanh(x @ w) @ v  # noqa: E731
    return jnp.mean(((net(x + 1e-2) - net(x - 1e-2)) / 2e-2 - jnp.cos(x[:, :1])) ** 2)


def logarithms_of_small_powers(w, m, x):
    """A spectrum near 0 through a filter bank, and its logarithm."""
    power = (1e-4 * jax.nn.softplus(x @ w)) ** 2
    return jnp.mean((jnp.log(power @ jnp.abs(m) + 1e-12) + 18) ** 2) / 100


ROWS = (
    (invariant_masses, "w 1 8", "v 256 12 3 *0.02, e 256 12 !"),
    (chain_of_joints, "a 12", "z 32 12 !"),
    (points_in_frames, "t 24 3 *0.1", "p 24 3, q 24 3 3 !"),
    (values_of_a_critic, "w 64 1 *4", "h 1024 64 !, d 1024 64 !, r 1024 !"),
    (prefix_sums_in_a_scan, "w 64 64", "x 4096 64"),
    (differences_over_a_step, "w 16 64, v 64 16", "x 256 16 !"),
    (logarithms_of_small_powers, "w 64 64, m 64 32 *0.1", "x 256 64"),
)
REPORTS = {row.name: row for row in (Function("reports", *parts, scales="data") for parts in ROWS)}
