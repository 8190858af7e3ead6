"""Functions in half precision: products in float16, and what needs float32 in float32."""

import contextlib
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Never, TypeAlias, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from gainstage._base._jax import JaxprEqn, Tracer, is_batched, is_differentiated
from gainstage._base.warn import warn
from gainstage._programs import jaxprs, patterns
from gainstage._programs.in_dtype import converted, in_dtype, is_float32
from gainstage._programs.jaxprs import AnyJaxpr, Path
from gainstage._programs.operations import PRODUCTS, Trait, names_with
from gainstage._programs.patterns import moves, power_of
from gainstage._programs.scopes import KEEP_FLOAT32, KEEPS
from gainstage._variables.types import P, R
from gainstage.precision.cards import ANY, H100, Card
from gainstage.precision.float8_product import ProductSpec, multiply, to_operand
from gainstage.precision.float8_rule import Float8Decision, Sizes, decide, sizes_of
from gainstage.precision.needs import Need, needs_of
from gainstage.precision.plan import DTYPES, FLOAT8, Plan
from gainstage.precision.product_width import Width, holds, in_range, is_offset, width
from gainstage.precision.wide_results import (
    BOUNDED,
    bounded,
    broadcast_product,
    power,
    wide_product,
)
from gainstage.transforms.retrace import (
    IS_KEPT,
    SINGLE,
    Kind,
    Retraced,
    as_written,
    function_of,
    of_kernel,
    replayed,
)
from gainstage.transforms.self_scaled import self_scaled

Precision: TypeAlias = str | Plan | DTypeLike

__all__ = ["autocast", "keep_float32"]

LARGE_FACTOR = 1024.0  # a number that is too large to multiply half-precision numbers of any size
FOLLOWERS = names_with(Trait.CHEAP)  # in half precision if their operands are, or may be rounded
# The kinds of results of operations on kinds.
KINDS: dict[tuple[str | Kind, ...], Kind] = {
    ("add", Kind.FREE, Kind.FREE): Kind.FREE,
    ("sub", Kind.FREE, Kind.FREE): Kind.FREE,
    ("div", Kind.FREE, Kind.ROOT): Kind.INVERSE,
    ("mul", Kind.FREE, Kind.INVERSE): Kind.INVERSE,
    ("mul", Kind.INVERSE, Kind.FREE): Kind.INVERSE,
    ("div", Kind.OTHER, Kind.ROOT): Kind.NORMALISED,
    ("mul", Kind.OTHER, Kind.INVERSE): Kind.NORMALISED,
    ("mul", Kind.INVERSE, Kind.OTHER): Kind.NORMALISED,
}


# Other names of dtypes, which people know from elsewhere.
_ALIASES = {
    "fp16": "float16", "f16": "float16", "half": "float16",
    "bf16": "bfloat16", "fp8": "float8",
}  # fmt: skip


@overload
def autocast(
    fun: Callable[P, R], dtype: Precision = ..., *, loss_scale: float | None = ...
) -> Callable[P, R]: ...


@overload
def autocast(
    fun: str | Plan | None = ..., dtype: Precision = ..., *, loss_scale: float | None = ...
) -> "AutocastDecorator": ...


def autocast(fun: Any = None, dtype: Any = "float16", *, loss_scale: float | None = None) -> Any:
    """Returns a function that computes its products and convolutions in half precision.

    Write the model and the loss in float32, with float32 parameters. Products then have operands
    and results in half precision, and operations that are cheap follow their operands. Sums,
    means, exponentials, logarithms, quotients and roots stay in float32, and so do normalisations
    up to their factor and bias. So do powers, norms and counts, which may overflow, and cheap
    operations on the way to a logarithm, a root or a denominator. It is a
    transformation like `jax.grad`: use it under or over `jax.jit`, `jax.grad`, `jax.vmap`,
    `jax.lax.scan`, `jax.checkpoint` and `jax.shard_map`.

    - Results keep their structure and dtypes; so do derivatives.
    - Float16, bfloat16, float64, integers, booleans and keys of the function stay as they are.
    - The parameters, the leaves of the first argument and of models, may be rounded where they meet
      half precision, as a bias does. Other arguments are rounded only for products.
    - Functions with their own derivatives (`jax.custom_vjp`, `jax.custom_jvp`), callbacks and
      Pallas kernels are computed in the dtypes that they were written in, but for cheap ones such
      as `jax.nn.relu`. `in_half` gives them half precision.
    - What a call changes, a model of Flax NNX or a `gainstage.optimizers.Variable`, is changed as
      without it.
    - `keep_float32` keeps operations in float32.

    Float16 needs loss scaling: `gainstage.train_step(gainstage.autocast(loss_fn))`. A trainer that
    differentiates by itself takes a loss with a scale of its own:
    `autocast(loss_fn, loss_scale=2.0**15)` has the values of `autocast(loss_fn)`, and true
    gradients from a scaled backward pass.

    - If a gradient is not finite, loss and gradients are computed again at a sixteenth of the
      scale, up to eight times, so an overflow costs time but no batch. Nothing is kept for that:
      memory is that of a step without it. On a GPU the host reads one bit at each step.
    - Wrap the whole loss, with its mean over a batch: it returns a scalar, or a tuple (loss, aux),
      of which aux has no gradients. Inside of `jax.vmap` or `jax.lax.scan` it keeps the gradient of
      each example.
    - It is differentiated once, in reverse mode: JAX refuses `jax.jvp` of it, and in compiled code
      second derivatives.
    - What a call changes, such as the running means of an NNX model, is changed by the last try.
    - Inside `jax.shard_map` and `jax.pmap` all devices try again together, or none does.
    - A non-finite loss is not computed again, as it does not depend on the scale. Keep
      `gainstage.loss_scaled` or `optax.apply_if_finite` around the optimizer, if that may happen.

    Args:
        fun: a function of pytrees or models, such as a loss; without it, a decorator is returned. A
            model of Keras is given to `gainstage.interop.keras.autocast`.
        dtype: "float16" or "bfloat16", the dtype of products, also by short names such as "fp16",
            or as a dtype; or "float8", for linear layers that are large enough for an H100 to gain
            by it, all else as by "float16". Also what `gainstage.precision.tune` has measured for
            `fun`.
        loss_scale: the loss scale at the first try of a step, > 0 and at most `2**126`, if
            a trainer differentiates `fun`; a power of two causes no rounding. None if a scale is
            elsewhere, or none is needed. A loss that sums over the data may need one below 1.

    Raises:
        TypeError: `fun` is not callable, or `loss_scale` is not a number; from the call with a
            `loss_scale`, the loss is not a scalar.
        ValueError: another dtype; `loss_scale` is out of range; `fun` has a `loss_scale` already,
            or is what `autocast` returned, with a `Plan`; from the call, the plan of another
            function.

    Examples:
        >>> import gainstage as gs
        >>> import jax, jax.numpy as jnp
        >>> def loss_fn(params, x):
        ...     return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)
        >>> params = {"w": jnp.full((4, 3), 0.1), "b": jnp.zeros(3)}
        >>> loss, grads = jax.value_and_grad(gs.autocast(loss_fn))(params, jnp.ones((2, 4)))
        >>> print(loss.dtype, grads["w"].dtype, f"{loss:.4f}")
        float32 float32 0.1443

        With a scale of its own, for a trainer that calls `jax.grad`:

        >>> trainer_loss = gs.autocast(loss_fn, loss_scale=2.0**15)
        >>> same = jax.grad(trainer_loss)(params, jnp.ones((2, 4)))
        >>> print(jnp.allclose(same["w"], grads["w"], rtol=0.01))
        True

    Source: `torch.autocast`; Micikevicius et al., 2018, arXiv:1710.03740.
    """
    if fun is None or isinstance(fun, (str, Plan, np.dtype)) or _is_scalar_type(fun):
        return AutocastDecorator(dtype if fun is None else fun, loss_scale)
    names = [f"{cls.__module__}.{cls.__name__}" for cls in type(fun).__mro__]
    if any(name.startswith("keras.") and name.endswith(".Model") for name in names):
        if loss_scale is not None:
            raise TypeError(
                "Expected no loss_scale for a model of Keras, whose optimizer scales the loss: "
                "gainstage.interop.keras.LossScaleOptimizer(optimizer)."
            )
        return importlib.import_module("gainstage.interop.keras").autocast(fun, dtype)
    if not callable(fun):
        raise TypeError(f"Expected a function for fun; got {fun!r}.")
    if getattr(fun, "is_self_scaled", False):
        raise ValueError(
            f"Expected a function without a loss_scale for fun; got {fun!r}, which autocast cannot "
            f"look into. Write autocast(loss_fn, dtype, loss_scale=scale) once."
        )
    if isinstance(dtype, Plan) and plan_of(fun) is not None:
        raise ValueError(
            f"Expected a function without autocast for fun, with a Plan; got {fun!r}, which "
            f"autocast returned. Pass the function that it was given: fun.__wrapped__."
        )
    plan = named(dtype)
    cast: Any
    if isinstance(plan, Plan):
        caster = _Caster(DTYPES[plan.dtype], plan)
        cast = replayed(fun, caster.compute, caster.constant, plan.check, half=plan.dtype)
    else:
        half = plan if plan in DTYPES else "float16"
        caster = _Caster(DTYPES[half], card=H100 if plan == FLOAT8 else None)
        cast = replayed(fun, caster.compute, caster.constant, caster.look, caster.tell, half=half)
    cast.autocast_plan = plan
    return cast if loss_scale is None else self_scaled(cast, loss_scale)


class AutocastDecorator:
    """The decorator that `autocast` returns without a function."""

    def __init__(self, dtype: Any, loss_scale: float | None):
        self._dtype, self._loss_scale = named(dtype), loss_scale

    def __call__(self, fun: Callable[P, R]) -> Callable[P, R]:
        """Returns `autocast(fun, dtype, loss_scale=loss_scale)`."""
        return autocast(fun, self._dtype, loss_scale=self._loss_scale)

    def __enter__(self) -> Never:
        raise TypeError(
            "Expected gainstage.autocast around a function, as it is no context. Write "
            "loss_fn = gainstage.autocast(loss_fn), and call that."
        )

    def __exit__(self, *_: object) -> None: ...


def _is_scalar_type(x: object) -> bool:
    """Whether a value is a dtype as JAX and numpy write it, such as `jnp.float16`."""
    return isinstance(x, type) and (issubclass(x, np.generic) or hasattr(x, "dtype"))


def named(dtype: Any) -> str | Plan:
    """A plan, or the name of a dtype: "float16", "bfloat16" or "float8"."""
    if isinstance(dtype, Plan):
        return dtype
    name = dtype
    with contextlib.suppress(TypeError):
        name = _ALIASES.get(dtype, dtype) if isinstance(dtype, str) else jnp.dtype(dtype).name
    if not isinstance(name, str) or name not in (*DTYPES, FLOAT8):
        hint = " Read a plan from its file: Plan.load(path)." if ".json" in str(dtype) else ""
        raise ValueError(
            f"Expected one of {sorted([*DTYPES, FLOAT8])} or a Plan for dtype; got {dtype!r}.{hint}"
        )
    return name


def with_float8(fun: Callable[P, R]) -> Callable[P, R]:
    """`autocast(fun, "float8")` for a card that always gains by it: all linear layers that are not
    too narrow for the hardware."""
    caster = _Caster(DTYPES["float16"], card=ANY)
    return replayed(fun, caster.compute, caster.constant, caster.look, half="float16")


def plan_of(fun: Callable[..., Any]) -> str | Plan | None:
    """The plan with which `autocast` returned this function; None if it did not."""
    return getattr(fun, "autocast_plan", None)


class keep_float32(contextlib.ContextDecorator):  # noqa: N801 - reads as a statement
    """Operations inside stay in float32 under `autocast`: a context manager and a decorator.

    They are computed as they would be without `autocast`. By default JAX rounds the operands of
    float32 products to TF32 on an NVIDIA GPU, which has the digits of float16 and the range of
    float32, and to bfloat16 on a TPU. Where a product needs all digits of float32, say so as well:
    `with gs.keep_float32(), jax.default_matmul_precision("highest"):`.

    Examples:
        >>> import gainstage as gs
        >>> import jax, jax.numpy as jnp
        >>> @gs.keep_float32()
        ... def similarity(a, b):
        ...     return a @ b.T
        >>> def loss_fn(params, x):
        ...     h = x @ params
        ...     with gs.keep_float32():
        ...         return similarity(h, h).mean()
        >>> x = jnp.ones((2, 3))
        >>> print(str(jax.make_jaxpr(gs.autocast(loss_fn))(jnp.ones((3, 4)), x)).count("f16[2,2]"))
        0

    Source: `torch.autocast(enabled=False)`.
    """

    def __new__(cls, *args: Any) -> "keep_float32":
        if args:
            raise TypeError(
                "keep_float32 takes no arguments: write `with gainstage.keep_float32():`, or "
                "`@gainstage.keep_float32()` above the function."
            )
        return super().__new__(cls)

    def __enter__(self) -> None:
        scopes = contextlib.ExitStack()
        scopes.enter_context(jax.named_scope(KEEP_FLOAT32))  # of operations
        scopes.enter_context(IS_KEPT(True))  # of calls
        self._entered = [*getattr(self, "_entered", []), scopes]  # it may be entered again inside

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().close()

    def _recreate_cm(self) -> "keep_float32":
        return type(self)()  # a decorated function may call itself


class _Caster:
    """Computes operations in half precision, by a plan or by default.

    Args:
        dtype: the half-precision dtype.
        plan: which operations are in which dtype, None for the default.
        card: for which products are in float8, None for none.
    """

    def __init__(self, dtype: np.dtype, plan: Plan | None = None, card: Card | None = None):
        self._dtype, self._plan, self._card = dtype, plan, card
        self._needs = dict[Path, Need]()  # what must be exact, by operation
        self._products, self._told = 0, False  # products in float32 in the program; the warning
        self._float8s = 0  # products in float8
        self._too_small = list[Sizes]()  # linear layers for it

    def look(self, program: AnyJaxpr) -> None:
        """Looks at a program before it is computed."""
        self._needs = needs_of(program, self._dtype)
        self._products, self._float8s, self._too_small = 0, 0, []

    def tell(self, program: AnyJaxpr) -> None:
        """Warns once if no product of a program was computed in the dtype that was asked for."""
        every = list(jaxprs.equations(program))
        each = [eqn for eqn in every if eqn.primitive.name in PRODUCTS]
        dtypes = {jaxprs.array(v).dtype for eqn in each for v in eqn.invars}
        known = self._dtype in dtypes or not dtypes <= {SINGLE, *DTYPES.values()}
        kept = any(KEEPS.search(jaxprs.scopes(eqn)) for eqn in every)
        if dtypes == {np.dtype("float64")} and not (kept or self._told):
            self._told = True
            warn(
                f"autocast has computed no product in {self._dtype}: all {len(each)} are in "
                f"float64, which it leaves as it is. Under jax_enable_x64, ask for float32 where "
                f"you create parameters and inputs, as in jnp.zeros(4, jnp.float32)."
            )
        if self._card is not None and each and not (self._float8s or kept or self._told):
            self._told = True
            largest = max(self._too_small, key=lambda sizes: sizes.operations, default=None)
            why = f": the largest linear layer, {largest}, gains nothing on an {self._card.name}"
            warn(
                f"autocast has computed no product in float8{why if largest else ''}. They are in "
                f'{self._dtype}, as by "{self._dtype}". To choose by what the gradients show: '
                f'gainstage.precision.tune(fun, params, batches, dtype="float8").'
            )
        if each and not (self._products or known or kept or self._told):
            self._told = True
            warn(
                f"autocast has computed no product in {self._dtype}: {len(each)} are in functions "
                f"with derivatives of their own, where it casts nothing, or have been cast by the "
                f"function. Put gainstage.in_half around such a function, or leave its casts out."
            )

    def constant(self, x: ArrayLike) -> Retraced:
        """Says whether a constant may be rounded."""
        # What a function closes over and is differentiated is a parameter, as a bound variable is.
        if isinstance(x, Tracer):
            return Retraced(x, Kind.FREE if is_differentiated(x) else Kind.OTHER)
        if getattr(x, "dtype", SINGLE) != SINGLE:
            return Retraced(x)
        if not in_range(self._dtype, x):
            return Retraced(x)
        return Retraced(x, Kind.OFFSET if is_offset(x) else Kind.FREE)

    def compute(self, eqn: JaxprEqn, values: list[Retraced], path: Path) -> list[Retraced]:
        """Computes an operation, in half precision where that is right."""
        if eqn.primitive.name == "cond":  # a kernel of `in_half`; others are rebuilt
            self._products += 1
            is_half = self._plan is None or self._plan.dtype_of(path) in DTYPES
            return of_kernel(eqn, values) if is_half else as_written(eqn, values)
        wide = [is_float32(variable) for variable in eqn.invars]
        floats = [value for value, is_wide in zip(values, wide, strict=True) if is_wide]
        dtype = self._dtype_of(floats, path)
        held = [getattr(value.x, "dtype", None) == dtype for value in floats]
        is_half = bool(held) and all(held)
        self._products += bool(floats) and eqn.primitive.name in PRODUCTS
        if all(wide) and self._is_float8(eqn, values, held, path):
            return [Retraced(self._in_float8(eqn, *values))]
        if self._computes(eqn, floats, held, path):
            if eqn.primitive.name == "mul" and _broadcast(eqn, values):
                return [Retraced(self._product(eqn, dtype, *values))]
            is_planned = self._plan is not None
            if not all(holds(dtype, x, is_planned) for x in _numbers(eqn, values)):
                # Linear in the array, so that nothing is kept for the derivative.
                dtypes = [dtype if isinstance(v.x, jax.Array) else SINGLE for v in values]
                xs = [converted(v.x, own) for v, own in zip(values, dtypes, strict=True)]
                with jaxprs.inside(eqn):
                    product = jnp.multiply(*(x.astype(SINGLE) for x in xs))
                    return [Retraced(product.astype(dtype))]
            xs = [
                _rounded(eqn, value, dtype) if is_wide else value.x
                for value, is_wide in zip(values, wide, strict=True)
            ]
            return [Retraced(x) for x in in_dtype(eqn, xs, dtype, {SINGLE})]
        if self._plan is None:
            known = self._known(eqn, floats, held, path)
            if known is not None:
                return [known]
        elif is_half and power_of(eqn):
            return [Retraced(power(eqn, floats[0]))]
        if is_half and _is_activation(eqn) and not self._needs.get(path, Need.NOTHING):
            return [Retraced(x) for x in _activated(eqn, dtype, [v.x for v in floats])]
        is_exact = bool(self._needs.get(path, Need.NOTHING) & (Need.ALL | Need.OPERANDS))
        params = patterns.exact_params(eqn) if is_exact else None
        results = [value.x for value in as_written(eqn, values, params)]
        if is_half and eqn.primitive.name.startswith("custom_"):
            # Operations follow the result of a function with its own derivative, as of `softplus`.
            shapes = {jaxprs.array(v).shape for v in eqn.invars if is_float32(v)}
            results = [
                x.astype(dtype) if is_float32(v) and jaxprs.array(v).shape in shapes else x
                for v, x in zip(eqn.outvars, results, strict=True)
            ]
        kinds = [Kind.FREE if h else v.kind for v, h in zip(floats, held, strict=True)]
        kind = (
            Kind.POWER if _is_cheap_of_power(eqn, kinds) else _kind(eqn, [v.kind for v in floats])
        )
        return [Retraced(x, kind) for x in results]

    def _dtype_of(self, floats: Sequence[Retraced], path: Path) -> np.dtype:
        """The half-precision dtype of an operation. One that a plan does not name follows its
        operands."""
        planned = self._plan.dtype_of(path) if self._plan else ""
        if planned in DTYPES:
            return DTYPES[planned]
        found = {getattr(value.x, "dtype", None) for value in floats} if self._plan else set()
        return next((dtype for dtype in DTYPES.values() if dtype in found), self._dtype)

    def _is_float8(
        self, eqn: JaxprEqn, values: Sequence[Retraced], held: Sequence[bool], path: Path
    ) -> bool:
        """Whether an operation is a product in float8, by the plan or by default."""
        if self._plan is not None:
            return self._plan.dtype_of(path) == FLOAT8
        if self._card is None or eqn.primitive.name not in PRODUCTS:
            return False
        if self._width(eqn, values, held, path) is not Width.HALF:
            return False
        decision = decide(eqn, values, self._card)
        if decision is Float8Decision.TOO_SMALL:
            self._too_small.append(sizes_of(eqn, values))
        return decision is Float8Decision.FLOAT8

    def _in_float8(self, eqn: JaxprEqn, x: Retraced, w: Retraced) -> jax.Array:
        """A product in float8, whose result is in half precision."""
        self._float8s += 1
        with jaxprs.inside(eqn):
            left, right = (converted(value.x, self._dtype) for value in (x, w))
            dims, sharding = eqn.params["dimension_numbers"], eqn.params["out_sharding"]
            how = ProductSpec(dims, self._dtype, left.dtype, right.dtype, sharding)
            return multiply(how, left, right, x.once(to_operand), w.once(to_operand))

    def _known(
        self, eqn: JaxprEqn, floats: Sequence[Retraced], held: Sequence[bool], path: Path
    ) -> Retraced | None:
        """The result of an operation that has a default of its own, else None."""
        name, is_half = eqn.primitive.name, bool(held) and all(held)
        if is_half and power_of(eqn):
            return Retraced(power(eqn, floats[0]), Kind.POWER)
        if name in PRODUCTS and self._width(eqn, floats, held, path) is Width.RESULT:
            return Retraced(wide_product(eqn, [converted(v.x, self._dtype) for v in floats]))
        of_power = any(value.kind is Kind.POWER for value in floats)
        if of_power and name in BOUNDED and path not in self._needs:
            return Retraced(bounded(eqn, floats[0].x, self._dtype))
        return None

    def _width(
        self, eqn: JaxprEqn, floats: Sequence[Retraced], held: Sequence[bool], path: Path
    ) -> Width:
        """What of a product is in float32 by default."""
        need = self._needs.get(path, Need.NOTHING)
        if need & (Need.ALL | Need.OPERANDS):
            return Width.ALL
        is_batched, is_square = _is_batched(floats), Need.SQUARE in need
        return width(eqn, held, is_batched, is_square, leads=Need.RESULT in need)

    def _product(self, eqn: JaxprEqn, dtype: np.dtype, *values: Retraced) -> jax.Array:
        """A product with a broadcast operand. A factor of a layer, which may be small, stays in
        float32, unless a plan has measured it; that of a normalisation is about 1."""
        is_measured = self._plan is not None or any(v.kind is Kind.NORMALISED for v in values)
        wide = (bool(_broadcast(eqn, [v])) for v in values)
        pairs = zip(values, wide, strict=True)
        xs = [v.float32 if w else converted(v.x, dtype) for v, w in pairs]
        return broadcast_product(eqn, xs, dtype if is_measured else SINGLE, dtype)

    def _computes(
        self, eqn: JaxprEqn, floats: Sequence[Retraced], held: Sequence[bool], path: Path
    ) -> bool:
        """Whether an equation is computed in half precision.

        Args:
            eqn: an equation without a program inside.
            floats: its operands that are float32 in the program.
            held: whether each of them is in half precision.
            path: where it is.
        """
        if eqn.primitive.name in jaxprs.OF_DEVICES:  # cotangents are added up in float32
            return False
        if self._plan is not None and not moves(eqn):
            return self._plan.dtype_of(path) in DTYPES
        if eqn.primitive.name in PRODUCTS:
            return self._width(eqn, floats, held, path) is Width.HALF
        is_by_much = any(abs(x) >= LARGE_FACTOR for x in _numbers(eqn, floats))
        need = self._needs.get(path, Need.NOTHING)
        # What meets a value on the way to a result, such as a bias, may be larger than that.
        is_last = Need.LAST in need and not all(held)
        if need & ~Need.LAST or is_last or power_of(eqn) or is_by_much:
            return False
        if not (moves(eqn) or eqn.primitive.name in FOLLOWERS):
            return False
        free = {v.kind for v, is_held in zip(floats, held, strict=True) if not is_held}
        if Kind.OFFSET in free and eqn.primitive.name not in ("add", "sub"):
            free = free - {Kind.OFFSET} | {Kind.FREE}
        # The factors and biases after a normalisation are parameters that are broadcast.
        is_normalised = free == {Kind.FREE, Kind.NORMALISED} and bool(_broadcast(eqn, floats))
        return free <= {Kind.FREE, Kind.NORMALISED} and (any(held) or is_normalised)


def _rounded(eqn: JaxprEqn, value: Retraced, dtype: np.dtype) -> jax.Array:
    """An operand of an operation in half precision."""
    x = value.x
    if eqn.primitive.name in ("add", "sub") and _broadcast(eqn, [value]):
        # The derivative of a bias is a sum over an axis, which stays in float32.
        x = jnp.broadcast_to(value.float32, jaxprs.array(eqn.outvars[0]).shape)
    return converted(x, dtype)


def _numbers(eqn: JaxprEqn, values: Sequence[Retraced]) -> list[float]:
    """The numbers of the program in a product of elements."""
    each = (v.x for v in values if not isinstance(v.x, jax.Array) and np.ndim(v.x) == 0)
    return [float(x) for x in each] if eqn.primitive.name == "mul" else []


def _kind(eqn: JaxprEqn, kinds: Sequence[Kind]) -> Kind:
    """The kind of the result of an operation in float32."""
    name = eqn.primitive.name
    if name in ("sqrt", "rsqrt"):
        return Kind.ROOT if name == "sqrt" else Kind.INVERSE
    if moves(eqn) and len(set(kinds)) == 1:
        return kinds[0]
    return KINDS.get((name, *kinds), Kind.OTHER)


def _broadcast(eqn: JaxprEqn, values: Sequence[Retraced]) -> list[Retraced]:
    """Those arrays among the operands that an equation broadcasts."""
    shape = jaxprs.array(eqn.outvars[0]).shape
    return [v for v in values if isinstance(v.x, jax.Array) and v.x.shape != shape]


def _is_activation(eqn: JaxprEqn) -> bool:
    """Whether an equation is a function such as `relu`: cheap, with its own derivative."""
    if eqn.primitive.name != "custom_jvp_call" or not all(map(is_float32, eqn.invars)):
        return False
    parts = jaxprs.equations(eqn.params["call_jaxpr"])
    return all(moves(e) or e.primitive.name in FOLLOWERS or jaxprs.called(e) for e in parts)


def _activated(eqn: JaxprEqn, dtype: np.dtype, xs: Sequence[jax.Array]) -> list[jax.Array]:
    """The results of an activation and its derivative in half precision, by default."""
    caster = _Caster(dtype)

    def half(program: Any, xs: Sequence[jax.Array]) -> list[jax.Array]:
        evaluate = function_of(caster.compute, caster.constant, program, ())
        return [value.x.astype(dtype) for value in evaluate(*map(Retraced, xs))]

    @jax.custom_jvp
    def activation(*xs: jax.Array) -> list[jax.Array]:
        return half(eqn.params["call_jaxpr"], xs)

    @activation.defjvp
    def derivative(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> Any:
        def pushed(primals: Any, tangents: Any) -> Any:
            return jax.jvp(lambda *xs: jaxprs.bind(eqn, list(xs)), primals, tangents)

        wide = [jax.ShapeDtypeStruct(x.shape, SINGLE) for x in primals]
        found = half(jax.make_jaxpr(pushed)(tuple(wide), tuple(wide)), [*primals, *tangents])
        return found[: len(found) // 2], found[len(found) // 2 :]

    return activation(*xs)


def _is_cheap_of_power(eqn: JaxprEqn, kinds: Sequence[Kind]) -> bool:
    """Whether an operation adds or multiplies powers and what may be rounded."""
    is_cheap = eqn.primitive.name in ("add", "sub", "mul", "neg")
    return is_cheap and Kind.POWER in kinds and set(kinds) <= {Kind.POWER, Kind.FREE}


def _is_batched(values: Sequence[Retraced]) -> bool:
    """Whether `jax.vmap` around the function gives some operands another axis."""
    return any(is_batched(value.x) for value in values)
