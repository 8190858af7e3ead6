"""What each precision costs on a model and batches of one's own, before training."""

import functools
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from gainstage._base import checks
from gainstage._base.arrays import partition
from gainstage._base.progress_bar import counted
from gainstage._programs.in_dtype import is_half
from gainstage._variables.types import PyTree, Using
from gainstage.precision.autocast import autocast, under_plan
from gainstage.precision.cards import CARDS, H100, Card, known_card
from gainstage.precision.find_plan import mended_plan
from gainstage.precision.noise_and_bias import (
    MAX_BIAS,
    MAX_NOISE,
    GradientAccuracy,
    Reference,
    percent,
)
from gainstage.precision.plan import DTYPES, FLOAT8, Plan, aligned
from gainstage.precision.program_costs import Product, kept, products_of
from gainstage.precision.samples import (
    EXPONENTS,
    GradientsOf,
    Samples,
    are_products_rounded,
    is_finite,
    largest_exponent,
    samples_of,
)
from gainstage.transforms.value_and_grad import LossFunction

__all__ = ["Advice", "Candidate", "advise"]

LAST_EXPONENT = 24  # of the loss scales that are tried
LARGER = (3, 6, 9, 12)  # binary orders by which a batch may be larger
WORSE = 2.0  # times the price of the scaled gradient, from which on a scale is needed
NAMES = "float32", "bfloat16", "float16, unscaled", "float16", FLOAT8
EXACT = "float32, highest"  # float32 where the device rounds the operands of products by default
ALIKE = 1.02  # times on paper whose ratio is below this are the same


class Candidate(NamedTuple):
    """One precision that `advise` has measured: how exact its gradients are, and what a step
    takes."""

    # "float32", "float32, highest", "bfloat16", "float16, unscaled", "float16", "float8", or one of
    # these with ", mended", by the plan of the advice
    name: str
    accuracy: GradientAccuracy
    exponent: int | None  # that of the largest loss scale that was finite; None without a scale
    kept: int  # bytes that the forward pass keeps for the backward pass
    arithmetic: dict[str, float]  # the share of the products' arithmetic in each dtype
    # Of all products of a step on the card, on paper, and nothing else of the step; inf for
    # "float32, highest", for which makers publish no rate.
    seconds: float
    code: tuple[str, ...]  # the lines to write, for a loss `loss_fn` and an optax chain `tx`
    bias_at_most: float  # the upper end of the bias, which so few batches show with an error
    is_bias_clear: bool  # whether the bias can be told from 0

    @property
    def dtype(self) -> str:
        """The dtype of its products: the plan of `gainstage.autocast`, but for "float32"."""
        return self.name.partition(",")[0]


PLAN = "advice.plan"
Code = Callable[[str, bool], tuple[str, ...]]  # `(dtype, is scaled) -> lines to write`


MENDED = ", mended"  # after the name of a precision, with the plan of the advice
NEARLY = 1.0  # noise and bias up to which a precision may be mended
EXACT_LINE = 'jax.config.update("jax_default_matmul_precision", "highest")'


def code_of_loop(dtype: str, is_scaled: bool) -> tuple[str, ...]:
    """The two lines to write for a precision, in a loop of `gainstage.train_step`."""
    scale = "" if is_scaled or dtype in ("float32", "bfloat16") else ", loss_scale=None"
    loss = "loss_fn" if dtype == "float32" else f"gs.autocast(loss_fn, {dtype_as_code(dtype)})"
    return f"state = gs.TrainState.create(params, tx{scale})", f"step = gs.train_step({loss})"


def dtype_as_code(dtype: str) -> str:
    """What to write for a precision: its name, or the plan of an advice."""
    return PLAN if dtype == PLAN else f'"{dtype}"'


class ScalingNeed(NamedTuple):
    """From which batch size on a precision needs loss scaling, and what is lost without."""

    times: int | None  # that of these batches; None if not for any that was tried
    parameter: str = ""  # whose gradient is lost, if that of all together is not
    accuracy: GradientAccuracy = GradientAccuracy(0.0, 0.0)  # of what is lost


class Advice:
    """What each precision costs, as `gainstage.advise` measured it. `print` it.

    Attributes:
        candidates: a tuple of `Candidate`, from float32 to float8. Float8 is missing if no product
            is in it.
        recommended: the `Candidate` of the precision to use.
        reason: why, in a sentence.
        plan: where a faster precision is nearly good enough, the lines that float32 takes back so
            that it is, a `precision.Plan`; else None. It has a row of its own, such as "float16,
            mended".
        scaling: whether float16 needs loss scaling, in a sentence.
        needs_scaling_from: how many times larger a batch float16 needs loss scaling for, 1 for this
            one; None if not even `2**12` times, or if no scale helps.
        card: the name of the card of the times.
        cards: the costs on each card that is known, by its name, if no card was asked for and this
            machine has none; else empty.
        batches: the number of batches.
        is_clear: whether the mean gradient can be told from the noise of so few batches. If not,
            bias is given relative to what 100 batches would leave of the noise.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from gainstage import advise
        >>> x = jax.random.normal(jax.random.key(0), (2, 64, 16))
        >>> batches = [(x[0],), (x[1],)]
        >>> advice = advise(lambda w, x: jnp.mean((x @ w) ** 2), jnp.ones((16, 16)), batches)
        >>> print(advice.recommended.name)
        bfloat16

    Source: `gainstage.advise` makes it.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        need: ScalingNeed,
        card: Card,
        batches: int,
        is_clear: bool,
        cards: Mapping[str, Sequence[Candidate]] = MappingProxyType({}),
        plan: Plan | None = None,
    ):
        self.plan: Plan | None = plan
        self.cards: dict[str, tuple[Candidate, ...]] = {n: tuple(each) for n, each in cards.items()}
        self.candidates: tuple[Candidate, ...] = tuple(candidates)
        self.needs_scaling_from: int | None = need.times
        self._need = need
        self.card: str = card.name
        self.batches: int = batches
        self.is_clear: bool = is_clear
        self.recommended: Candidate = _recommended(candidates)
        self.reason: str = _reason(self)

    def __repr__(self) -> str:
        return f"Advice({self.recommended.name!r}, {self.batches} batches)"

    def __str__(self) -> str:
        code = [f"    {line}" for line in self.recommended.code]
        of_cards = (
            f"No accelerator is here, so times are those of the {self.card}. On this CPU half "
            f"precision is not faster. On other cards:"
        )
        cards = [of_cards, *aligned(self._of_cards()), ""]
        table = [*aligned(self.table()), "", *(cards if self.cards else [])]
        return "\n".join([*table, *self.notes(), "", f"Use {self.reason}", *code])

    def table(self) -> list[tuple[str, ...]]:
        """Returns the rows of the table, the first one with the names of the columns."""
        head = ("precision", "noise", "bias", "lost to 0", "scale", "kept", "products", self.card)
        rows = [head, *map(_row_text, self.candidates)]
        if all(row.name != FLOAT8 for row in self.candidates):
            why = "as float16" if CARDS[self.card].float8 else "not there"
            rows.append(("float8", why, *[""] * (len(head) - 2)))
        return rows

    def _of_cards(self) -> list[tuple[str, ...]]:
        """The rows of the times on all cards, the first one with the names of the columns."""
        names = [row.name for row in self.candidates if row.name != "float16, unscaled"]
        rows = [("card", *names, "use")]
        for card in sorted(self.cards, key=lambda name: name != self.card):
            times = {row.name: _time(row) for row in self.cards[card]}
            best = _recommended(self.cards[card]).name
            rows.append((card, *(times.get(name, "not there") for name in names), best))
        return rows

    @property
    def scaling(self) -> str:
        """Whether float16 needs loss scaling, in a sentence or two."""
        larger = self.needs_scaling_from
        scaled = next(row for row in self.candidates if row.name == "float16")
        none = "Float16 needs no loss scaling here, nor for batches 4,096 times as large."
        if not scaled.accuracy.fits(MAX_NOISE, MAX_BIAS):
            none = "The error of float16 is not that of small gradients: no loss scale helps."
        own, name = self._need.accuracy, self._need.parameter
        why = (
            f". Without it {name!r} alone has {percent(own.noise)} noise and {percent(own.bias)} "
            f"bias there"
        ) * bool(name)
        if larger is None:
            return none
        if larger == 1:
            return f"Float16 needs loss scaling at these parameters and this batch size{why}."
        return f"Float16 needs loss scaling from about {larger:,} times this batch size on{why}."

    def notes(self) -> list[str]:
        """Returns what the table does not say, a sentence each."""
        is_rounded = any(row.name == EXACT for row in self.candidates)
        notes = [
            f"Measured on {self.batches} batches, at these parameters, against float32 on this "
            f"{jax.default_backend()}{' at the highest precision' * is_rounded}.",
            "Ask again late in training: gradients shrink, so what is right at these weights may "
            "be wrong at those, and a scale may be needed.",
            f"Times are estimates, from the sizes of the products and the rates of the "
            f"{self.card}; nothing else of a step is in them.",
            self.scaling,
        ]
        best = self.recommended
        if self.plan is not None:
            notes.append(
                f"{self.plan.dtype.capitalize()} is nearly good enough. With advice.plan, which "
                f"takes {self.plan.lines_to_keep()} back into float32, {self.plan.left:.0%} of "
                f"what is in half precision is left."
            )
        if best.exponent is None:
            notes.append(
                f"{best.name.split(',')[0].capitalize()} needs no loss scale, and steps that are "
                f"not finite are skipped all the same."
            )
        if best.exponent is not None and self.needs_scaling_from != 1:
            notes.append("The lines below scale already now, as gradients shrink in training.")
        if best.bias_at_most > MAX_BIAS:
            notes.append(
                f"On so few batches the bias of {best.name} may be up to "
                f"{percent(best.bias_at_most)}: measure on more."
            )
        if any(_bias(row).startswith("<") for row in self.candidates):
            notes.append('"<" before a bias: so few batches do not tell it from 0; more show more.')
        seconds = {row.name: row.seconds for row in self.candidates}
        if "float8" not in seconds:
            notes.append(self._without_float8())
        elif seconds["float8"] >= seconds["float16"]:
            notes.append(f"On the {self.card} float8 saves no time here.")
        if not self.is_clear:
            notes.append(
                "The mean gradient cannot be told from noise, so bias is relative to the noise "
                "that is left after 100 batches."
            )
        return notes

    def _without_float8(self) -> str:
        """Why no product is in float8."""
        if not CARDS[self.card].float8:
            return f"The {self.card} has no products in float8."
        return (
            f'No linear layer is large enough to gain by float8 on an {H100.name}: "float8" '
            f'computes as "float16" does.'
        )


@checks.explains(
    "Write gainstage.advise(loss_fn, params, batches); for a model of Keras, "
    "gainstage.interop.keras.advise(model, batches)."
)
def advise(
    fun: Callable[..., Any],
    params: PyTree,
    batches: Sequence[Any],
    *,
    card: str | None = None,
    has_aux: bool = False,
    using: Using | None = None,
    progress: bool = True,
) -> Advice:
    """Measures what each precision costs training, on some batches of your own.

    Noise is the variance of rounding errors over that of the batches: 1 % means as if 1 % of each
    batch were missing. Bias is the error that is the same in each batch, relative to the mean
    gradient. What is recommended has at most 1 % and 2 %. It looks at one point of training: ask
    again late, as weights at the start hide what small gradients need.

    The table has a row for each precision, and these columns:

    - "bias": "< 1 %" where so few batches cannot tell it from 0; more of them show more.
    - "lost to 0": the share of the gradient's elements that became 0.
    - "scale": the largest of `2**24`, `2**21`, `2**18` ... at which all gradients are finite.
    - "kept": what the forward pass keeps for the backward pass.
    - "products": the share of the products' arithmetic in each dtype. The row of float8 is
      that of `gainstage.autocast(fun, "float8")`, and is missing if no product is in float8.
    - the card: the time of all products of a step, from their sizes and the card's rates. On an
      H100 or A100, products of float32 are timed as TF32, which is how JAX multiplies them there.

    Noise and bias are relative to float32 at the highest precision. Where the device rounds the
    operands of float32 products by default, as a GPU does to TF32 and a TPU to bfloat16, the row
    "float32" is that, and there is a row "float32, highest".

    Args:
        fun: a float32 function `(params, *batch)` that returns a scalar loss, or (loss, aux),
            before `autocast`.
        params: its first argument, a pytree or a model.
        batches: a list of two batches or more, of usual size; four show one digit. Each is the
            tuple of what `fun` takes after the parameters, such as `(x, y)`, or `(x,)`.
        card: for whose rates times are computed: "B200", "H200", "H100", "A100", "L40S", "L4",
            "A10", "T4", "V100", "RTX 5090", "RTX 5080", "RTX 4090", "RTX 4080", "RTX 3090",
            "RTX 3080", "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e" or "TPU v7", in small or large
            letters. None for the card of this machine, for an H100 if it is not among these; on a
            CPU for an H100, with a table of all of them.
        has_aux: whether `fun` returns (loss, aux).
        using: the function that differentiates, by default as for `gainstage.value_and_grad`.
        progress: whether to show a progress bar, or lines where there is no terminal.

    Returns:
        An `Advice`; `print` it.

    Raises:
        TypeError, ValueError: an argument is invalid, the batches differ in structure or shapes, a
            loss or gradient is not finite in float32, all gradients are 0, or two calls with one
            batch differ.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from gainstage import advise
        >>> def loss_fn(w, x, y):
        ...     return jnp.mean((jnp.tanh(x @ w) - y) ** 2)
        >>> w, *data = (jax.random.normal(jax.random.key(i), (4, 32, 32)) for i in range(3))
        >>> advice = advise(loss_fn, w[0] / 6, list(zip(*data)))
        >>> print([row.name for row in advice.candidates if row.accuracy.noise < 0.01])
        ['float32', 'bfloat16', 'float16, unscaled', 'float16']

    Source: the noise of batches as in McCandlish et al., 2018, arXiv:1812.06162.
    """
    loss = LossFunction(fun, has_aux, using)
    return measured_advice(loss, params, batches, card=card, progress=progress)


def measured_advice(
    loss: LossFunction,
    params: PyTree,
    batches: Sequence[Any],
    *,
    card: str | None,
    progress: bool,
    code: Code = code_of_loop,
    cast: Callable[[str], Callable[..., Any]] | None = None,
) -> Advice:
    """What `advise` returns, with lines of code for any kind of training.

    Args:
        loss: the function, and how it is differentiated.
        params, batches, card, progress: as for `advise`.
        code: makes the lines.
        cast: returns the function under autocast in a precision, by default `autocast` of it.
    """
    fun, cast = loss.fun, cast or functools.partial(autocast, loss.fun)
    rates = known_card(card)
    small = next((x for x in partition(params)[0] if is_half(x)), None)
    if small is not None:
        raise ValueError(
            f"Expected float32 parameters; got {small.dtype}[{', '.join(map(str, small.shape))}]. "
            f"What is already rounded costs nothing more in a smaller dtype."
        )
    samples = samples_of(loss, params, batches)
    start = time.perf_counter()
    exact = samples.exact()
    reference = Reference([results[1:] for results in exact])
    if not reference.variance:
        raise ValueError("Expected different batches; all of them have the same gradient.")
    each = (time.perf_counter() - start) / (len(samples) + 1)
    pieces = len(NAMES) * len(samples) + 1 + len(LARGER)
    with counted(pieces, "advise", shows=progress, seconds=each * pieces) as tick:
        measured = _CostMeasurement(samples, reference, rates, code, tick)
        half = cast("float16")
        of_half = samples.compiled(half)
        is_rounded = are_products_rounded()

        def unrounded(number: int, scale: float) -> list[Any]:
            return exact[number]

        rows = [
            measured.row("float32", fun, 0, None if is_rounded else unrounded),
            *([measured.row(EXACT, fun, 0, unrounded)] if is_rounded else []),
            measured.row("bfloat16", cast("bfloat16"), 0),
            measured.row("float16, unscaled", half, 0, of_half),
            measured.row("float16", half, None, of_half),
        ]
        need = measured.needs_scaling_from(of_half, rows[-1])
        eight = cast("float8")
        # It warns if no product is in float8, which the advice says.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            has_float8 = rates.float8 and measured.has_float8(eight)
        if has_float8:
            rows.append(measured.row("float8", eight, None))
        else:
            measured.skip_row()
        plan, more = measured.mended(cast, rows)
        rows[-1:] = [*more, rows[-1]] if has_float8 else [rows[-1], *more]
    is_asked = card is not None or jax.default_backend() != "cpu"
    cards = {} if is_asked else measured.on_cards(rows)
    return Advice(rows, need, rates, len(samples), reference.is_clear, cards, plan)


class _CostMeasurement:
    """Measurements of one function in several precisions."""

    def __init__(
        self,
        samples: Samples,
        reference: Reference,
        card: Card,
        code: Code,
        tick: Callable[[], Any],
    ):
        self._samples, self._reference, self._card = samples, reference, card
        self._code, self._tick = code, tick
        self._products: dict[str, list[Product]] = {}  # by precision

    def row(
        self,
        name: str,
        fun: Callable[..., Any],
        exponent: int | None,
        run: GradientsOf | None = None,
    ) -> Candidate:
        """What a precision costs, at the largest loss scale that fits if `exponent` is None."""
        scaled, run = exponent is None, run or self._samples.compiled(fun)
        if exponent is None:
            exponent = largest_exponent(lambda e: is_finite(run(0, 2.0**e)), LAST_EXPONENT)
        measured: list[Any] = []
        while len(measured) < len(self._samples):
            results = run(len(measured), 2.0**exponent)
            if scaled and exponent > 0 and not is_finite(results):
                exponent, measured = exponent - EXPONENTS, []  # all at one scale
            else:
                measured.append(results[1:])
        for _ in measured:
            self._tick()
        price = self._reference.price(measured)
        loss, of_parameters, others = self._traced(fun)
        products = products_of(loss, of_parameters, others)
        total = sum(p.operations for p in products) or 1.0
        shares: dict[str, float] = {}
        for product in products:
            shares[product.dtype] = shares.get(product.dtype, 0.0) + product.operations / total
        self._products[name] = products
        memory = kept(loss, of_parameters, others)
        code = self._code(PLAN if name.endswith(MENDED) else name.partition(",")[0], scaled)
        code = (EXACT_LINE, *code) if name == EXACT else code
        seconds = self._seconds(name, self._card)
        known = (memory, shares, seconds, code, *self._reference.bias_at_most(measured))
        return Candidate(name, price, exponent if scaled else None, *known)

    def mended(
        self, cast: Callable[[str], Callable[..., Any]], rows: Sequence[Candidate]
    ) -> tuple[Plan | None, list[Candidate]]:
        """The plan with which the fastest precision is within the budget, and its row; nothing
        where one that is as fast is so already, or none is near it.

        Args:
            cast: as for `measured_advice`.
            rows: those without a plan.
        """
        limit = _recommended(rows).seconds / ALIKE
        near = [
            row
            for row in rows
            if row.name in DTYPES and row.seconds < limit and row.accuracy.fits(NEARLY, NEARLY)
        ]
        for row in sorted(near, key=lambda row: (row.accuracy.noise, row.accuracy.bias)):
            half = cast(row.name)
            plan = mended_plan(self._samples.of(half))
            if plan.entries and plan.measured.fits(MAX_NOISE, MAX_BIAS):
                exponent = None if row.exponent is not None else 0
                return plan, [self.row(f"{row.name}{MENDED}", under_plan(half, plan), exponent)]
        return None, []

    def _seconds(self, name: str, card: Card) -> float:
        """The time of all products of a precision on a card."""
        if name == EXACT:
            return math.inf
        return sum(product.seconds(card) for product in self._products[name])

    def on_cards(self, rows: Sequence[Candidate]) -> dict[str, list[Candidate]]:
        """The costs on each card, with its times, where it has these products."""
        return {
            card.name: [
                row._replace(seconds=self._seconds(row.name, card))
                for row in rows
                if card.float8 or row.name != FLOAT8
            ]
            for card in CARDS.values()
        }

    def skip_row(self) -> None:
        """Counts a row that is not measured."""
        for _ in range(len(self._samples)):
            self._tick()

    def has_float8(self, fun: Callable[..., Any]) -> bool:
        """Whether a product of a function is in float8."""
        return any(product.dtype == FLOAT8 for product in products_of(*self._traced(fun)))

    def _traced(self, fun: Callable[..., Any]) -> tuple[Callable[..., Any], list[Any], list[Any]]:
        """The loss as a function of arrays, those of the parameters, and the others."""
        arrays, count = self._samples.arrays[0], self._samples.parameters
        return self._samples.of_arrays(fun), arrays[:count], arrays[count:]

    def needs_scaling_from(self, run: GradientsOf, scaled: Candidate) -> ScalingNeed:
        """How many times larger a batch is, at least, for which a precision needs loss scaling. A
        mean over more examples has smaller cotangents, as a smaller loss scale makes them.

        Args:
            run: computes gradients.
            scaled: the cost of scaled ones, which no scale betters.
        """
        at = {order: 2.0**-order for order in (0, *LARGER)}
        # Where float16 is no choice even if it is scaled, larger batches are no question.
        if not scaled.accuracy.fits(MAX_NOISE, MAX_BIAS):
            at = {0: 1.0}
        best = self._prices(run, 2.0 ** (scaled.exponent or 0))
        budget = max(MAX_NOISE, WORSE * best[0].noise), max(MAX_BIAS, WORSE * best[0].bias)
        # One that a scale does not help is no gradient but rounding, as of a bias before a softmax.
        helped = [i for i, price in enumerate(best) if i and price.fits(MAX_NOISE, MAX_BIAS)]
        budgets = {0: budget} | dict.fromkeys(helped, (MAX_NOISE, MAX_BIAS))
        for order, scale in at.items():
            loss = self._prices(run, scale)
            self._tick()
            lost = [i for i, bounds in budgets.items() if not loss[i].fits(*bounds)]
            if lost:
                number, _ = self._reference.views[lost[0]]
                name = "" if number is None else self._samples.names[number]
                return ScalingNeed(2**order, name, loss[lost[0]])
        return ScalingNeed(None)

    def _prices(self, run: GradientsOf, scale: float) -> list[GradientAccuracy]:
        """What all gradients cost, and those of each parameter, on two batches."""
        found = [run(number, scale)[1:] for number in range(2)]
        return self._reference.prices(found, range(2))


def _recommended(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest precision within the budget; of several, the first one: it needs no scale."""
    fitting = [row for row in candidates if row.accuracy.fits(MAX_NOISE, MAX_BIAS)]
    trained = [row for row in fitting if row.name != "float16, unscaled"]
    fastest = min(row.seconds for row in trained)
    return next(row for row in trained if row.seconds <= ALIKE * fastest)


def _reason(advice: Advice) -> str:
    """Why a precision is recommended, with what the others cost."""
    best, exact = advice.recommended, advice.candidates[0]
    refused = [
        f"{row.name} ({percent(row.accuracy.noise)} noise, {percent(row.accuracy.bias)} bias)"
        for row in advice.candidates
        if not row.accuracy.fits(MAX_NOISE, MAX_BIAS)
    ]
    noise, bias = map(percent, best.accuracy[:2])  # which are the ones tested
    why = f"noise {noise} and bias {bias} are within 1 % and 2 %"
    if best.dtype == "float32":
        why = "no other precision is within 1 % noise and 2 % bias, or none is faster"
    elif exact.seconds:
        less = 1e6 * (exact.seconds - best.seconds)
        why += (
            f", and products take {best.seconds / exact.seconds:.2f} of their time on paper, "
            f"{less:.2g} us less"
        )
    against = f" Not {', '.join(refused)}." if refused else ""
    return f"{best.name}: {why}.{against}"


def _row_text(row: Candidate) -> tuple[str, ...]:
    products = ", ".join(f"{share:.0%} {dtype}" for dtype, share in row.arithmetic.items())
    scale = "" if row.exponent is None else f"2^{row.exponent}"
    scale += " or more" * (row.exponent == LAST_EXPONENT)
    name = f"{row.name}, scaled" if row.name == "float16" else row.name
    price = percent(row.accuracy.noise), _bias(row), percent(row.accuracy.lost)
    return name, *price, scale, f"{row.kept / 1e6:.3g} MB", products, _time(row)


def _time(row: Candidate) -> str:
    return f"{1e6 * row.seconds:.3g} us" if math.isfinite(row.seconds) else ""


def _bias(row: Candidate) -> str:
    """The bias, or what it is below, if it cannot be told from 0."""
    if row.is_bias_clear or not row.bias_at_most:
        return percent(row.accuracy.bias)
    return f"< {percent(row.bias_at_most)}"
