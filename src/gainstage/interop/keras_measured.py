"""What each precision costs a Keras model, and plans for it, measured on some batches."""

# Keras is not typed.
# pyright: reportCallIssue=false

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gainstage._base import checks
from gainstage._variables.types import PyTree
from gainstage.interop.keras_attention import use_fused_attention
from gainstage.interop.keras_autocast import Autocast, Unscaled, plain_class, refuse_mixed, seen_as
from gainstage.interop.keras_backend import keras
from gainstage.precision.advice import Advice, dtype_as_code, measured_advice
from gainstage.precision.autocast import keep_float32, plan_for
from gainstage.precision.find_plan import measured_plan
from gainstage.precision.noise_and_bias import MAX_BIAS, MAX_NOISE
from gainstage.precision.plan import FLOAT8, Plan
from gainstage.transforms.value_and_grad import LossFunction

TAKEN = 4  # batches of a dataset


def advise(
    model: Any,
    batches: Iterable[PyTree],
    *,
    card: str | None = None,
    progress: bool = True,
) -> Advice:
    """Measures what each precision costs the training of a Keras model, on some batches.

    It is `gainstage.advise` of the loss with which the model was compiled, with its
    regularisation. All batches are computed with `training=True` from the present state of the
    model: dropout has one mask for all. The model stays as it is.

    Args:
        model: a float32 model that is built and compiled, also one under `autocast`.
        batches: a list of `(x, y)` or `(x, y, sample_weight)`, which is used whole. Or anything
            that yields those, such as a `keras.utils.PyDataset`, of which the first four are.
        card, progress: as for `gainstage.advise`.

    Returns:
        An `Advice`; `print` it. Its lines of code are those for `fit`.

    Raises:
        TypeError: `model` is not a Keras model, or `batches` are not batches.
        ValueError: `model` is not built and compiled, has a `train_step` of its own or a policy
            such as `mixed_float16`, or as from `gainstage.advise`.

    Examples:
        >>> import keras, numpy as np
        >>> from gainstage.interop.keras import advise
        >>> keras.utils.set_random_seed(0)
        >>> model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(16)])
        >>> model.compile("adam", "mse")
        >>> x = np.random.default_rng(0).normal(size=(4, 32, 16))
        >>> advice = advise(model, [(each, np.sin(each)) for each in x])
        >>> for line in advice.recommended.code:
        ...     print(line)
        from gainstage.interop.keras import autocast
        model = autocast(model, "bfloat16")
        model.compile(optimizer, ...)
    """
    weights, others, metrics = _model_values(model)
    refuse_mixed(model)
    use_fused_attention()
    refuse_own_step(model, "gainstage.advise")
    calls = [(others, metrics, *as_arrays(batch)) for batch in first(batches)]
    loss_fn, plain = _training_loss(model), plain_class(model)

    def cast(dtype: str) -> Callable[..., Any]:
        plan = plan_for(dtype)

        @functools.wraps(loss_fn)
        def half(*args: Any) -> Any:
            with _cast(model, plan, plain):
                return loss_fn(*args)

        vars(half)["plan"] = plan
        return half

    with seen_as(model, _MeasuredModel):
        return measured_advice(
            LossFunction(loss_fn), weights, calls, card=card, progress=progress, code=_code,
            cast=cast,
        )  # fmt: skip


def find_plan(
    model: Any,
    batches: Iterable[PyTree],
    *,
    dtype: str = "float16",
    max_noise: float = MAX_NOISE,
    max_bias: float = MAX_BIAS,
    max_error: float | None = None,
    card: str | None = "H100",
    progress: bool = True,
) -> Plan:
    """Measures which operations of a Keras model may be in half precision or float8, in training.

    It is `gainstage.precision.find_plan` of the loss with which the model was compiled, on the
    state in which the model is.

    Args:
        model: a Keras model that is built and compiled, with trained weights or those of the start.
        batches: as for `advise`; with `max_error` a list of one batch is enough.
        dtype, max_noise, max_bias, max_error, card, progress: as for
            `gainstage.precision.find_plan`.

    Returns:
        A `Plan` for `autocast`; `print` it.

    Raises:
        TypeError: `model` is not a Keras model, or `batches` are not batches.
        ValueError: `model` is not built and compiled, or as from `gainstage.precision.find_plan`.

    Examples:
        >>> import keras, numpy as np
        >>> from gainstage.interop.keras import autocast, find_plan
        >>> model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(16)])
        >>> model.compile("sgd", "mse")
        >>> xs = np.random.default_rng(0).normal(size=(2, 32, 16))
        >>> plan = find_plan(model, [(x, np.ones((32, 16))) for x in xs])
        >>> print([operation.name for operation in plan.entries])
        ['dot_general', 'add']
        >>> model = autocast(model, plan)
    """
    weights, others, metrics = _model_values(model)
    use_fused_attention()
    calls = [(others, metrics, *as_arrays(batch)) for batch in first(batches)]
    loss_fn, plan = _training_loss(model), plan_for("float16" if dtype == FLOAT8 else dtype)
    with _cast(model, plan, plain_class(model)):
        return measured_plan(
            LossFunction(loss_fn), loss_fn, weights, calls,
            dtype=dtype, max_noise=max_noise, max_bias=max_bias,
            max_error=max_error, card=card, progress=progress,
        )  # fmt: skip


@contextlib.contextmanager
def _cast(model: Any, plan: Plan, plain: type) -> Iterator[None]:
    """A model of a plain class computes by a plan inside, with a loss in float32 that nothing
    multiplies."""
    known = type(model)
    half = vars(model).pop("_half", None)
    own = {"_plain": plain, "_plan": plan}
    model.__class__ = type(plain.__name__, (_MeasuredModel, Autocast, plain), own)
    try:
        yield
    finally:
        model.__class__ = known
        vars(model).pop("_half", None)
        vars(model).update({"_half": half} if half is not None else {})


def refuse_own_step(model: Any, other: str) -> None:
    """Raises a ValueError for a model whose loss is not the one that Keras differentiates.

    Args:
        model: a Keras model.
        other: the function that takes such a loss.
    """
    plain = plain_class(model)
    for name in ("train_step", "compute_loss_and_updates"):
        if getattr(plain, name) is not getattr(keras.Model, name):
            raise ValueError(
                f"Expected a model that is trained by Keras's `{name}`; got {model.name!r}, whose "
                f"class {plain.__name__} has its own. Pass its loss, as a function of the weights, "
                f"to {other}."
            )


def _model_values(model: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """The values of the weights of a model, of its other variables, and of those of its metrics.

    Raises:
        TypeError, ValueError: `model` is not a Keras model that is built and compiled.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"Expected a Keras model; got {model!r}.")
    if not (model.built and model.compiled):
        raise ValueError(
            f"Expected a model that is built and compiled, so that it has weights and a loss; got "
            f"{model.name!r}. Call model.compile(...), and model.build(input_shape) or model(x)."
        )
    groups = model.trainable_variables, model.non_trainable_variables, model.metrics_variables
    weights, others, metrics = ([v.value for v in group] for group in groups)
    return weights, others, metrics


def _training_loss(model: Any) -> Callable[..., jax.Array]:
    """The loss of a measured model in training, as `compile` has set it: a function of its
    values and a batch."""

    def loss_fn(weights: PyTree, others: PyTree, metrics: PyTree, *batch: PyTree) -> jax.Array:
        return model.compute_loss_and_updates(weights, others, metrics, *batch, training=True)[0]

    return loss_fn


class _MeasuredModel(Unscaled):
    """A base of models whose `stateless_call` is measured: no loss is scaled, and what comes after
    the call stays in float32."""

    def stateless_compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        own: Any = super()
        with keep_float32():
            return own.stateless_compute_loss(*args, **kwargs)


def _code(dtype: str, is_scaled: bool) -> tuple[str, ...]:
    """The lines for `fit` in a precision."""
    if dtype == "float32":
        return ("model.compile(optimizer, ...)",)
    names = "LossScaleOptimizer, autocast" if is_scaled else "autocast"
    optimizer = "LossScaleOptimizer(optimizer)" if is_scaled else "optimizer"
    # Else `compile` wraps the optimizer by itself.
    alone = ", auto_scale_loss=False" if dtype == "float16" and not is_scaled else ""
    return (
        f"from gainstage.interop.keras import {names}",
        f"model = autocast(model, {dtype_as_code(dtype)})",
        f"model.compile({optimizer}, ...{alone})",
    )


def first(batches: Any, count: int | None = None) -> list[PyTree]:
    """The first batches: by default all of a list, and `TAKEN` of a dataset."""
    is_dataset = isinstance(batches, keras.utils.PyDataset)  # it may have no end
    is_one = isinstance(batches, (str, tuple, Mapping)) or hasattr(batches, "shape")
    if is_one or not (is_dataset or isinstance(batches, Iterable)):
        raise TypeError(
            f"Expected a list of batches, such as [(x1, y1), (x2, y2)], or a dataset; got "
            f"{checks.brief(batches)}."
        )
    if isinstance(batches, Sequence):
        return list(batches[:count])
    count = count or TAKEN
    if is_dataset:
        dataset: Any = batches
        return [dataset[number] for number in range(min(dataset.num_batches or count, count))]
    return list(itertools.islice(batches, count))


def as_arrays(batch: PyTree) -> PyTree:
    """A batch as Keras takes it, `(x, y, sample_weight)`, in arrays of JAX."""
    x_y_weight = keras.utils.unpack_x_y_sample_weight(batch)
    return jax.tree.map(
        lambda x: x if isinstance(x, jax.Array) else jnp.asarray(np.asarray(x)), x_y_weight
    )
