"""Backbones of keras-hub in float16 through `fit`: under autocast, and by Keras's own policy.

pip install ".[keras]" keras-hub
KERAS_BACKEND=jax python examples/keras_hub_backbones.py
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import warnings

import keras
import keras_hub
import numpy as np

from gainstage.interop.keras import autocast

POLICY = "mixed_float16"
SIZES = {"num_layers": 2, "hidden_dim": 32}
TEXT = {"vocabulary_size": 50, "intermediate_dim": 64, **SIZES}
HEADS = {"num_query_heads": 2, "num_key_value_heads": 1}
IMAGES = {"image_shape": (16, 16, 3), "patch_size": (4, 4), "mlp_dim": 64}
BACKBONES = {
    "T5": {**TEXT, "num_heads": 2},
    "Llama": {**TEXT, **HEADS},
    "ViT": {**SIZES, **IMAGES, "num_heads": 2},
    "Gemma": {**TEXT, **HEADS, "head_dim": 16},
    "Bert": {**TEXT, "num_heads": 2, "max_sequence_length": 16},
    "GPT2": {**TEXT, "num_heads": 2, "max_sequence_length": 16},
}


def classifier(name):
    """A small model with random weights, its inputs and its targets."""
    keras.utils.set_random_seed(0)
    backbone = getattr(keras_hub.models, f"{name}Backbone")(**BACKBONES[name])
    draw = np.random.default_rng(0)
    tokens = draw.integers(1, 50, (256, 16))
    targets = tokens[:, :1] % 2
    if name == "ViT":
        inputs = draw.normal(size=(256, 16, 16, 3)).astype(np.float32)
        targets = inputs.mean((1, 2, 3))[:, None] > 0
    else:
        ones = np.ones_like(tokens)
        inputs = {key: ones if "mask" in key else tokens for key in backbone.input}
        inputs |= {"segment_ids": 0 * ones} if "segment_ids" in inputs else {}
    states = backbone.output
    if isinstance(states, dict):
        states = states.get("sequence_output", states.get("decoder_sequence_output"))
    pooled = keras.layers.GlobalAveragePooling1D()(states)
    outputs = keras.layers.Dense(1, dtype="float32")(pooled)
    return keras.Model(backbone.input, outputs), inputs, targets.astype(np.float32)


def train(name, how):
    """The loss after three epochs, or the error."""
    keras.config.set_dtype_policy(POLICY if how == POLICY else "float32")
    try:
        model, inputs, targets = classifier(name)
        model = autocast(model) if how == "autocast" else model
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-3), loss)
        return model.fit(inputs, targets, epochs=3, verbose=0, shuffle=False).history["loss"][-1]
    except ValueError as error:
        return str(error).strip().splitlines()[0]
    finally:
        keras.config.set_dtype_policy("float32")


def main():
    """Prints a row for each backbone."""
    print(f"{'':8}{'float32':>9}{'autocast':>10}  mixed_float16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of keras-hub
        for name in BACKBONES:
            exact, half, policy = (train(name, how) for how in ("float32", "autocast", POLICY))
            policy = policy if isinstance(policy, str) else f"{policy:.4f}"
            print(f"{name:8}{exact:9.4f}{half:10.4f}  {policy}", flush=True)


if __name__ == "__main__":
    main()
