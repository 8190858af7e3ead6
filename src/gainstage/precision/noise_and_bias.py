"""What rounding costs training: the noise that it adds to a gradient, and its bias."""

# A gradient of one batch is a sample. Rounding errors that are independent from batch to batch are
# like a smaller batch; what is the same in each batch pulls training elsewhere.

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Parts = Sequence[np.ndarray]  # one array for each parameter
MAX_NOISE, MAX_BIAS = 0.01, 0.02  # within which a precision is recommended
SAME = 1e-10  # the part of the mean gradient's square that is rounding of equal gradients
# Batches: where the mean gradient is lost in noise, the bias is relative to what is left of the
# noise in the mean of so many.
FLOOR = 100


class GradientAccuracy(NamedTuple):
    """What a precision costs a gradient, measured on some batches. Of one batch, only `error` is
    known; the others are NaN."""

    noise: float  # variance of the rounding error over that of the batches: 0.01 is 1 % fewer data
    bias: float  # norm of the mean error over that of the mean gradient
    lost: float = math.nan  # share of the elements that became 0, on average over the batches
    error: float = math.nan  # the largest norm of a batch's error, over that of its gradient

    def told(self) -> str:
        """Returns the numbers in a line."""
        if math.isnan(self.noise):
            return f"an error of {self.error:.2%}"
        return f"{self.noise:.2%} noise and {self.bias:.2%} bias"

    def fits(self, max_noise: float, max_bias: float) -> bool:
        """Whether it is within a budget. A non-finite gradient is not."""
        return self.noise <= max_noise and self.bias <= max_bias


class Reference:
    """The gradients of some batches in float32, against which others are priced.

    Args:
        gradients: one for each batch, at least two.
    """

    def __init__(self, gradients: Sequence[Parts]):
        self.gradients: Sequence[Parts] = gradients
        count = len(gradients)
        mean = _squares(_means(gradients))
        variance = (sum(map(_squares, gradients)) - count * mean) / (count - 1)
        self.variance: float = variance if variance > SAME * mean else 0.0
        of_mean = mean - self.variance / count
        # The square of the norm of the mean gradient, and whether it can be told from noise.
        self.is_clear: bool = of_mean > self.variance / FLOOR
        self.mean: float = of_mean if self.is_clear else self.variance / FLOOR

    @functools.cached_property
    def views(self) -> "list[tuple[int | None, Reference]]":
        """This one, and one of each parameter whose mean gradient can be told from noise, with its
        number. A parameter with a small gradient is lost in the norm of all."""
        views: list[tuple[int | None, Reference]] = [(None, self)]
        for number in range(len(self.gradients[0])):
            own = Reference(_of(number, self.gradients))
            if own.variance and own.is_clear:
                views.append((number, own))
        return views

    def prices(
        self, found: Sequence[Parts], batches: Sequence[int] | None = None
    ) -> list[GradientAccuracy]:
        """What gradients of some of the batches cost, in each of the views."""
        return [own.price(_of(number, found), batches) for number, own in self.views]

    def price(
        self, gradients: Sequence[Parts], batches: Sequence[int] | None = None
    ) -> GradientAccuracy:
        """What gradients of some of the batches cost.

        Args:
            found: the gradients in another precision.
            batches: which batches those are, by default all.
        """
        exact = [self.gradients[i] for i in (range(len(gradients)) if batches is None else batches)]
        pairs = list(zip(gradients, exact, strict=True))
        errors = [[f - e for f, e in zip(fs, es, strict=True)] for fs, es in pairs]
        noise, bias = self.spread(errors)
        lost = np.mean([_lost(fs, es) for fs, es in pairs])
        error = max(error_of(*pair) for pair in pairs)
        return GradientAccuracy(noise, math.sqrt(bias), float(lost), error)

    def bias_at_most(self, gradients: Sequence[Parts]) -> tuple[float, bool]:
        """Two standard errors above the bias, and whether the bias can be told from 0.

        The error is that of the jackknife: of the bias without each of the batches. Two batches do
        not show it; then it is the norm of the mean error, which has the noise in it.
        """
        count = len(gradients)
        inner = np.zeros((count, count))  # products of the errors of two batches
        with np.errstate(all="ignore"):
            for pairs in zip(
                zip(*gradients, strict=True), zip(*self.gradients, strict=True), strict=True
            ):
                each = [np.subtract(*pair, dtype=np.float64) for pair in zip(*pairs, strict=True)]
                errors = np.stack(each).reshape(count, -1)
                inner += errors @ errors.T
        if not np.isfinite(inner).all():
            return math.inf, True
        if count < 3:
            return math.sqrt(max(inner.sum(), 0.0) / count**2 / self.mean), False
        every = inner.sum() - inner.trace()
        without = every - 2 * (inner.sum(0) - inner.diagonal())
        error = math.sqrt((count - 1) * (without / ((count - 1) * (count - 2))).var())
        bias = every / (count * (count - 1))
        return math.sqrt(max(bias + 2 * error, 0.0) / self.mean), bool(bias > 2 * error)

    def spread(self, errors: Sequence[Parts]) -> tuple[float, float]:
        """The noise, and the square of the bias, of the errors of some batches. Both add up over
        operations."""
        count, mean = len(errors), _squares(_means(errors))
        if not math.isfinite(mean):
            return math.inf, math.inf
        variance = max(sum(map(_squares, errors)) - count * mean, 0.0) / (count - 1)
        return variance / self.variance, max(mean - variance / count, 0.0) / self.mean


def percent(part: float) -> str:
    """A share in per cent, to two digits."""
    return f"{100 * part:.2g} %" if math.isfinite(part) else "not finite"


def error_of(found: Parts, exact: Parts) -> float:
    """The norm of the error of a gradient, over that of the gradient."""
    norm = _squares(exact)
    off = _squares([f - e for f, e in zip(found, exact, strict=True)])
    return math.sqrt(off / norm) if math.isfinite(off) and norm else math.inf if off else 0.0


def _of(number: int | None, gradients: Sequence[Parts]) -> Sequence[Parts]:
    """The gradients of one parameter, or of all."""
    return gradients if number is None else [[gradient[number]] for gradient in gradients]


def _means(gradients: Sequence[Parts]) -> list[np.ndarray]:
    count = len(gradients)
    columns = zip(*gradients, strict=True)
    with np.errstate(all="ignore"):  # a non-finite sum says that all is lost
        return [np.add.reduce([np.asarray(g, np.float64) for g in c]) / count for c in columns]


def _squares(gradient: Parts) -> float:
    with np.errstate(all="ignore"):
        return float(sum(np.square(np.asarray(g, np.float64)).sum() for g in gradient))


def _lost(found: Parts, exact: Parts) -> float:
    """The share of the elements that are 0, among those that are not in float32."""
    known = sum(int((e != 0).sum()) for e in exact)
    gone = sum(int(((f == 0) & (e != 0)).sum()) for f, e in zip(found, exact, strict=True))
    return gone / known if known else 0.0
