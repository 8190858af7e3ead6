"""Float32 models of Keras that compute in half precision, in `fit` and all that it is made of."""

# Keras is not typed.
# pyright: reportCallIssue=false

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gainstage._programs.true_cotangents import called_at
from gainstage._variables.types import PyTree
from gainstage.interop.keras_attention import use_fused_attention
from gainstage.interop.keras_backend import PACKAGE, keras
from gainstage.interop.keras_first_epoch import FirstEpoch
from gainstage.interop.keras_loss_scale import LossScaleOptimizer
from gainstage.precision.autocast import Precision, is_no_cast, plan_for
from gainstage.precision.autocast import autocast as autocast_function
from gainstage.precision.plan import Plan


def autocast(model: Any, dtype: Precision = "float16") -> Any:
    """Makes a float32 model of Keras compute in half precision; its weights stay float32.

    It is `gainstage.autocast` for `fit`, `evaluate`, `predict`, `train_on_batch` and all else that
    uses `model.stateless_call`, such as your own `train_step`. The loss and the metrics are
    computed in float32. `model(x)` itself is computed in float32 too.

    A step that is not finite keeps all state of the model: weights, moving means, and the seeds of
    `Dropout`. For that, `compile` wraps an optimizer in `LossScaleOptimizer`, as Keras does under
    its policy `mixed_float16`; `auto_scale_loss=False` leaves it out. In float16 and float8 it
    scales the loss too, which bfloat16 does not need.

    On a GPU, layers of attention take the fused kernel of Keras, as under `mixed_float16`, unless
    they have dropout. `keras.config.disable_flash_attention()` leaves it out.

    Args:
        model: a Keras model, built or not, compiled or not. Its class becomes a subclass of its
            own. What is saved, loaded, pickled or cloned stays under autocast, but for a clone of
            a `keras.Sequential`: call this function on it.
        dtype: as for `gainstage.autocast`. What `find_plan` has measured is for training: with
            `training=False`, as in `evaluate` and `predict`, the model is then computed in
            float32.

    Returns:
        The same model.

    Raises:
        TypeError: `model` is not a Keras model.
        ValueError: another dtype, or a layer has a policy such as `mixed_float16` already.

    Examples:
        >>> import keras, numpy as np
        >>> from gainstage.interop.keras import autocast
        >>> model = keras.Sequential([keras.layers.Dense(8, "gelu"), keras.layers.Dense(1)])
        >>> model = autocast(model)
        >>> model.compile("sgd", "mse")
        >>> history = model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0)
        >>> print(type(model.optimizer).__name__, model.layers[0].kernel.dtype)
        LossScaleOptimizer float32
    """
    check_model(model)
    if is_no_cast(dtype):
        return under(None, model)
    plan = plan_for(dtype)
    autocast_function(model.stateless_call, plan)  # refuses a function that has a plan
    refuse_mixed(model)
    use_fused_attention()
    return under(plan, model)


def check_model(model: object) -> None:
    """Raises a TypeError for what is no model of Keras."""
    if not isinstance(model, keras.Model):
        raise TypeError(f"Expected a Keras model; got {model!r}.")


def under(plan: Plan | None, model: Any) -> Any:
    """The same model, which computes by a plan, or as its layers say, and keeps all of its state in
    a skipped step."""
    plain = plain_class(model)
    own = type(f"Autocast{plain.__name__}", (Autocast, plain), {"_plain": plain, "_plan": plan})
    keras.saving.register_keras_serializable(PACKAGE, "Autocast")(own)
    model.__class__ = own
    model._begin()
    # An earlier `fit`, `evaluate` or `predict` has compiled them.
    model.train_function = model.test_function = model.predict_function = None
    return model


def refuse_mixed(model: Any) -> None:
    """Raises a ValueError if a layer computes in half precision by a policy of Keras's."""
    for layer in model._flatten_layers():
        if layer.dtype_policy.name in ("mixed_float16", "mixed_bfloat16"):
            raise ValueError(
                f"Expected a float32 model, of which autocast chooses what is computed in half "
                f"precision; got the policy {layer.dtype_policy.name!r} in layer {layer.name!r}. "
                f"Build the model under keras.config.set_dtype_policy('float32')."
            )


@keras.saving.register_keras_serializable(PACKAGE, "Autocast")
class Autocast:
    """A base of models under `autocast`, which stands before the model's own class."""

    _plain: type[Any]  # the model's own class
    _plan: Plan | None  # None: as the policies of its layers say

    def stateless_call(
        self,
        trainable_variables: PyTree,
        non_trainable_variables: PyTree,
        *args: Any,
        return_losses: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Calls the model without side effects, in half precision."""
        weights = list(trainable_variables), list(non_trainable_variables)
        is_eval = (
            kwargs.get("training") is False and self._plan is not None and bool(self._plan.entries)
        )
        if is_eval or self._plan is None:
            plain: Any = super()
            others = {**kwargs, "return_losses": return_losses}
            return plain.stateless_call(*weights, *args, **others)
        inputs = args, kwargs
        found, masks = self._half(weights, inputs, _masks(inputs))
        _set_masks(found[0], masks)
        return found if return_losses else found[:2]

    @functools.cached_property
    def _half(self) -> Any:
        """`stateless_call` in half precision. A mask of Keras's belongs to an array, and is traced
        beside it; the losses belong to the program that a plan knows."""

        def call(weights: PyTree, inputs: PyTree, masks: Sequence[Any]) -> tuple[PyTree, PyTree]:
            _set_masks(inputs, masks)
            args, kwargs = inputs
            plain: Any = super(Autocast, self)
            found = plain.stateless_call(*weights, *args, return_losses=True, **kwargs)
            return found, _masks(found[0])

        assert self._plan is not None
        return autocast_function(call, self._plan)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Configures the model for training, as its own class does."""
        own: Any = super()
        own.compile(*args, **kwargs)
        if kwargs.get("auto_scale_loss", True):
            self._scale_losses()

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Trains the model as its own class does, and says at the end of the first epoch if its
        loss is finite in float32 alone."""
        own: Any = super()
        given = inspect.signature(own.fit).bind(*args, **kwargs).arguments
        callbacks: Any = given.get("callbacks") or []
        known = callbacks.callbacks if hasattr(callbacks, "callbacks") else callbacks
        known = list(known) if isinstance(known, list | tuple) else [known]
        own_step = self._plain.train_step, self._plain.compute_loss_and_updates
        is_plain = own_step == (keras.Model.train_step, keras.Model.compute_loss_and_updates)
        is_plain &= self._plan is not None
        if is_plain and not any(getattr(each, "audits_fit", False) for each in known):
            watch = FirstEpoch(self._loss_in_float32, self._loss_in_half)
            if hasattr(callbacks, "callbacks"):
                callbacks.append(watch)
            else:
                given["callbacks"] = [*known, watch]
        return own.fit(**given)

    def _loss_in_float32(self, *values: PyTree) -> Any:
        """The loss of a step of `fit`, without a scale: of values of the model, and a batch."""
        model: Any = self
        with seen_as(model, Unscaled):
            return model.compute_loss_and_updates(*values, training=True)[0]

    def _loss_in_half(self, *values: PyTree) -> Any:
        """The same in half precision."""
        model: Any = self
        with seen_as(model, Unscaled, is_cast=True):
            return model.compute_loss_and_updates(*values, training=True)[0]

    def compute_loss_and_updates(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the scaled loss of a step of `fit`, and what it changes. Backward passes that a
        layer has of its own get true cotangents."""
        trainer: Any = super()
        optimizer: Any = getattr(self, "optimizer", None)
        values = kwargs.get("optimizer_variables")
        if not (optimizer and values and kwargs.get("training")):
            return trainer.compute_loss_and_updates(*args, **kwargs)
        if not scales_losses(self._plan, self):
            return trainer.compute_loss_and_updates(*args, **kwargs)
        with keras.StatelessScope(list(zip(optimizer.variables, values, strict=True))):
            scale = optimizer.scale_loss(jnp.float32(1))
        return called_at(trainer.compute_loss_and_updates, lambda: scale)(*args, **kwargs)

    def train_step(self, state: PyTree, data: PyTree) -> tuple[PyTree, PyTree]:
        """Takes a step of `fit`; one that the optimizer skips keeps all state of the model."""
        own: Any = super()
        optimizer: Any = getattr(self, "optimizer", None)
        if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            return own.train_step(state, data)
        return kept_if_skipped(self, own.train_step, state, data)

    def _begin(self) -> None:
        """Takes the place of the model as it was, perhaps under another plan."""
        vars(self).pop("_half", None)
        self._scale_losses()

    def _scale_losses(self) -> None:
        """Wraps an optimizer, so that it skips steps, and says whether it is to scale losses."""
        optimizer: Any = getattr(self, "optimizer", None)
        if optimizer is None:
            return
        has_scale = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        if not has_scale and optimizer.loss_scale_factor is None:
            self.optimizer = optimizer = LossScaleOptimizer(optimizer)
        if isinstance(optimizer, LossScaleOptimizer):
            optimizer._is_needed = scales_losses(self._plan, self)

    def compile_from_config(self: Any, config: dict[str, Any]) -> None:
        """Compiles the model as a saved one was."""
        with seen_as(self):
            self.compile_from_config(config)
        self._scale_losses()
        if self.built and getattr(self, "optimizer", None) is not None:
            self.optimizer.build(self.trainable_variables)

    def get_config(self) -> dict[str, Any]:
        """Returns what `from_config` takes: the model, as its own class saves it, and the plan."""
        with seen_as(self):
            model = keras.saving.serialize_keras_object(self)
        model.pop("compile_config", None)  # stands beside it
        plan = self._plan
        short = plan.dtype if plan is not None and not plan.entries else None
        return {"model": model, "plan": short if plan is None or short else plan.to_json()}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Any:
        """Returns the model that `get_config` describes, under autocast."""
        plan = config["plan"]
        plan = Plan.from_json(plan) if plan and plan.startswith("{") else plan
        model = keras.saving.deserialize_keras_object(config["model"], custom_objects)
        return autocast(model, plan) if plan else under(None, model)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._plain._unpickle_model, super().__reduce__()[1]


class Unscaled:
    """A base of models whose loss nothing multiplies."""

    @property
    def optimizer(self) -> None:
        """None, so that nothing multiplies the loss."""
        return


def scales_losses(plan: Plan | None, model: Any) -> bool:
    """Whether the gradients of a model in this precision need loss scaling: not in bfloat16."""
    if plan is None:
        names = {layer.dtype_policy.name for layer in model._flatten_layers()}
        return not names.isdisjoint(("float16", "mixed_float16"))
    return plan.dtype != "bfloat16"


def kept_if_skipped(
    model: Any, train_step: Callable[..., Any], state: PyTree, data: PyTree
) -> tuple[PyTree, PyTree]:
    """A step of Keras's `fit` that keeps what is not trained, but for metrics, if it is skipped."""
    _, fixed, optimizer_variables, _ = state
    logs, (trainable, new, after, metrics) = train_step(state, data)
    optimizer = model.optimizer
    count = getattr(optimizer, "inner_optimizer", optimizer)._iterations
    place = next(i for i, v in enumerate(optimizer.variables) if v is count)
    applied = after[place] != optimizer_variables[place]  # only applied steps are counted
    new = [jnp.where(applied, n, o) for n, o in zip(new, fixed, strict=True)]
    return logs, (trainable, new, after, metrics)


def plain_class(model: Any) -> type[Any]:
    """The class of a model without autocast."""
    return model._plain if isinstance(model, Autocast) else type(model)


@contextlib.contextmanager
def seen_as(model: Any, base: type | None = None, is_cast: bool = False) -> Iterator[None]:
    """A model has its own class inside, after a base, and computes in float32; with `is_cast` as
    under autocast."""
    known, plain = type(model), type(model) if is_cast else plain_class(model)
    model.__class__ = plain if base is None else type(base.__name__, (base, plain), {})
    try:
        yield
    finally:
        model.__class__ = known


def _masks(tree: PyTree) -> list[Any]:
    """The masks that Keras has attached to arrays."""
    return [keras.src.backend.get_keras_mask(leaf) for leaf in jax.tree.leaves(tree)]


def _set_masks(tree: PyTree, masks: Sequence[Any]) -> None:
    """Attaches masks to the arrays of a tree, as Keras does."""
    for leaf, mask in zip(jax.tree.leaves(tree), masks, strict=True):
        if mask is not None:
            keras.src.backend.set_keras_mask(leaf, mask)
