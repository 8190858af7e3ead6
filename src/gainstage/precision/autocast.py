"""Functions in half precision: products in float16, and what needs float32 in float32."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Never, TypeAlias, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from gainstage._base._jax import JaxprEqn
from gainstage._base.checks import brief
from gainstage._base.warn import warn
from gainstage._programs import jaxprs
from gainstage._programs.code_lines import code_lines
from gainstage._programs.in_dtype import converted, is_float32
from gainstage._programs.jaxprs import AnyJaxpr, Path
from gainstage._programs.operations import PRODUCTS
from gainstage._programs.scopes import KEEP_FLOAT32, KEEPS
from gainstage._variables.types import P, R
from gainstage.precision.calls import Call
from gainstage.precision.cards import ANY, H100, Card
from gainstage.precision.float8_product import ProductSpec, multiply, to_operand
from gainstage.precision.float8_rule import Sizes, float8_sizes, pays
from gainstage.precision.needs import Need, needs_of
from gainstage.precision.plan import DTYPES, FLOAT8, RESULT, WIDE, Plan
from gainstage.precision.policy import (
    Level,
    default,
    half,
    level_of,
    may_round,
    measured,
    multiplied,
    rounded_constant,
)
from gainstage.transforms.retrace import (
    IS_KEPT,
    SINGLE,
    Replay,
    Retraced,
    as_written,
    of_kernel,
    replayed,
)
from gainstage.transforms.self_scaled import self_scaled

Precision: TypeAlias = str | Plan | DTypeLike

__all__ = ["autocast", "keep_float32"]

# Other names of dtypes, which people know from elsewhere.
_ALIASES = {
    "fp16": "float16", "f16": "float16", "half": "float16",
    "bf16": "bfloat16", "fp8": "float8", "fp32": "float32",
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
    and results in half precision, and operations that are cheap follow their operands. A product
    of small matrices stays in float32 (two of its three sides at most 32, one of these at most 8),
    and the result of one with at most 8 columns, or rows, is float32: no matrix unit computes them
    faster. Sums,
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
      Pallas kernels are computed in the dtypes that they were written in. Cheap ones, such as
      `jax.nn.relu`, follow their operands. `half_only` gives them half precision. A backward pass
      of yours gets true cotangents where the loss is scaled by `train_step`, `value_and_grad`, an
      optimizer or a `loss_scale` here, unless it computes in float16, which needs the scale.
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
      `gainstage.skip_nonfinite` around the optimizer, if that may happen.

    Args:
        fun: a function of pytrees or models, such as a loss; without it, a decorator is returned.
            Models of Keras have `gainstage.interop.keras.autocast`.
        dtype: "float16" or "bfloat16", the dtype of products, also by short names such as "fp16",
            or as a dtype; or "float8", for linear layers that are large enough for an H100 to gain
            by it, all else as by "float16"; or "float32", which leaves the function as it is. Also
            a `Plan` for `fun`, which `gainstage.mend` or `gainstage.precision.find_plan` has
            measured.
        loss_scale: the loss scale at the first try of a step, > 0 and at most `2**126`, if
            a trainer differentiates `fun`; a power of two causes no rounding. None if a scale is
            elsewhere, or none is needed. A loss that sums over the data may need one below 1.

    Raises:
        TypeError: `fun` is not callable, or a model of Keras, or `loss_scale` is not a number; from
            the call with a `loss_scale`, the loss is not a scalar.
        ValueError: another dtype; `loss_scale` is out of range; `fun` has a `loss_scale` already,
            or is what `autocast` returned, with a `Plan`; from the call, the plan of another
            function.

    Examples:
        >>> import gainstage as gs
        >>> import jax, jax.numpy as jnp
        >>> def loss_fn(params, x):
        ...     return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)
        >>> params = {"w": jnp.full((16, 16), 0.1), "b": jnp.zeros(16)}
        >>> loss, grads = jax.value_and_grad(gs.autocast(loss_fn))(params, jnp.ones((16, 16)) / 4)
        >>> print(loss.dtype, grads["w"].dtype, f"{loss:.4f}")
        float32 float32 0.1443

        With a scale of its own, for a trainer that calls `jax.grad`:

        >>> trainer_loss = gs.autocast(loss_fn, loss_scale=2.0**15)
        >>> same = jax.grad(trainer_loss)(params, jnp.ones((16, 16)) / 4)
        >>> print(jnp.allclose(same["w"], grads["w"], rtol=0.01))
        True

    Source: `torch.autocast`; Micikevicius et al., 2018, arXiv:1710.03740.
    """
    if fun is None or isinstance(fun, (str, Plan, np.dtype)) or _is_scalar_type(fun):
        if callable(dtype) and not _is_scalar_type(dtype):
            raise TypeError(
                f"Expected the function first, and then its dtype; got {fun!r} and {dtype!r}. "
                f"Write autocast({getattr(dtype, '__name__', 'loss_fn')}, {fun!r})."
            )
        return AutocastDecorator(dtype if fun is None else fun, loss_scale)
    if hasattr(fun, "stateless_call") and hasattr(fun, "fit"):
        raise TypeError(
            f"Expected a function for fun; got the Keras model {brief(fun)}. Write "
            f"gainstage.interop.keras.autocast(model); its optimizer scales the loss."
        )
    if not callable(fun):
        raise TypeError(f"Expected a function for fun; got {brief(fun)}.")
    if getattr(fun, "is_train_step", False):
        raise TypeError(
            f"Expected a loss for fun; got {brief(fun)}, which also updates. Write "
            f"gainstage.train_step(gainstage.autocast(loss_fn, {dtype!r}))."
        )
    if getattr(fun, "is_self_scaled", False):
        raise ValueError(
            f"Expected a function without a loss_scale for fun; got {fun!r}, which autocast cannot "
            f"look into. Write autocast(loss_fn, dtype, loss_scale=scale) once."
        )
    if isinstance(own := getattr(fun, "plan", None), Plan) and own.dtype != _dtype_name(dtype):
        raise ValueError(
            f"Expected a function without autocast for fun; got {fun!r}, which autocast returned. "
            f"Pass what it was given: fun.__wrapped__. One call has one dtype or Plan."
        )
    if is_no_cast(dtype):
        return fun if loss_scale is None else self_scaled(fun, loss_scale)
    plan = plan_for(dtype)
    casting = Casting(plan, H100 if plan.dtype == FLOAT8 else None)
    cast: Any = replayed(fun, casting.begin, half=casting.dtype.name)
    cast.plan = plan
    return cast if loss_scale is None else self_scaled(cast, loss_scale)


class AutocastDecorator:
    """The decorator that `autocast` returns without a function."""

    def __init__(self, dtype: Any, loss_scale: float | None):
        self._dtype = WIDE if is_no_cast(dtype) else plan_for(dtype)
        self._loss_scale = loss_scale

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


def is_no_cast(dtype: Any) -> bool:
    """Whether a function is to be computed as it is written: in "float32"."""
    return _dtype_name(dtype) == WIDE


def _dtype_name(dtype: Any) -> Any:
    """The name of a dtype, also of a short one; anything else as it is."""
    if isinstance(dtype, Plan):
        return None
    with contextlib.suppress(TypeError):
        return _ALIASES.get(dtype, dtype) if isinstance(dtype, str) else jnp.dtype(dtype).name
    return dtype


def plan_for(dtype: Any) -> Plan:
    """A plan as it is, or the one without rows for the name of a dtype: "float16", "bfloat16" or
    "float8"."""
    if isinstance(dtype, Plan):
        return dtype
    name = _dtype_name(dtype)
    if not isinstance(name, str) or name not in (*DTYPES, FLOAT8):
        hint = " Read a plan from its file: Plan.load(path)." if ".json" in str(dtype) else ""
        raise ValueError(
            f"Expected one of {sorted([*DTYPES, WIDE, FLOAT8])} or a Plan for dtype; got "
            f"{dtype!r}.{hint}"
        )
    return Plan(name)


def with_float8(fun: Callable[P, R]) -> Callable[P, R]:
    """`autocast(fun, "float8")` for a card that always gains by it: all linear layers that are not
    too narrow for the hardware."""
    casting = Casting(Plan(FLOAT8), card=ANY, tells=False)
    return replayed(fun, casting.begin, half="float16")


def without(fun: Callable[P, R], *rows: str) -> Callable[P, R]:
    """`autocast(fun)` without some rows of the policy, or some needs, for a study of what each is
    for."""
    casting = Casting(Plan("float16"), without=frozenset(rows), tells=False)
    return replayed(fun, casting.begin, half="float16")


def plan_of(fun: Callable[..., Any]) -> Plan | None:
    """The plan of a function from `autocast`, also of one that `functools.partial`, `jax.jit` or
    `functools.wraps` has made of it; None of another."""
    made: Any = fun
    while made is not None:
        plan = getattr(made, "plan", None)
        if isinstance(plan, Plan):
            return plan
        made = getattr(made, "func", None) or getattr(made, "__wrapped__", None)
    return None


class _RefusesWith(type):
    """The class of a context that is to be called: `with keep_float32:` says so."""

    def __enter__(cls) -> Never:
        raise TypeError("keep_float32 is called: write `with gainstage.keep_float32():`.")

    def __exit__(cls, *_: object) -> None: ...


class keep_float32(  # noqa: N801 - reads as a statement
    contextlib.ContextDecorator, metaclass=_RefusesWith
):
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
        >>> w, x = jnp.ones((16, 16)), jnp.ones((32, 16))
        >>> print(str(jax.make_jaxpr(gs.autocast(loss_fn))(w, x)).count("f16[32,32]"))
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


class Casting(NamedTuple):
    """How operations are computed in half precision: by a plan, and else by the lists of
    `policy.py`.

    Args:
        plan: which operations are in which dtype, and the dtype of the default.
        card: for which products are in float8, None for none.
        without: the names of rows of the lists, and of needs, that are left out, in a study.
        tells: whether it warns if it casts nothing.
    """

    plan: Plan
    card: Card | None = None
    without: frozenset[str] = frozenset()
    tells: bool = True

    @property
    def dtype(self) -> np.dtype:
        """The half-precision dtype."""
        return DTYPES["float16" if self.plan.dtype == FLOAT8 else self.plan.dtype]

    def begin(self, program: AnyJaxpr) -> Replay:
        """How one program is computed."""
        more, instead = PLANNED.value, INSTEAD.value
        casting = self if more is None else self._replace(plan=self.plan.with_plan(more))
        if instead is not None:
            return instead.begin(casting, program)
        caster = Caster(casting, program, self.plan)
        is_told = self.tells and not casting.plan.entries
        return Replay(caster.compute, caster.constant, caster.tell if is_told else lambda: None)


# What is done instead of casting in a call, to measure it, by its `begin(casting, program)`; and a
# plan whose rows are added to those of each function under autocast. Compiled functions are traced
# for each.
INSTEAD: Any = jax.make_user_context(None)
PLANNED: Any = jax.make_user_context(None)


def under_plan(fun: Callable[..., Any], plan: Plan) -> Any:
    """A function in which autocast is called, with the rows of a plan in all of its programs that
    have them."""

    @functools.wraps(fun)
    def planned(*args: Any, **kwargs: Any) -> Any:
        outer: Plan | None = PLANNED.value
        with PLANNED(plan if outer is None else plan.with_plan(outer)):
            return fun(*args, **kwargs)

    result: Any = planned
    result.plan = plan
    if isinstance(getattr(fun, "__dict__", {}).get("plan"), Plan):  # what `autocast` returned
        result.__wrapped__ = getattr(fun, "__wrapped__", fun)
    return result


class Caster:
    """Computes the operations of one program in half precision.

    Args:
        casting: how.
        program: the program.
        fits: a plan that must fit the program, None for none.
    """

    def __init__(self, casting: Casting, program: AnyJaxpr, fits: Plan | None = None):
        self._casting, self._dtype, self._card = casting, casting.dtype, casting.card
        self._program = program
        self._planned = dict[Path, str]()  # the dtypes by the plan
        if casting.plan.entries:
            lines = code_lines(program)
            if fits is not None:
                fits.check(lines)
            each = ((path, casting.plan.dtype_of(line.key)) for path, line in lines.items())
            self._planned = {path: dtype for path, dtype in each if dtype}
        self._needs = needs_of(program, self._dtype, casting.without)  # what must be exact
        self._products = 0  # in float32 in the program
        self._float8s = 0  # products in float8
        self._too_small = list[Sizes]()  # linear layers for it

    def tell(self) -> None:
        """Warns if no product of the program was computed in the dtype that was asked for."""
        every = list(jaxprs.equations(self._program))
        each = [eqn for eqn in every if eqn.primitive.name in PRODUCTS]
        dtypes = {jaxprs.array(v).dtype for eqn in each for v in eqn.invars}
        is_known = self._dtype in dtypes or not dtypes <= {SINGLE, *DTYPES.values()}
        if any(KEEPS.search(jaxprs.scopes(eqn)) for eqn in every):
            return
        if dtypes == {np.dtype("float64")}:
            warn(
                f"autocast has computed no product in {self._dtype}: all {len(each)} are in "
                f"float64, which it leaves as it is. Under jax_enable_x64, ask for float32 where "
                f"you create parameters and inputs, as in jnp.zeros(4, jnp.float32)."
            )
        elif self._card is not None and each and not self._float8s:
            largest = max(self._too_small, key=lambda sizes: sizes.operations, default=None)
            why = f": the largest linear layer, {largest}, gains nothing on an {self._card.name}"
            warn(
                f"autocast has computed no product in float8{why if largest else ''}. They are in "
                f'{self._dtype}, as by "{self._dtype}". To choose by what the gradients show: '
                f'gainstage.precision.find_plan(fun, params, batches, dtype="float8").'
            )
        elif each and not (self._products or is_known):
            warn(
                f"autocast has computed no product in {self._dtype}: {len(each)} are in functions "
                f"with derivatives of their own, where it casts nothing, or have been cast by the "
                f"function. Put gainstage.half_only around such a function, or leave its casts out."
            )

    def constant(self, x: ArrayLike) -> Retraced:
        """Says whether a constant may be rounded."""
        return rounded_constant(x, self._dtype)

    def compute(self, eqn: JaxprEqn, values: list[Retraced], path: Path) -> list[Retraced]:
        """Computes an operation, in half precision where a plan, or the policy, says so."""
        planned = self._planned.get(path, "")
        if eqn.primitive.name == "cond":  # a kernel of `half_only`; others are rebuilt
            self._products += 1
            return as_written(eqn, values) if planned == WIDE else of_kernel(eqn, values)
        call = self.call(eqn, values, path)
        is_product = call.name in PRODUCTS
        self._products += bool(call.floats) and is_product
        if planned == WIDE:
            return measured(call)
        if is_product:
            level = self.level(call, path)
            return self._in_float8(call) if level is Level.FLOAT8 else multiplied(call, level)
        if self._narrowed(call, planned) is not None:
            return half(call, is_planned=True)
        return default(call, self._casting.without)

    def _narrowed(self, call: Call, planned: str) -> Level | None:
        """The level of an operation that the plan has in half precision or float8; None of others.

        Not all operations of a line may be: `find_plan` has not measured those that `may_round`
        leaves out, and a product may be too narrow for float8.
        """
        if planned not in (*DTYPES, FLOAT8) or not may_round(call):
            return None
        if planned == FLOAT8 and float8_sizes(call.eqn, call.values, only_linear=False):
            return Level.FLOAT8
        if self._card is not None:  # a row in half precision is what `mend` takes out of float8
            return None
        return Level.BFLOAT16 if planned == "bfloat16" else Level.HALF

    def level(self, call: Call, path: Path) -> Level:
        """The level of a product: by the plan, by the policy, or as the card computes it faster."""
        planned = self._planned.get(path, "")
        narrowed = self._narrowed(call, planned)
        if narrowed is not None:
            return narrowed
        own = level_of(call, self._casting.without)
        if own is not Level.HALF or planned:
            return max(own, {RESULT: Level.RESULT, WIDE: Level.FLOAT32}.get(planned, own))
        sizes = float8_sizes(call.eqn, call.values)
        if self._card is None or sizes is None:
            return own
        if pays(sizes, self._card):
            return Level.FLOAT8
        self._too_small.append(sizes)
        return own

    def call(self, eqn: JaxprEqn, values: list[Retraced], path: Path) -> Call:
        """An operation with its half-precision dtype: that of the plan, or of its operands."""
        dtype = self._dtype
        if self._planned:
            pairs = zip(values, eqn.invars, strict=True)
            found = {getattr(value.x, "dtype", None) for value, v in pairs if is_float32(v)}
            own = next((dtype for dtype in DTYPES.values() if dtype in found), dtype)
            dtype = DTYPES.get(self._planned.get(path, ""), own)
        return Call(eqn, values, dtype, self._needs.get(path, Need.NOTHING))

    def _in_float8(self, call: Call) -> list[Retraced]:
        """A product in float8, whose result is in half precision."""
        self._float8s += 1
        x, w = call.values
        params = call.eqn.params
        with jaxprs.inside(call.eqn):
            left, right = (converted(value.x, self._dtype) for value in (x, w))
            dims, sharding = params["dimension_numbers"], params["out_sharding"]
            how = ProductSpec(dims, self._dtype, left.dtype, right.dtype, sharding)
            return [Retraced(multiply(how, left, right, x.once(to_operand), w.once(to_operand)))]
