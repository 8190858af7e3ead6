"""The programs of a fixed set of steps: `python lowered.py FOLDER [BEFORE]`.

Lowers each step to StableHLO, without running it, and writes the text into FOLDER. With BEFORE, a
folder that another commit wrote, it says which programs have changed, and ends with status 1 if one
has. A refactoring changes none; a commit that does says what and why. `--compile` compiles too, and
prints conditionals, temporary bytes and seconds, beside those of the same step in plain optax.
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import gainstage as gs
from gainstage.optimizers import SGD


def shapes():
    """The 161 tensors of ResNet-50, without its running averages."""
    found, inputs = [(7, 7, 3, 64), (64,), (64,)], 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            kernels = [(1, 1, inputs, width), (3, 3, width, width), (1, 1, width, 4 * width)]
            if block == 0:
                kernels.append((1, 1, inputs, 4 * width))
            for kernel in kernels:
                found += [kernel, (kernel[-1],), (kernel[-1],)]
            inputs = 4 * width
    return [*found, (2048, 1000), (1000,)]


def stateful(make, dtype=jnp.float32):
    """The `stateless_apply` of an optimizer."""
    kinds = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes()]
    variables = [gs.optimizers.Variable(kind, name=f"v{i}") for i, kind in enumerate(kinds)]
    opt = make()
    opt.build(variables)
    state = [jax.ShapeDtypeStruct(variable.shape, variable.dtype) for variable in opt.variables]
    step = jax.jit(lambda w, s, g: opt.stateless_apply(s, g, w), donate_argnums=(0, 1))
    return step.lower(kinds, state, kinds)


def functional(tx):
    """A step of an optax transformation."""
    kinds = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes()]
    state = jax.eval_shape(tx.init, kinds)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1)).lower(kinds, state, kinds)


def network(params, x):
    """A loss with a product, a normalisation and a softmax in each of two layers."""
    for layer in params:
        h = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        x = x + jax.nn.softmax(h @ layer["up"]) @ layer["down"] + layer["bias"]
    return jnp.mean(x**2)


def of_network():
    """The state of a network before the first step."""
    layer = {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64)), "bias": jnp.ones(64)}
    return gs.TrainState.create([layer, layer], optax.adam(1e-3))


def trained(dtype=None, **options):
    """The `train_step` of a network, in a dtype."""
    loss_fn = network if dtype is None else gs.autocast(network, dtype)
    return gs.train_step(loss_fn, **options).lower(of_network(), jnp.ones((32, 64)))


def in_halves():
    """A step of `value_and_grad` and `apply_gradients`."""

    def step(state, x):
        loss, extra, grads = state.value_and_grad(gs.autocast(network))(x)
        return state.apply_gradients(grads, extra, loss=loss), loss

    return jax.jit(step).lower(of_network(), jnp.ones((32, 64)))


def scaled(inner, **options):
    """A wrapped optimizer, to be made later."""
    return lambda: gs.optimizers.LossScaleOptimizer(inner(), **options)


def adam(**options):
    """An Adam, to be made later."""
    return lambda: gs.optimizers.Adam(1e-3, **options)


CLIPPED = {"global_clipnorm": 1.0, "use_ema": True, "weight_decay": 0.01}
WINDOW = {"gradient_accumulation_steps": 4, "clipnorm": 1.0}
ADAPTIVE = {"loss_scale": gs.AdaptiveLossScale(), "telemetry": True, "underflow_every": 10}
PROGRAMS = {
    "sgd": lambda: stateful(lambda: SGD(0.1, 0.9)),
    "adam": lambda: stateful(adam()),
    "scaled sgd": lambda: stateful(scaled(lambda: SGD(0.1, 0.9))),
    "scaled adam": lambda: stateful(scaled(adam())),
    "fixed scale": lambda: stateful(scaled(adam(), initial_scale=8.0, dynamic=False)),
    "factor": lambda: stateful(adam(loss_scale_factor=8.0)),
    "options": lambda: stateful(scaled(adam(**CLIPPED))),
    "clipped parts": lambda: stateful(scaled(adam(clipnorm=1.0))),
    "window": lambda: stateful(scaled(adam(**WINDOW))),
    "masters": lambda: stateful(scaled(adam(master_weights=True)), jnp.float16),
    "adaptive": lambda: stateful(scaled(adam(), **ADAPTIVE)),
    "optax": lambda: functional(gs.with_loss_scale(optax.adam(1e-3))),
    "optax telemetry": lambda: functional(gs.with_loss_scale(optax.adam(1e-3), telemetry=True)),
    "float32 step": trained,
    "float16 step": lambda: trained("float16"),
    "bfloat16 step": lambda: trained("bfloat16"),
    "retries": lambda: trained("float16", retries=True),
    "microbatches": lambda: trained("float16", microbatches=4),
    "step in halves": in_halves,
}
PLAIN = {
    "sgd in optax": lambda: functional(optax.sgd(0.1, 0.9)),
    "adam in optax": lambda: functional(optax.adam(1e-3)),
}


def described(lowered):
    """What compiling a program takes, and what comes of it."""
    start = time.process_time()
    compiled = lowered.compile()
    seconds = time.process_time() - start
    conditionals = compiled.as_text().count(" conditional(")
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return f"{conditionals:3} conditionals {temporary:11,} bytes {seconds:6.2f} s"


def main():
    """Writes and compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("before", type=Path, nargs="?")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    changed = 0
    for name, make in (PROGRAMS | (PLAIN if args.compile else {})).items():
        if args.only not in name:
            continue
        lowered = make()
        text = lowered.as_text()
        path = args.folder / f"{name}.mlir"
        path.write_text(text)
        words = f"{name:16} {text.count(chr(10)):6} lines"
        if args.compile:
            words += f" {described(lowered)}"
        if args.before:
            same = (args.before / path.name).read_text() == text
            changed += not same
            words += " same" if same else " CHANGED"
        print(words, flush=True)
    raise SystemExit(1 if changed else 0)


if __name__ == "__main__":
    main()
