"""Tunix in float16: one call before `train`.

    pip install ".[flax]" google-tunix  # tested with google-tunix 0.1.7
    python examples/tunix_float16.py    # about 1 minute on 2 CPU cores

Tunix's trainers take any optax transformation, but compute the gradients themselves. `in_float16`
makes a trainer scale the loss; copy it and `empty_accumulators` into your project. It works with
and without LoRA and, for RL, with the trainer of a cluster:

    in_float16(rl_cluster.actor_trainer)  # has `actor_optimizer=gs.loss_scaled(...)`
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import gainstage as gs

VOCABULARY, LENGTH, BATCH, STEPS = 32, 16, 8, 60


def in_float16(trainer):
    """Makes a Tunix trainer differentiate the scaled loss; returns it.

    Args:
        trainer: a `PeftTrainer` or a subclass, whose optimizer is one of `gs.loss_scaled`.
    """

    def train_step(model, optimizer, inputs):
        inputs = trainer.gen_model_input_fn(inputs)
        differentiate = gs.value_and_grad(  # Tunix has nnx.value_and_grad
            trainer.loss_fn,
            optimizer.opt_state,
            argnums=nnx.DiffState(0, optimizer.wrt),
            has_aux=trainer._has_aux,
        )
        out, grads = differentiate(model, **inputs)
        optimizer.update(model, grads)
        empty_accumulators(optimizer.opt_state)
        loss, aux = out if trainer._has_aux else (out, None)
        return loss, aux, optax.tree.norm(grads)

    trainer.create_train_step_fn = lambda: train_step
    trainer.clear_jit_cache()
    return trainer


def empty_accumulators(opt_state):
    """Empties those of `gradient_accumulation_steps` at the end of a window.

    Tunix uses `optax.MultiSteps`, which multiplies them by 0: a NaN would stay (optax 0.2.8).
    """
    if isinstance(opt_state, optax.MultiStepsState):
        totals = jax.tree.leaves(opt_state.acc_grads, is_leaf=lambda x: isinstance(x, nnx.Variable))
        for total in totals:
            total[...] = jnp.where(opt_state.mini_step[...] == 0, 0, total[...])


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
    """Trains, and prints losses and telemetry."""
    from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    rule = gs.DynamicLossScale(2.0**24, min_scale=1.0)  # too high: the first steps overflow
    config = TrainingConfig(
        eval_every_n_steps=STEPS, max_steps=STEPS, gradient_accumulation_steps=2
    )
    trainer = PeftTrainer(make_model(), gs.loss_scaled(chain, rule, telemetry=True), config)
    in_float16(trainer).with_gen_model_input_fn(model_input)
    trainer.train(make_batches(2 * STEPS))
    losses = trainer.metrics_logger.get_metric_history("", "loss", "train")
    info = gs.telemetry(trainer.optimizer.opt_state)
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {STEPS} steps")
    print(f"scale 2**{np.log2(info.loss_scale):.0f}, {info.skipped_steps} steps skipped")


if __name__ == "__main__":
    main()
