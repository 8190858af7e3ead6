"""cuDNN's fused attention on a CPU: JAX's own calls, checks and derivatives, computed by XLA.

As the real kernel it takes float16 and bfloat16 only, and says so with a KeyError when it is
lowered. `dtypes_of_calls` reads the program that JAX lowers for a GPU.
"""

import re

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.interpreters import mlir

HALF = jnp.float16, jnp.bfloat16


def _attention(q, k, v, bias, scale, mask_type, has_bias):
    wide = jnp.float32
    logits = jnp.einsum("btnh,bsnh->bnts", q.astype(wide), k.astype(wide)) * scale
    if has_bias:
        logits = logits + bias.astype(wide)
    if mask_type == fused.MaskType.CAUSAL:
        logits = jnp.where(jnp.tril(jnp.ones(logits.shape[2:], bool)), logits, -jnp.inf)
    weights = jax.nn.softmax(logits, axis=-1).astype(q.dtype)
    out = jnp.einsum("bnts,bsnh->btnh", weights.astype(wide), v.astype(wide))
    return out.astype(q.dtype), jax.nn.logsumexp(logits, axis=-1)


def _forward(q, k, v, bias, *_, scale, mask_type, variadic_args, is_training, **__):
    if q.dtype not in HALF:
        raise KeyError(str(q.dtype))
    found = _attention(q, k, v, bias, scale, mask_type, variadic_args[0])
    return found if is_training else found[:1]


def _backward(q, k, v, bias, *others, scale, mask_type, variadic_args, **_):
    if q.dtype not in HALF:
        raise KeyError(str(q.dtype))

    def attention(*xs):
        return _attention(*xs, scale, mask_type, variadic_args[0])[0]

    grads = jax.vjp(attention, q, k, v, bias)[1](others[-1])
    return grads if variadic_args[1] else grads[:3]


def use(monkeypatch):
    """Lets `jax.nn.dot_product_attention(implementation="cudnn")` run on a CPU."""
    around = fused._dot_product_attention_fwd_p_wrapper, fused._dot_product_attention_bwd_p_wrapper
    parts = {
        fused._dot_product_attention_fwd_p: _forward,
        fused._dot_product_attention_bwd_p: _backward,
        **{primitive: primitive.impl for primitive in around},
    }
    for primitive, function in parts.items():
        rule = mlir.lower_fun(function, multiple_results=True)
        mlir.register_lowering(primitive, rule, platform="cpu")
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused, "check_compute_capability", lambda *_: True)
    monkeypatch.setattr(fused, "is_cuda_compute_capability_equal", lambda *_: False)


def dtypes_of_calls(fun, *args):
    """The dtypes of the first three operands of each call of cuDNN in a program for a GPU."""
    text = jax.jit(fun).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"custom_call @__cudnn\S+?\(.*?\) .*?: \((.*?)\) ->", text)
    return [re.findall(r"x([a-z]+\d+)>", call)[:3] for call in calls]
