"""GRPO in float16: a sampler, a trainer, and how far the two disagree in each step.

    python examples/grpo.py --quick           # less than a minute
    python examples/grpo.py                   # a few minutes on 2 CPU cores
    python examples/grpo.py --dtype bfloat16  # the same in bfloat16, or in float32

A transformer of 0.1 million parameters learns to sort six digits: first from solved problems (SFT),
then from rewards alone (GRPO). The sampler draws answers token by token with a KV cache. The
trainer scores the same tokens in one forward pass. Both compute in the same dtype from the same
float32 weights, but round differently: `mismatch` measures by how much.
"""

import argparse
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gainstage as gs

DIGITS, HEADS = 6, 4  # of a problem; of the attention
START, SORT, VOCABULARY = 10, 11, 12  # the tokens beside the digits
GIVEN, LENGTH = DIGITS + 2, 2 * DIGITS + 2  # a row is START, digits, SORT, sorted digits
FULL = jnp.float32


class Settings(NamedTuple):
    """The sizes of the network and of the run."""

    width: int = 64
    layers: int = 2
    sft_steps: int = 90
    sft_batch: int = 64
    steps: int = 150
    prompts: int = 16  # in a step of GRPO
    answers: int = 16  # to each prompt: a group, whose rewards are compared
    every: int = 25  # steps from one line of output to the next


QUICK = Settings(width=32, layers=1, sft_steps=90, steps=10, prompts=8, answers=8, every=10)


def init(settings, seed):
    """The parameters, in float32."""
    rng, width = np.random.default_rng(seed), settings.width

    def matrix(rows, columns, scale=1.0):
        return jnp.asarray(rng.normal(size=(rows, columns)) * scale * rows**-0.5, FULL)

    def layer():
        return {
            "norms": jnp.ones((2, width)),
            "qkv": matrix(width, 3 * width),
            "out": matrix(width, width, 0.5),
            "up": matrix(width, 4 * width),
            "down": matrix(4 * width, width, 0.5),
        }

    return {
        "tokens": matrix(VOCABULARY, width, 0.3),
        "places": matrix(LENGTH, width, 0.3),
        "layers": [layer() for _ in range(settings.layers)],
        "norm": jnp.ones(width),
        "head": matrix(width, VOCABULARY),
    }


def normed(x, weight):
    """Root-mean-square normalisation, in float32."""
    wide = x.astype(FULL)
    return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * weight


def run_layer(layer, x, mask, cache=None, place=0):
    """A layer on all tokens, or on the one at `place`, whose keys and values go into the cache."""
    shape = (*x.shape[:2], HEADS, -1)
    qkv = jnp.split(normed(x, layer["norms"][0]) @ layer["qkv"], 3, axis=-1)
    q, k, v = (part.reshape(shape) for part in qkv)
    if cache is not None:
        k, v = cache[0].at[:, place].set(k[:, 0]), cache[1].at[:, place].set(v[:, 0])
    # jax.nn.dot_product_attention cannot be differentiated in float16 on a CPU (jax 0.10.2).
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=FULL)
    weights = jax.nn.softmax(jnp.where(mask, scores * q.shape[-1] ** -0.5, -1e30)).astype(x.dtype)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ layer["out"]
    hidden = jax.nn.gelu(normed(x, layer["norms"][1]) @ layer["up"])
    return x + hidden @ layer["down"], (k, v)


def log_softmax(params, x):
    """Log-probabilities of the next token, in float32."""
    return jax.nn.log_softmax((normed(x, params["norm"]) @ params["head"]).astype(FULL))


def cast(params, dtype):
    """The parameters in the dtype to compute in."""
    return jax.tree.map(lambda p: p.astype(dtype), params)


def score(params, tokens, dtype):
    """The trainer: log-probabilities of the answers, in one forward pass."""
    params = cast(params, dtype)
    x = params["tokens"][tokens[:, :-1]] + params["places"][: LENGTH - 1]
    for layer in params["layers"]:
        x, _ = run_layer(layer, x, jnp.tri(LENGTH - 1, dtype=bool))
    logp = log_softmax(params, x[:, GIVEN - 1 :])
    return jnp.take_along_axis(logp, tokens[:, GIVEN:, None], axis=-1)[..., 0]


@functools.partial(jax.jit, static_argnames="dtype")
def sample(params, prompts, key, dtype):
    """The sampler: draws an answer to each prompt; returns all tokens, and their log-probabilities.

    Both are of the shape that `score` takes and returns.
    """
    params, batch = cast(params, dtype), len(prompts)
    empty = jnp.zeros((batch, LENGTH, HEADS, params["norm"].size // HEADS), dtype)

    def step(carry, place):
        tokens, caches, key = carry
        x = (params["tokens"][tokens[:, place]] + params["places"][place])[:, None]
        new = []
        for layer, cache in zip(params["layers"], caches, strict=True):
            x, cache = run_layer(layer, x, jnp.arange(LENGTH) <= place, cache, place)
            new.append(cache)
        key, draw = jax.random.split(key)
        logp = log_softmax(params, x[:, 0])
        drawn = jax.random.categorical(draw, logp)
        token = jnp.where(place + 1 < GIVEN, tokens[:, place + 1], drawn)
        chosen = jnp.take_along_axis(logp, token[:, None], axis=-1)[:, 0]
        return (tokens.at[:, place + 1].set(token), new, key), chosen

    tokens = jnp.pad(prompts, ((0, 0), (0, DIGITS)))
    caches = [(empty, empty) for _ in params["layers"]]
    (tokens, _, _), logp = jax.lax.scan(step, (tokens, caches, key), jnp.arange(LENGTH - 1))
    return tokens, logp.T[:, GIVEN - 1 :]


def problems(rng, count):
    """Prompts and their answers."""
    digits = rng.integers(10, size=(count, DIGITS), dtype=np.int32)
    first, last = (np.full((count, 1), token, np.int32) for token in (START, SORT))
    return np.concatenate([first, digits, last], axis=1), np.sort(digits, axis=1)


def rewards(tokens, answers):
    """1 for each right answer, and 0 for each wrong one."""
    return np.float32((np.asarray(tokens)[:, GIVEN:] == answers).all(axis=1))


def sft_loss(dtype, params, tokens):
    """The cross-entropy of the right answers."""
    return -score(params, tokens, dtype).mean()


def mismatch(sampled, logp):
    """How far the trainer disagrees with the sampler: the mean difference of log-probabilities, and
    an estimate of the KL divergence that is never negative (Schulman, 2020)."""
    x = logp - sampled
    k3 = jnp.where(
        jnp.abs(x) < 0.01, x * x / 2, jnp.expm1(x) - x
    )  # near 0 all digits would be lost
    return {"mean_abs_diff": jnp.abs(x).mean(), "k3": k3.mean()}


def grpo_loss(dtype, params, tokens, sampled, advantages):
    """The clipped loss of a policy gradient, and how far the trainer disagrees with the sampler."""
    logp = score(params, tokens, dtype)
    ratio, advantages = jnp.exp(logp - sampled), advantages[:, None]
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
    return -gain.mean(), mismatch(sampled, logp)


def create_state(params, rate):
    """Clips and updates true gradients in float32; skips a step that overflowed."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95))
    return gs.TrainState.create(params, tx, telemetry=True)


def supervise(settings, params, dtype, rng):
    """Learns from solved problems, and prints the reward of what the sampler draws."""
    step, state = gs.train_step(functools.partial(sft_loss, dtype)), create_state(params, 3e-3)
    for n in range(1, settings.sft_steps + 1):
        tokens = np.concatenate(problems(rng, settings.sft_batch), axis=1)
        state, _ = step(state, tokens)
        if n == 1 or n % 30 == 0:
            prompts, answers = problems(rng, settings.prompts * settings.answers)
            tokens, _ = sample(state.params, prompts, jax.random.key(n), dtype)
            print(f"SFT {n}: reward {rewards(tokens, answers).mean():.3f}", flush=True)
    return state.params


def reinforce(settings, params, dtype, rng):
    """Learns from rewards; prints means since the last line, and the telemetry of the last step."""
    step = gs.train_step(functools.partial(grpo_loss, dtype), has_aux=True)
    state, seen = create_state(params, 3e-4), []
    for n in range(1, settings.steps + 1):
        prompts, answers = (
            np.repeat(x, settings.answers, axis=0) for x in problems(rng, settings.prompts)
        )
        tokens, sampled = sample(state.params, prompts, jax.random.key(n), dtype)
        reward = rewards(tokens, answers).reshape(settings.prompts, settings.answers)
        mean, spread = reward.mean(axis=1, keepdims=True), reward.std(axis=1, keepdims=True)
        advantages = ((reward - mean) / (spread + 1e-4)).ravel()
        state, _, found = step(state, tokens, sampled, advantages)
        seen.append((reward.mean(), found["mean_abs_diff"], found["k3"]))
        if n % settings.every == 0:
            info, (gained, apart, k3) = state.info, np.mean(jax.device_get(seen), 0)
            print(
                f"GRPO {n}: reward {gained:.3f}, mean |dlogp| {apart:.1e}, k3 KL {k3:.1e}, "
                f"scale 2**{np.log2(info.loss_scale):.0f}, {info.skipped_steps} steps skipped",
                flush=True,
            )
            seen.clear()
    return state.params


def main(words=None):
    """Reads the command line and trains; returns the parameters after SFT, and at the end."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small network, less than a minute")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(words)
    settings, rng = QUICK if options.quick else Settings(), np.random.default_rng(options.seed)
    supervised = supervise(settings, init(settings, options.seed), options.dtype, rng)
    kept = jax.tree.map(jnp.copy, supervised)  # a train step reuses the memory of its arguments
    return kept, reinforce(settings, supervised, options.dtype, rng)


if __name__ == "__main__":
    main()
