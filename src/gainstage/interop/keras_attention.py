"""Keras's attention with a fused kernel under autocast, where a float32 model would get none."""

# Keras is not typed.
# pyright: reportCallIssue=false

import functools
from typing import Any

import jax

from gainstage.interop.keras_backend import keras
from gainstage.precision.half_only import half_only


@functools.cache  # once for each process
def use_fused_attention() -> None:
    """Lets Keras choose its kernel of attention by half precision under autocast.

    `keras.ops.dot_product_attention`, and so each layer of attention, takes a fused kernel if its
    arrays are in half precision, which those of a float32 model are not. Without autocast, and on a
    CPU, all stays as it is.
    """
    plain = keras.src.backend.nn.dot_product_attention  # no public name of Keras reaches all layers
    fused = half_only(plain)

    @functools.wraps(plain)
    def attention(*args: Any, **kwargs: Any) -> Any:
        # A CPU has no such kernel, and XLA cannot differentiate attention in float16 there.
        return (plain if jax.default_backend() == "cpu" else fused)(*args, **kwargs)

    keras.src.backend.nn.dot_product_attention = attention
