"""Tunix in float16: one call before `train`.

    pip install ".[flax]" google-tunix  # tested with google-tunix 0.1.7
    python examples/tunix_float16.py    # about 1 minute on 2 CPU cores

Tunix's trainers take any optax transformation and any loss, but compute the gradients themselves.
So the loss scales its own gradients.
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import gainstage as gs

VOCABULARY, LENGTH, BATCH, STEPS = 32, 16, 8, 60


def make_model():
    """A small Qwen3 with float32 weights that computes in float16."""
    from tunix.models.qwen3 import model as qwen3

    # Tunix masks with -2.4e38, which is -inf in float16: rows of padding alone become NaN.
    qwen3.K_MASK = float(jnp.finfo(jnp.float16).min)
    config = qwen3.ModelConfig(
        num_layers=2, vocab_size=VOCABULARY, embed_dim=32, hidden_dim=64, num_heads=2, head_dim=16,
        num_kv_heads=1, rope_theta=10_000, norm_eps=1e-6,
        dtype=jnp.float16, param_dtype=jnp.float32,
    )  # fmt: skip
    return qwen3.Qwen3(config, rngs=nnx.Rngs(0))


def make_batches(count):
    """Sequences that count in steps of 1, 2 or 3, behind two places of padding."""
    from tunix.sft.peft_trainer import TrainingInput

    rng = np.random.default_rng(0)
    for _ in range(count):
        first = rng.integers(VOCABULARY, size=(BATCH, 1))
        tokens = (first + rng.integers(1, 4, size=(BATCH, 1)) * np.arange(LENGTH)) % VOCABULARY
        mask = np.broadcast_to(np.arange(LENGTH) >= 2, tokens.shape)
        yield TrainingInput(input_tokens=tokens, input_mask=mask)


def model_input(batch):
    """What Tunix's loss of a language model takes."""
    from tunix.sft import utils

    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": utils.build_positions_from_mask(batch.input_mask),
        "attention_mask": utils.make_causal_attn_mask(batch.input_mask),
    }


def main():
    """Trains, and prints losses."""
    from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    config = TrainingConfig(
        eval_every_n_steps=STEPS, max_steps=STEPS, gradient_accumulation_steps=2
    )
    trainer = PeftTrainer(make_model(), tx, config).with_gen_model_input_fn(model_input)
    trainer.with_loss_fn(gs.autocast(trainer.loss_fn, loss_scale=2.0**15))
    trainer.train(make_batches(2 * STEPS))
    losses = trainer.metrics_logger.get_metric_history("", "loss", "train")
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {STEPS} steps")


if __name__ == "__main__":
    main()
