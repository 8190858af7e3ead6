"""A language model's train step in JAX and in PyTorch: what a GPU is measured with.

The decoder is that of GPT-2, with a head of its own. In JAX it is float32 code, as a user of
`gs.autocast` writes it, or casts by hand; attention is written out for XLA, or cuDNN's kernel. In
PyTorch it is the same under `torch.autocast`, with its own attention and fused AdamW, compiled.
`python -m benchmarks.language_model '[WIDTH, BLOCKS, BATCH, LENGTH, LETTERS]' NAME ...` is
PyTorch's turn, in a process of its own; nothing it runs imports jax.
"""

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

RATE, DECAY, CLIP = 1e-4, 0.01, 1.0  # AdamW, and the largest global norm
TORCH_FLOAT16 = "torch.autocast float16, GradScaler"
TORCH_BFLOAT16, TORCH_TF32 = "torch.autocast bfloat16", "torch, TF32"


class Sizes(NamedTuple):
    """How large the model is, and its batch."""

    width: int
    blocks: int
    batch: int
    length: int = 1024
    letters: int = 32768

    @property
    def heads(self) -> int:
        """Heads of 64 numbers, or one."""
        return max(self.width // 64, 1)

    @property
    def tokens(self) -> int:
        """What a step is trained on."""
        return self.batch * self.length

    @property
    def title(self) -> str:
        """All of it in one line."""
        return f"width {self.width}, {self.blocks} blocks, {self.batch} x {self.length} tokens"


def first_weights(sizes: Sizes) -> dict[str, Any]:
    """The weights that both libraries begin with, in float32 of numpy."""
    import numpy as np

    rng, width = np.random.default_rng(0), sizes.width

    def dense(inputs: int, outputs: int) -> Any:
        return rng.standard_normal((inputs, outputs), np.float32) / np.float32(math.sqrt(inputs))

    def norm() -> dict[str, Any]:
        return {"scale": np.ones(width, np.float32), "shift": np.zeros(width, np.float32)}

    def layer(inputs: int, outputs: int) -> dict[str, Any]:
        return {"kernel": dense(inputs, outputs), "bias": np.zeros(outputs, np.float32)}

    blocks = [
        {
            "norms": (norm(), norm()),
            "qkv": layer(width, 3 * width),
            "out": layer(width, width),
            "up": layer(width, 4 * width),
            "down": layer(4 * width, width),
        }
        for _ in range(sizes.blocks)
    ]
    letters, places = dense(sizes.letters, width), dense(sizes.length, width)
    head = dense(width, sizes.letters)
    return {"letters": letters, "places": places, "blocks": blocks, "norm": norm(), "head": head}


def first_tokens(sizes: Sizes) -> Any:
    """The batch of both: each place predicts the next."""
    import numpy as np

    shape = (sizes.batch, sizes.length + 1)
    return np.random.default_rng(1).integers(sizes.letters, size=shape)


# ── JAX ──────────────────────────────────────────────────────────────────────────────────────


def parameters(sizes: Sizes) -> dict[str, Any]:
    """The first weights."""
    import jax
    import jax.numpy as jnp

    found: dict[str, Any] = jax.tree.map(jnp.asarray, first_weights(sizes))
    return found


def tokens(sizes: Sizes) -> Any:
    """The batch."""
    import jax.numpy as jnp

    return jnp.asarray(first_tokens(sizes))


def loss(
    sizes: Sizes, attend: Callable[..., Any], params: Any, ids: Any, *, dtype: Any = None
) -> Any:
    """The mean cross entropy.

    Args:
        sizes: of the model.
        attend: `(q, k, v) -> y`.
        params: the weights.
        ids: the batch.
        dtype: what to cast to by hand; by default nothing is cast.
    """
    import jax
    import jax.numpy as jnp
    import optax

    def cast(x: Any) -> Any:
        return x if dtype is None else x.astype(dtype)

    def linear(own: Any, x: Any) -> Any:
        return x @ cast(own["kernel"]) + cast(own["bias"])

    def normed(own: Any, x: Any) -> Any:
        wide = x.astype(jnp.float32)
        mean = wide.mean(-1, keepdims=True)
        root = jax.lax.rsqrt(jnp.square(wide - mean).mean(-1, keepdims=True) + 1e-5)
        return ((wide - mean) * root * own["scale"] + own["shift"]).astype(x.dtype)

    inputs, targets = ids[:, :-1], ids[:, 1:]
    x = cast(params["letters"])[inputs] + cast(params["places"])
    for block in params["blocks"]:
        first, second = block["norms"]
        parts = jnp.split(linear(block["qkv"], normed(first, x)), 3, axis=-1)
        q, k, v = (part.reshape(*x.shape[:2], sizes.heads, -1) for part in parts)
        x = x + linear(block["out"], attend(q, k, v).reshape(x.shape))
        x = x + linear(block["down"], jax.nn.gelu(linear(block["up"], normed(second, x))))
    logits = (normed(params["norm"], x) @ cast(params["head"])).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def variants(sizes: Sizes) -> dict[str, tuple[Any, Any]]:
    """Each a loss and its rule of loss scaling; without a rule it is a step of plain optax."""
    import jax
    import jax.numpy as jnp

    import gainstage as gs

    written = partial(jax.nn.dot_product_attention, is_causal=True)
    fused = partial(written, implementation="cudnn")
    plain = partial(loss, sizes, written)
    kernel = partial(loss, sizes, gs.half_only(fused, float32=written))
    scaled, half = gs.DynamicLossScale(), jnp.bfloat16
    return {
        "float32, optax": (plain, None),
        "bfloat16 by hand, optax": (partial(loss, sizes, written, dtype=half), None),
        "bfloat16 by hand, optax, cuDNN": (partial(loss, sizes, fused, dtype=half), None),
        "gs.autocast float16": (gs.autocast(plain), scaled),
        "gs.autocast float16, cuDNN": (gs.autocast(kernel), scaled),
        "gs.autocast bfloat16, cuDNN": (gs.autocast(kernel, "bfloat16"), gs.FixedLossScale(1.0)),
        "gs.autocast float8, cuDNN": (gs.autocast(kernel, "float8"), scaled),
    }


# ── PyTorch's turn ───────────────────────────────────────────────────────────────────────────


def torch_turn(sizes: Sizes, names: Sequence[str], rounds: int, shortest: float) -> dict[str, Any]:
    """What a step of each variant takes, and what it depends on."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    dtypes = {TORCH_FLOAT16: torch.float16, TORCH_BFLOAT16: torch.bfloat16, TORCH_TF32: None}
    found: dict[str, Any] = {"environment": {"torch": torch.__version__}, "variants": {}}
    for name in names:
        found["variants"][name] = torch_variant(sizes, dtypes[name], device, rounds, shortest)
    return found


def torch_variant(
    sizes: Sizes, dtype: Any, device: str, rounds: int, shortest: float
) -> dict[str, float]:
    """The numbers of one."""
    import torch
    from torch.nn.functional import cross_entropy

    torch.manual_seed(0)
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = torch_model(sizes).to(device)
    ids = torch.from_numpy(first_tokens(sizes)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=DECAY, fused=on_gpu)
    scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)
    compiled = torch.compile(model) if on_gpu else model

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype, enabled=dtype is not None):
            scores = compiled(ids[:, :-1])
            value = cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        return value

    def sample(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            step()
        if on_gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls

    start = time.perf_counter()
    first = step().item()  # the loss of the first step, as in JAX
    compile_s = time.perf_counter() - start
    seconds = [sample(1) for _ in range(3)][-1]
    calls = math.ceil(shortest / seconds) or 1
    ms = [1e3 * sample(calls) for _ in range(rounds)]
    peak = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0
    return {
        "ms": statistics.median(ms),
        "ms_min": min(ms),
        "ms_max": max(ms),
        "compile_s": max(compile_s - seconds, 0.0),
        "peak_gb": peak,
        "loss": first,
    }


def torch_model(sizes: Sizes) -> Any:
    """The model."""
    import torch
    from torch import nn
    from torch.nn.functional import gelu, scaled_dot_product_attention

    width = sizes.width

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            parts = self.qkv(self.first(x)).split(width, -1)
            q, k, v = (p.unflatten(-1, (sizes.heads, -1)).transpose(1, 2) for p in parts)
            y = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
            x = x + self.out(y.flatten(2))
            return x + self.down(gelu(self.up(self.second(x)), approximate="tanh"))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.letters = nn.Embedding(sizes.letters, width)
            self.places = nn.Embedding(sizes.length, width)
            self.blocks = nn.Sequential(*(Block() for _ in range(sizes.blocks)))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, sizes.letters, bias=False)

        def forward(self, ids: Any) -> Any:
            places = torch.arange(ids.shape[1], device=ids.device)
            return self.head(self.norm(self.blocks(self.letters(ids) + self.places(places))))

    model = Decoder()
    model.load_state_dict(torch_weights(sizes))
    return model


def torch_weights(sizes: Sizes) -> dict[str, Any]:
    """The first weights by the names of PyTorch's model, whose kernels are (outputs, inputs)."""
    import torch

    def of(prefix: str, own: dict[str, Any]) -> dict[str, Any]:
        names = {"kernel": "weight", "scale": "weight", "shift": "bias", "bias": "bias"}
        return {f"{prefix}.{names[name]}": x.T if x.ndim == 2 else x for name, x in own.items()}

    first = first_weights(sizes)
    found = {"letters.weight": first["letters"], "places.weight": first["places"]}
    found |= {**of("norm", first["norm"]), "head.weight": first["head"].T}
    for number, block in enumerate(first["blocks"]):
        own = {name: block[name] for name in ("qkv", "out", "up", "down")}
        own["first"], own["second"] = block["norms"]
        for name, layer in own.items():
            found |= of(f"blocks.{number}.{name}", layer)
    return {name: torch.from_numpy(x.copy()) for name, x in found.items()}


if __name__ == "__main__":
    numbers, rounds, shortest, *names = (json.loads(word) for word in sys.argv[1:])
    print(json.dumps(torch_turn(Sizes(*numbers), names, rounds, shortest)))
