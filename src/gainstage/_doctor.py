"""`gainstage doctor`: how this machine computes half precision, and whether scaling works."""

import platform
import re
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gainstage as gs

PACKAGES = ["jax", "jaxlib", "numpy", "optax", "keras", "flax", "equinox", "orbax-checkpoint"]
TESTED_DTYPES = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


def main() -> int:
    """Prints the results of the checks; returns 1 if one failed, else 0."""
    print("versions")
    print(f"  python {platform.python_version()} on {platform.system()} {platform.machine()}")
    print(f"  gainstage {gs.__version__}")
    for package in PACKAGES:
        print(f"  {package} {_version(package)}")
    print("\ndevices")
    for device in jax.devices():
        print(f"  {device.id}: {device.device_kind} ({device.platform}, process "
              f"{device.process_index} of {jax.process_count()})")  # fmt: skip
    print("\na product of two matrices, compiled here")
    for dtype in TESTED_DTYPES:
        numbers = jnp.finfo(dtype)
        print(
            f"  {dtype:14} {how_multiplied(dtype):27} {float(numbers.smallest_subnormal):.1e} to "
            f"{float(numbers.max):.1e}"
        )
    print("\nloss scaling")
    failed = 0
    for check in CHECKS:
        try:
            check()
            result = "yes"
        except Exception as error:  # report any failure to the user
            reason = f"{error}".strip().partition("\n")[0]
            result, failed = f"NO: {type(error).__name__}: {reason}", 1
        print(f"  {check.__doc__} {result}")
    print("\nWhat each precision costs on your model: gainstage advise MODULE:FUNCTION")
    if failed:
        print("\nThis should not be: please report it, with all of the above.", file=sys.stderr)
    return failed


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "is not installed"


def how_multiplied(dtype: str) -> str:
    """How a matrix product of a dtype is computed, according to the compiled program."""
    x = jax.ShapeDtypeStruct((64, 64), dtype)
    try:
        text = jax.jit(jnp.matmul).lower(x, x).compile().as_text() or ""
    except Exception:  # each backend refuses with an error of its own
        return "is not supported"
    names = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
    short = names.get(dtype, dtype.replace("float8_", "f8"))
    _, _, main = text.partition("ENTRY")
    if not main:
        return "is supported"
    before = re.findall(r"= (\w+)\[[\d,]*\]\S* (?:convert|fusion)\(", main)
    wider = next((found for found in before if found != short), None)
    return f"is computed in {wider}" if wider else "is computed as such"


# ── the checks: each raises if the promise in its docstring does not hold ────────────────────


def _small_gradients_survive() -> None:
    """a gradient that float16 flushes to zero arrives:"""
    w = gs.optimizers.Variable(1.0)
    opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(1.0), initial_scale=2.0**15)

    def loss() -> jax.Array:
        return (w.value().astype(jnp.float16) * jnp.float16(2.0**-13)).astype(jnp.float32) * 2**-13

    opt.build([w])
    ((gradient, _),) = opt.compute_gradients(loss, [w])
    assert gradient is not None
    assert float(gradient) / float(opt.loss_scale) == 2.0**-26, "it was lost"


def _overflow_is_skipped() -> None:
    """a step that overflows changes nothing but the scale:"""
    w = gs.optimizers.Variable(np.ones(5000, np.float32))
    opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.Adam(0.1), initial_scale=2.0**15)
    opt.build([w])
    before = [v.numpy().tobytes() for v in [w, *opt.inner_optimizer.variables]]
    opt.scale_loss(1.0)
    opt.apply([jnp.ones(5000).at[4999].set(jnp.nan)])
    after = [v.numpy().tobytes() for v in [w, *opt.inner_optimizer.variables]]
    assert before == after, "it changed something"
    assert float(opt.loss_scale) == 2.0**14, float(opt.loss_scale)


def _all_ways_agree() -> None:
    """the optax loop, `apply` and `gs.optimizers.jit` take the same steps:"""
    start = np.linspace(-1, 1, 300, dtype=np.float32)
    w, v = gs.optimizers.Variable(start), gs.optimizers.Variable(start)
    eager = gs.optimizers.LossScaleOptimizer(gs.optimizers.Adam(0.1))
    compiled = gs.optimizers.LossScaleOptimizer(gs.optimizers.Adam(0.1))
    compiled.build([v])

    def minimize() -> jax.Array:
        return compiled.minimize(lambda: (v.value() ** 2).sum(), [v])

    step = gs.optimizers.jit(minimize, ([v], compiled.variables), donate=True)
    tx = gs.with_loss_scale(optax.adam(0.1, eps=1e-7))
    params: Any = jnp.asarray(start)
    state = tx.init(params)
    for _ in range(5):
        eager.minimize(lambda: (w.value() ** 2).sum(), [w])
        step()
        _, grads = gs.value_and_grad(lambda p: (p**2).sum(), state)(params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(w.numpy(), v.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(w.numpy(), params, rtol=1e-3, atol=1e-4)


def _nothing_goes_to_the_host() -> None:
    """a step waits for nothing:"""
    w = gs.optimizers.Variable(np.ones(3, np.float32))
    opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(0.1))
    opt.build([w])
    grads = [opt.scale_loss(jnp.ones(3))]
    opt.apply(grads, [w])
    with jax.transfer_guard("disallow"):
        opt.apply(grads, [w])


CHECKS: list[Callable[[], None]] = [
    _small_gradients_survive,
    _overflow_is_skipped,
    _all_ways_agree,
    _nothing_goes_to_the_host,
]
