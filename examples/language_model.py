"""A language model: Flax NNX, in float16, bfloat16 or float32, on one device or on a mesh.

    pip install ".[flax,report]"
    python examples/language_model.py --quick  # less than a minute
    python examples/language_model.py          # about 7 minutes on a CPU core
    python examples/language_model.py --dtype float32  # to compare

It learns to write Python, byte by byte, from the modules of Python's own standard library. Kill it
at any moment: the same command goes on from the last state that was saved. To try a mesh on one
machine, set XLA_FLAGS=--xla_force_host_platform_device_count=8.
"""

import argparse
import hashlib
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as Spec

import gainstage as gs
from gainstage.diagnostics import JsonLines, StepRecorder

RULE = gs.DynamicLossScale(2.0**20, increment_period=100, min_scale=1.0)


class Settings(NamedTuple):
    """The sizes of the model and of the run; a step is one microbatch."""

    width: int = 128
    layers: int = 6
    heads: int = 4
    context: int = 128
    batch: int = 16
    accumulate: int = 2  # microbatches in an update
    steps: int = 600
    rate: float = 3e-3
    decay: float = 0.98  # of the moving average
    every: int = 50  # steps from one saved state to the next
    sample: int = 400  # bytes of text to write at the end


QUICK = Settings(32, 1, 2, 64, 8, steps=40, rate=1e-2, decay=0.8, every=10, sample=80)


class Block(nnx.Module):
    """Causal self-attention and a feed-forward network."""

    def __init__(self, width, heads, rngs):
        def linear(inputs, outputs):
            return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)

        self.heads = heads
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(2)])
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = x + self.dropout(self.attend(self.norms[0](x)))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norms[1](x)))))

    def attend(self, x):
        q, k, v = jnp.moveaxis(self.qkv(x).reshape(*x.shape[:2], 3, self.heads, -1), 2, 0)
        return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))


class LanguageModel(nnx.Module):
    """Bytes to the logits of the next byte."""

    def __init__(self, settings, rngs):
        width, heads = settings.width, settings.heads
        self.embed = nnx.Embed(128, width, rngs=rngs)
        self.place = nnx.Embed(settings.context, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(settings.layers)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.place(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def make_model(settings=Settings()):  # noqa: B008 - a NamedTuple does not change
    """A new model; `gainstage xray --like language_model:make_model` calls it too."""
    return LanguageModel(settings, nnx.Rngs(0))


def loss_fn(model, tokens):
    """The mean cross-entropy of each next byte, in nats."""
    logits = model(tokens[:, :-1])
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


half = gs.autocast(
    loss_fn, "float16"
)  # `gainstage xray --loss language_model:half` computes it too


class Average(NamedTuple):
    """The state of `keep_average`."""

    average: Any


def keep_average(decay):
    """Keeps a moving average of the weights; a skipped step skips it too."""

    def update(updates, state, params):
        new = optax.apply_updates(params, updates)
        return updates, Average(optax.incremental_update(new, state.average, 1 - decay))

    return optax.GradientTransformation(lambda p: Average(jax.tree.map(jnp.copy, p)), update)


def make_optimizer(settings):
    """Clips, updates and averages at the end of a window of microbatches."""
    updates = settings.steps // settings.accumulate
    rate = optax.warmup_cosine_decay_schedule(0, settings.rate, updates // 10, updates)
    adamw = optax.adamw(rate, weight_decay=0.1)
    chain = optax.chain(optax.clip_by_global_norm(1.0), adamw, keep_average(settings.decay))
    return optax.MultiSteps(chain, settings.accumulate)


def read_texts():
    """ASCII bytes of the standard library's modules: those to learn, and every 20th held out."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    texts = [np.frombuffer(file.read_bytes(), np.uint8) for file in files]
    learned = [text for n, text in enumerate(texts) if n % 20]
    return [(joined := np.concatenate(part))[joined < 128] for part in (learned, texts[::20])]


def draw(text, settings, step):
    """The microbatch of a step. The step is the seed, and so the position in the data."""
    starts = np.random.default_rng(step).integers(len(text) - settings.context, size=settings.batch)
    return text[starts[:, None] + np.arange(settings.context + 1)].astype(np.int32)


def averaged(state):
    """The model with the averages of its weights, and without dropout."""
    model = nnx.clone(state.params)
    nnx.update(model, optax.tree_utils.tree_get(state.opt_state, "average"))
    model.eval()
    return model


@jax.jit
def validate(model, batches):
    """The mean loss of several batches."""
    return jnp.mean(jax.lax.map(lambda tokens: loss_fn(model, tokens), batches))


def write_text(model, prompt, length):
    """What the model writes after the prompt, which is as long as its context."""
    text, rng = list(prompt), np.random.default_rng(0)
    next_logits = jax.jit(lambda model, window: model(window[None])[0, -1])
    for _ in range(length):
        logits = next_logits(model, np.array(text[-len(prompt) :], np.int32))
        text.append(int(np.argmax(logits / 0.7 + rng.gumbel(size=logits.shape))))
    return bytes(text[len(prompt) :]).decode()


def checksum(state):
    """Digits that are equal if all bits of two states are; dropout keys never change."""
    leaves = jax.tree.leaves(state)
    arrays = [x for x in leaves if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in arrays)).hexdigest()[:12]


def begin(settings, saved, everywhere):
    """The state, which checks every microbatch, from the file if there is one, and the number of
    its step."""
    model, tx = jax.device_put(make_model(settings), everywhere), make_optimizer(settings)
    state = gs.TrainState.create(model, tx, loss_scale=RULE, telemetry=True)
    if not saved.exists():
        return state, 0
    state = gs.load(saved, state)
    done = int(state.step + state.info.skipped_steps)
    print(f"restored step {done}: state {checksum(state)}", flush=True)
    return state, done


def train(settings, folder, devices, dtype):
    """Trains to the end; returns the model with averaged weights."""
    mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)
    everywhere, divided = NamedSharding(mesh, Spec()), NamedSharding(mesh, Spec("data"))
    folder.mkdir(parents=True, exist_ok=True)
    saved = folder / "state.safetensors"
    state, done = begin(settings, saved, everywhere)
    step = gs.train_step(half if dtype == "float16" else gs.autocast(loss_fn, dtype))
    text, held_out = read_texts()
    unseen = np.stack([draw(held_out, settings, n) for n in range(8)])
    recorder, began = StepRecorder(folder / "bad.safetensors", keep=3), time.perf_counter()
    params = nnx.state(state.params, nnx.Param)
    with JsonLines(folder / "run.jsonl", rule=RULE, params=params) as record:
        for n in range(done + 1, settings.steps + 1):
            tokens = jax.device_put(draw(text, settings, n), divided)
            state, loss = step(state, tokens)
            info = jax.device_get(state.info)
            record.write(n, info, loss=loss)
            recorder.write(n, info, state.params, tokens)
            if n % settings.every == 0:
                record.flush()
                gs.save(saved, state)
                speed = settings.every * tokens[:, 1:].size / (time.perf_counter() - began)
                print(
                    f"step {n}: loss {loss:.3g}, scale {info.loss_scale:g}, {info.skipped_steps} "
                    f"skipped, {speed:.0f} tokens/s, "
                    f"validation {validate(averaged(state), unseen):.3f}, "
                    f"state {checksum(state)}",
                    flush=True,
                )
                began = time.perf_counter()
    return averaged(state)


def main():
    """Reads the command line, trains, and writes some text."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model, less than a minute")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16")
    parser.add_argument("--devices", type=int, help="how many devices to use (default: all)")
    parser.add_argument("--folder", type=Path, help="for states, telemetry and bad steps")
    options = parser.parse_args()
    settings = QUICK if options.quick else Settings()
    name = "language_model_quick" if options.quick else "language_model"
    folder = options.folder or Path("runs", name)
    devices = jax.devices()[: options.devices]
    model = train(settings, folder.absolute(), devices, options.dtype)
    prompt = bytes(read_texts()[1][: settings.context])
    print(f"{prompt.decode()}|{write_text(model, prompt, settings.sample)}")


if __name__ == "__main__":
    main()
