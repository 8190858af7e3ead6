"""Physics: networks that solve equations, particles, fields and orbits."""

import jax
import jax.numpy as jnp

from . import function

NET = "w1 2 32, b1 32, w2 32 32, b2 32, w3 32"


def network(xp, w1, b1, w2, b2, w3):
    return lambda z: xp.tanh(xp.tanh(z @ w1 + b1) @ w2 + b2) @ w3


@function(NET, "z 64 2")
def heat_equation(w1, b1, w2, b2, w3, z):
    u = network(jnp, w1, b1, w2, b2, w3)

    def residual(p):
        second = jax.hessian(u)(p)
        return jax.grad(u)(p)[0] - 0.1 * second[1, 1]

    start = jax.vmap(u)(z.at[:, 0].set(0.0)) - jnp.sin(z[:, 1])
    return jnp.mean(jax.vmap(residual)(z) ** 2) + jnp.mean(start**2)


@function(NET, "z 64 2")
def burgers_equation(xp, w1, b1, w2, b2, w3, z):
    u = network(xp, w1, b1, w2, b2, w3)
    slope = xp.vmap(xp.grad(u))(z)
    second = xp.vmap(xp.grad(lambda p: xp.grad(u)(p)[1]))(z)[:, 1]
    residual = slope[:, 0] + u(z) * slope[:, 1] - 0.01 / xp.pi * second
    return xp.mean(residual**2) + xp.mean((u(z) + xp.sin(xp.pi * z[:, 1])) ** 2)


@function(NET, "z 64 2")
def poisson_equation(w1, b1, w2, b2, w3, z):
    u = network(jnp, w1, b1, w2, b2, w3)
    laplacian = jax.vmap(lambda p: jnp.trace(jax.hessian(u)(p)))(z)
    source = 2 * jnp.pi**2 * jnp.sin(jnp.pi * z[:, 0]) * jnp.sin(jnp.pi * z[:, 1])
    return jnp.mean((laplacian + source) ** 2) / 100


@function("w1 1 32, b1 32, w2 32", "t 64 1")
def damped_oscillator(xp, w1, b1, w2, t):
    def x(s):
        return (xp.sin(s[None] @ w1 + b1) @ w2)[0]

    def first(s):
        return xp.grad(x)(s)[0]

    def residual(s):
        return xp.grad(first)(s)[0] + 0.4 * first(s) + 4.0 * x(s)

    zero = xp.zeros(1)
    return xp.mean(xp.vmap(residual)(t) ** 2) + (x(zero) - 1) ** 2 + first(zero) ** 2


@function("w1 4 32, w2 32 32, w3 32", "z 64 4, dz 64 4")
def hamiltonian_network(xp, w1, w2, w3, z, dz):
    def energy(p):
        return xp.tanh(xp.tanh(p @ w1) @ w2) @ w3

    slope = xp.vmap(xp.grad(energy))(z)
    flow = xp.concatenate([slope[:, 2:], -slope[:, :2]], axis=1)
    return xp.mean((flow - dz) ** 2)


@function("w1 4 24, w2 24", "q 16 2, v 16 2, a 16 2")
def lagrangian_network(w1, w2, q, v, a):
    def lagrangian(q, v):
        return jax.nn.softplus(jnp.concatenate([q, v]) @ w1) @ w2 + 0.5 * (v**2).sum()

    def acceleration(q, v):
        mass = jax.hessian(lagrangian, 1)(q, v) + 0.1 * jnp.eye(2)
        mixed = jax.jacobian(jax.grad(lagrangian, 1), 0)(q, v)
        return jnp.linalg.solve(mass, jax.grad(lagrangian)(q, v) - mixed @ v)

    return jnp.mean((jax.vmap(acceleration)(q, v) - a) ** 2)


@function("w 16 3", "h 30 16")
def lennard_jones_energy(xp, w, h):
    x = 2.0 * h @ w
    square = ((x[:, None] - x[None]) ** 2).sum(-1) + 0.5 + 1e3 * xp.eye(30)
    inverse = 1 / square**3
    return (4 * (inverse**2 - inverse)).sum() / 60


@function("w 16 3, q 16", "h 40 16")
def coulomb_energy(xp, w, q, h):
    x, charge = h @ w, xp.tanh(h @ q)
    d = xp.sqrt(((x[:, None] - x[None]) ** 2).sum(-1) + 0.01)
    return (charge[:, None] * charge[None] / d * (1 - xp.eye(40))).sum() / 40


@function("w 6 3", "x 20 3, h 20 6")
def gravity_with_softening(xp, w, x, h):
    v, mass = h @ w, xp.softplus(h[:, 0])
    for _ in range(5):
        d = x[None] - x[:, None]
        force = d / (((d**2).sum(-1) + 0.05) ** 1.5)[..., None] * mass[None, :, None]
        v = v + 0.01 * force.sum(1)
        x = x + 0.01 * v
    return (0.5 * mass * (v**2).sum(-1)).sum()


@function("k 16 8", "x 8 16, y 8 8")
def springs_between_neighbors(xp, k, x, y):
    p = x @ k
    stretch = xp.sqrt(((p[1:] - p[:-1]) ** 2).sum(-1) + 1e-6) - 1.0
    return (0.5 * 100.0 * stretch**2).sum() + ((p - y) ** 2).mean()


@function("w1 3 24, w2 24 3", "x 20 3, y 20 3")
def ordinary_equation_by_euler_steps(xp, w1, w2, x, y):
    for _ in range(20):
        x = x + 0.05 * xp.tanh(x @ w1) @ w2
    return xp.mean((x - y) ** 2)


@function("w1 3 24, w2 24 3", "x 20 3, y 20 3")
def ordinary_equation_by_runge_kutta(w1, w2, x, y):
    def f(z):
        return jnp.tanh(z @ w1) @ w2

    def step(z, _):
        k1 = f(z)
        k2 = f(z + 0.05 * k1)
        k3 = f(z + 0.05 * k2)
        k4 = f(z + 0.1 * k3)
        return z + 0.1 / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

    return jnp.mean((jax.lax.scan(step, x, None, 10)[0] - y) ** 2)


@function("a 4 4", "x 4 16, y 4 16")
def linear_system_over_time(xp, a, x, y):
    for _ in range(12):
        x = x + 0.1 * (a @ x - x)
    return ((x - y) ** 2).mean()


@function("c 8", "u 8 64, k 64 64 !")
def diffusion_on_a_line(xp, c, u, k):
    rate = 0.2 * xp.sigmoid(c)[:, None]
    for _ in range(10):
        u = u + rate * (xp.roll(u, 1, 1) - 2 * u + xp.roll(u, -1, 1))
    return xp.mean((u @ k / 8) ** 2)


@function("w 8 8", "u 8 32 32")
def wave_equation_on_a_grid(xp, w, u):
    u = xp.einsum("cd,dij->cij", w, u)
    before = u
    for _ in range(6):
        near = xp.roll(u, 1, 1) + xp.roll(u, -1, 1) + xp.roll(u, 1, 2) + xp.roll(u, -1, 2)
        u, before = 2 * u - before + 0.2 * (near - 4 * u), u
    return xp.mean(u**2)


@function("w 6 24, v 24 1", "x 50 6, y 50")
def arrhenius_rates(xp, w, v, x, y):
    energy = xp.softplus(xp.tanh(x @ w) @ v)[:, 0]
    temperature = 300.0 + 50.0 * xp.tanh(x[:, 0])
    rate = 1e3 * xp.exp(-energy * 1000.0 / (8.314 * temperature))
    return xp.mean((xp.log(rate) - y) ** 2)


@function("w 4 16, v 16", "x 50 4 +, y 50")
def power_law_of_inputs(xp, w, v, x, y):
    logs = xp.log(x)
    return xp.mean((xp.exp(xp.tanh(logs @ w) @ v) * x[:, 0] ** 0.25 - y) ** 2)


@function("w 6 2", "x 50 6, t 50 +, y 50")
def growth_with_saturation(xp, w, x, t, y):
    out = x @ w
    top, rate = xp.exp(0.3 * xp.tanh(out[:, 0])), xp.sigmoid(out[:, 1])
    return xp.mean((top / (1 + 9 * xp.exp(-rate * t)) - y) ** 2)


@function("w 8 4", "x 60 8, y 60 3 3")
def rotations_of_quaternions(xp, w, x, y):
    q = x @ w
    a, b, c, d = (q / xp.sqrt((q * q).sum(-1, keepdims=True) + 1e-8)).T
    rows = [
        xp.stack([1 - 2 * (c * c + d * d), 2 * (b * c - d * a), 2 * (b * d + c * a)], -1),
        xp.stack([2 * (b * c + d * a), 1 - 2 * (b * b + d * d), 2 * (c * d - b * a)], -1),
        xp.stack([2 * (b * d - c * a), 2 * (c * d + b * a), 1 - 2 * (b * b + c * c)], -1),
    ]
    return xp.mean((xp.stack(rows, 1) @ xp.ones(3) - y.sum(-1)) ** 2)


@function("w1 3 32, w2 32 4", "rays 32 16 3, y 32 3")
def rendering_along_rays(xp, w1, w2, rays, y):
    out = xp.relu(rays @ w1) @ w2
    density, color = xp.softplus(out[..., 0]), xp.sigmoid(out[..., 1:])
    alpha = 1 - xp.exp(-density * 0.1)
    passed = xp.cumprod(1 - alpha + 1e-10, axis=1)
    weight = alpha * xp.concatenate([xp.ones((32, 1)), passed[:, :-1]], axis=1)
    return xp.mean(((weight[..., None] * color).sum(1) - y) ** 2)


@function("w 6 32, v 32 3", "x 100 3, y 100 3")
def positions_as_waves(xp, w, v, x, y):
    waves = xp.concatenate([xp.sin(4 * x), xp.cos(4 * x)], axis=-1)
    return xp.mean((xp.relu(waves @ w) @ v - y) ** 2)


@function("w1 3 32, w2 32 32, w3 32", "x 64 3")
def signed_distance_with_unit_slopes(xp, w1, w2, w3, x):
    def f(p):
        return xp.softplus(xp.softplus(p @ w1) @ w2) @ w3

    slope = xp.vmap(xp.grad(f))(x)
    length = xp.sqrt((slope**2).sum(-1) + 1e-12)
    return xp.abs(f(x)).mean() + 0.1 * ((length - 1) ** 2).mean()


@function("w 8 16, v 16 1", "x 128 8, y 128 1")
def cross_sections_in_square_metres(w, v, x, y):
    sections = 1e-12 * (1 + jnp.sin(jnp.outer(jnp.arange(8.0), jnp.arange(8.0))))
    return jnp.mean((jnp.tanh((x @ sections) * 1e12 @ w) @ v - y) ** 2)
