"""One namespace for JAX and one for torch: a function of the corpus is written once for both."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import digamma, gammaln, i0e, ndtr


class OfJax(SimpleNamespace):
    """`jax.numpy`, with the names of `jax.nn`, `jax.lax` and `jax.scipy` that the corpus uses."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)


def conv(x: Any, kernel: Any, stride: int = 1, padding: str = "SAME", groups: int = 1) -> Any:
    """A convolution over the last axes, with channels before them."""
    return lax.conv_general_dilated(
        x, kernel, (stride,) * (x.ndim - 2), padding, feature_group_count=groups
    )


def pool(x: Any, size: int, start: float, operation: Any) -> Any:
    """Windows of the last two axes."""
    window = (1, 1, size, size)
    return lax.reduce_window(x, start, operation, window, window, "VALID")


JAX = OfJax(
    softmax=jax.nn.softmax, log_softmax=jax.nn.log_softmax, relu=jax.nn.relu, gelu=jax.nn.gelu,
    silu=jax.nn.silu, sigmoid=jax.nn.sigmoid, softplus=jax.nn.softplus, elu=jax.nn.elu,
    log_sigmoid=jax.nn.log_sigmoid, leaky_relu=jax.nn.leaky_relu, logsumexp=jax.nn.logsumexp,
    one_hot=jax.nn.one_hot, erf=lax.erf, lgamma=gammaln, digamma=digamma, i0e=i0e, ndtr=ndtr,
    rsqrt=lax.rsqrt, segment_sum=lambda x, ids, n: jax.ops.segment_sum(x, ids, num_segments=n),
    segment_max=lambda x, ids, n: jax.ops.segment_max(x, ids, num_segments=n),
    conv=conv, max_pool=lambda x, n: pool(x, n, -jnp.inf, lax.max),
    avg_pool=lambda x, n: pool(x, n, 0.0, lax.add) / (n * n),
    scan=lax.scan, detach=lax.stop_gradient, grad=jax.grad, vmap=jax.vmap,
    solve_triangular=lambda a, b: jax.scipy.linalg.solve_triangular(a, b, lower=True),
    float=lambda x: x.astype(jnp.float32), int=lambda x: x.astype(jnp.int32),
    top=lambda x, k: lax.top_k(x, k)[0],
)  # fmt: skip


def of_torch() -> Any:
    """The same names in torch, where most are the same already."""
    import torch
    from torch.nn import functional as nn

    def scan(body: Any, carry: Any, xs: Any) -> Any:
        """A loop of Python."""
        outs = []
        for turn in range(len(xs[0] if isinstance(xs, tuple) else xs)):
            x = tuple(x[turn] for x in xs) if isinstance(xs, tuple) else xs[turn]
            carry, out = body(carry, x)
            outs.append(out)
        if outs[0] is None:
            return carry, None
        if isinstance(outs[0], tuple):
            return carry, tuple(torch.stack(some) for some in zip(*outs, strict=True))
        return carry, torch.stack(outs)

    def convolved(x: Any, kernel: Any, stride: int = 1, padding: str = "SAME", groups: int = 1):  # type: ignore[no-untyped-def]
        if padding == "SAME":
            sides = []
            for size, width in zip(x.shape[:1:-1], kernel.shape[:1:-1], strict=True):
                more = max((-(-size // stride) - 1) * stride + width - size, 0)
                sides += [more // 2, more - more // 2]
            x = nn.pad(x, sides)
        of_dims = {3: nn.conv1d, 4: nn.conv2d, 5: nn.conv3d}
        return of_dims[x.ndim](x, kernel, stride=stride, groups=groups)

    def tensor(x: Any, like: Any) -> Any:
        return x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=like.dtype)

    def pair(operation: Any) -> Any:
        def of_both(a: Any, b: Any) -> Any:
            like = a if isinstance(a, torch.Tensor) else b
            return operation(tensor(a, like), tensor(b, like))

        return of_both

    def reduced(operation: Any) -> Any:
        return lambda x, axis=(), keepdims=False: operation(x, dim=axis, keepdim=keepdims)

    def moment(operation: Any) -> Any:
        def of(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
            return operation(x, dim=axis, correction=0, keepdim=keepdims)

        return of

    def logsumexp(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
        axes = tuple(range(x.ndim)) if axis is None else axis
        return torch.logsumexp(x, dim=axes, keepdim=keepdims)

    def segment_max(x: Any, ids: Any, n: int) -> Any:
        start = torch.full((n, *x.shape[1:]), -torch.inf, dtype=x.dtype)
        places = ids.reshape(-1, *[1] * (x.ndim - 1)).expand_as(x)
        return start.scatter_reduce(0, places, x, "amax")

    class OfTorch(SimpleNamespace):
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    def last(operation: Any) -> Any:
        return lambda x, axis=-1: operation(x, dim=axis)

    return OfTorch(
        softmax=last(torch.softmax), log_softmax=last(torch.log_softmax), relu=torch.relu,
        gelu=lambda x: nn.gelu(x, approximate="tanh"), silu=nn.silu, softplus=nn.softplus,
        elu=nn.elu, log_sigmoid=nn.logsigmoid, leaky_relu=nn.leaky_relu, logsumexp=logsumexp,
        one_hot=lambda t, n: nn.one_hot(t, n).float(), i0e=torch.special.i0e,
        ndtr=torch.special.ndtr,
        segment_sum=lambda x, ids, n: torch.zeros(
            (n, *x.shape[1:]), dtype=x.dtype).index_add(0, ids, x),
        segment_max=segment_max, conv=convolved, max_pool=nn.max_pool2d, avg_pool=nn.avg_pool2d,
        scan=scan, detach=lambda x: x.detach(), grad=torch.func.grad, vmap=torch.func.vmap,
        solve_triangular=lambda a, b: torch.linalg.solve_triangular(a, b, upper=False),
        float=lambda x: x.float(), int=lambda x: x.long(),
        top=lambda x, k: torch.topk(x, k)[0],
        maximum=pair(torch.maximum), minimum=pair(torch.minimum), max=reduced(torch.amax),
        min=reduced(torch.amin), var=moment(torch.var), std=moment(torch.std),
        sort=lambda x, axis=-1: torch.sort(x, dim=axis)[0],
        transpose=lambda x, axes: x.permute(axes),
        take=lambda x, ids, axis: torch.index_select(x, axis, ids),
        take_along_axis=lambda x, ids, axis: torch.take_along_dim(x, ids, dim=axis),
        flip=lambda x, axis: torch.flip(x, (axis,)),
        roll=lambda x, by, axis: torch.roll(x, by, (axis,)),
        pad=lambda x, sides: nn.pad(x, [n for side in sides[::-1] for n in side]),
        repeat=lambda x, n, axis: torch.repeat_interleave(x, n, dim=axis),
        tensordot=lambda a, b, axes: torch.tensordot(a, b, dims=axes),
        concatenate=lambda parts, axis=0: torch.cat(tuple(parts), dim=axis),
        stack=lambda parts, axis=0: torch.stack(tuple(parts), dim=axis),
    )  # fmt: skip
