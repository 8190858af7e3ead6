"""Audits of Keras's `fit`: its loss and gradients in half precision, beside those in float32."""

# Keras is not typed.
# pyright: reportCallIssue=false

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gainstage._base import checks
from gainstage._variables.types import PyTree
from gainstage.interop.keras_autocast import Autocast, Unscaled, scales_losses, under
from gainstage.interop.keras_backend import keras
from gainstage.interop.keras_measured import as_arrays, refuse_own_step
from gainstage.precision.autocast import plan_of
from gainstage.precision.plan import Plan
from gainstage.training.audit import BOUNDS, Given, checked_bounds
from gainstage.training.audited_run import AuditedRun, Audits
from gainstage.transforms.value_and_grad import LossFunction

KEEP_FIT = (
    "audit.plan.save(path) of this callback, and gainstage.interop.keras.compile(model, optimizer, "
    "loss, dtype=gainstage.precision.Plan.load(path))."
)


class Audit(keras.callbacks.Callback):
    """Compares steps of `fit` with float32, as `gainstage.train_step(audit_every=...)` does.

    The first step, and then each that many, is computed in float32 too, before it is taken: its
    loss with what the model adds to it, and its gradients. An error past the bounds is a warning at
    a later step, once, with the name of the weight. No step waits for a result, and what is trained
    is the same as without audits. With `mend=True` an error past the bounds is mended, as by
    `gainstage.mend`: the lines that spoil the step are in float32 from then on, and one warning
    says which.

    Attributes:
        audits: those so far, at the end of a `fit` all: their `count`, the mean difference of the
            loss (`bias`) and its `spread`, and the `last`.
        plan: the plan in force, a `gainstage.precision.Plan`; None before the first `fit`. For
            another run: `plan.save(path)`, and `compile(model, dtype=Plan.load(path))`.

    Args:
        every: the number of steps between audits, an integer >= 1.
        batch: `(x, y)` or `(x, y, sample_weight)`, which all audits compute; by default that of the
            step.
        bounds: as for `gainstage.audit`.
        mend: whether lines that spoil a step go back to float32.

    Raises:
        TypeError, ValueError: `every` or `bounds` is no such number; from `fit`, the model is not
            under autocast, or has a `train_step` of its own.

    Examples:
        >>> import keras, numpy as np
        >>> import gainstage.interop.keras
        >>> net = keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
        >>> net = gainstage.interop.keras.compile(net, "sgd", "mse")
        >>> audit = gainstage.interop.keras.Audit(every=2)
        >>> x = np.random.default_rng(0).normal(size=(64, 4))
        >>> history = net.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[audit])
        >>> print(audit.audits.count, audit.audits.last.ok)
        5 True
    """

    audits_fit = True  # for a model under autocast, which looks at its first epoch otherwise

    def __init__(
        self,
        every: int = 1000,
        *,
        batch: Any = None,
        bounds: Sequence[float] = BOUNDS,
        mend: bool = False,
    ) -> None:
        super().__init__()
        self._every = checks.integer("every", every, low=1)
        self._bounds = checked_bounds("bounds", bounds)
        self._mends = checks.flag("mend", mend)
        self._batch = None if batch is None else as_arrays(batch)
        self._run: AuditedRun | None = None
        self._of: Any = None  # the model of the run

    @property
    def audits(self) -> Audits:
        """The audits so far."""
        return Audits() if self._run is None else self._run.found

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        return None if self._of is None else self._of._plan

    def on_train_begin(self, logs: Any = None) -> None:
        """Audits the steps of this `fit`, and goes on where the last one ended."""
        model: Any = self.model
        if not isinstance(model, Autocast) or model._plan is None:
            raise ValueError(
                f"Expected a model under autocast for Audit, which compares it with float32; got "
                f"{model.name!r}. Write model = gainstage.interop.keras.compile(model, optimizer, "
                f"loss)."
            )
        refuse_own_step(model, "gainstage.audit")
        if self._run is None or self._of is not model:
            self._of = model
            self._run = AuditedRun(
                LossFunction(_loss_by_names(model)), self._every, self._bounds,
                mends=self._mends, advice=KEEP_FIT,
            )  # fmt: skip
        # After a fit that was interrupted, the function of that one is still there.
        plain = getattr(model.train_function, "plain", model.train_function)
        model.train_function = self._audited(model, plain)

    def on_train_end(self, logs: Any = None) -> None:
        """Leaves the model as it was, and waits for the last audits."""
        model: Any = self.model
        model.train_function = model.train_function.plain
        if self._run is not None:
            self._run.finish()

    def _audited(self, model: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
        """The function of Keras that takes a step, with an audit before it."""
        run, scale = self._run, None
        if scales_losses(model._plan, model):
            scale = getattr(model.optimizer, "dynamic_scale", None)
        assert run is not None
        place = next((i for i, v in enumerate(model.optimizer.variables) if v is scale), None)

        def take(state: PyTree, iterator: Iterator[PyTree]) -> Any:
            data = list(itertools.islice(iterator, 1))

            def given() -> Given:
                weights, others, optimizer_variables, metrics = state
                batch = self._batch or keras.utils.unpack_x_y_sample_weight(data[0])
                params = dict(zip(_weight_names(model), weights, strict=True))
                scale = 1.0 if place is None else optimizer_variables[place]
                return Given(params, (others, metrics), batch, scale)

            if data:
                known = run.loss
                run.before(given, model.steps_per_execution)
                if run.loss is not known:
                    under(plan_of(run.loss.fun), model)
                    model.make_train_function()
                    vars(take)["plain"], model.train_function = model.train_function, take
            return vars(take)["plain"](state, itertools.chain(data, iterator))

        vars(take)["plain"] = plain
        return take


def _loss_by_names(model: Any) -> Callable[..., Any]:
    """The loss that `fit` differentiates, without a scale: of the weights by name, what else the
    model has, and a batch."""

    def loss_fn(params: dict[str, Any], extra: PyTree, *batch: PyTree) -> tuple[Any, PyTree]:
        weights = [params[name] for name in _weight_names(model)]
        known = type(model)
        model.__class__ = type(known.__name__, (Unscaled, known), {})
        try:
            loss, _ = model.compute_loss_and_updates(weights, *extra, *batch, training=True)
        finally:
            model.__class__ = known
        return loss, extra

    vars(loss_fn)["plan"] = model._plan
    return loss_fn


def _weight_names(model: Any) -> list[str]:
    """The names of the weights that are trained, each once."""
    paths = [variable.path for variable in model.trainable_variables]
    return [f"{p}#{n}" if p in paths[:n] else p for n, p in enumerate(paths)]
