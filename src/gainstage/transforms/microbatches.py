"""The gradients of a batch, part by part, in one loop of the program."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gainstage._base.arrays import is_key
from gainstage._scaling import gradients
from gainstage._variables.sharding import varying_like
from gainstage._variables.types import PyTree
from gainstage.transforms.models import (
    Changeable,
    apply_changes,
    map_outside_models,
    outside_models,
)
from gainstage.transforms.step_gradients import NewExtra, StateParts, compute_gradients
from gainstage.transforms.value_and_grad import Backward, LossFunction

Weight = Callable[..., Any]  # `(*part) -> scalar`


@dataclasses.dataclass(frozen=True)
class Microbatches:
    """How a batch is divided.

    Args:
        count: the number of parts.
        weight: a function of a part that returns its share in the loss, up to a factor; None if all
            count alike.
    """

    count: int = 1
    weight: Weight | None = None

    def part(self, batch: Sequence[PyTree], number: Any) -> tuple[PyTree, ...]:
        """A part of a batch: of each array the examples `number`, `number + count` and so on, so
        that each device has its part of them. A random key is split; a scalar or a model is whole.

        Raises:
            ValueError: the batch has no such parts.
        """
        if self.count == 1:
            return tuple(batch)
        self._check(batch)

        def of(x: Any) -> Any:
            if not jnp.ndim(x):
                return jax.random.split(x, self.count)[number] if is_key(x) else x
            x = jnp.asarray(x)
            parts = x.reshape(x.shape[0] // self.count, self.count, *x.shape[1:])
            return lax.dynamic_index_in_dim(parts, number, 1, keepdims=False)

        return tuple(map_outside_models(of, batch))

    def _check(self, batch: Sequence[PyTree]) -> None:
        sizes = {
            f"batch{jax.tree_util.keystr(path)}": jnp.shape(x)[0]
            for path, x in outside_models(tuple(batch))
            if jnp.ndim(x)
        }
        if not sizes:
            raise ValueError(
                f"Expected arrays with a leading axis in the batch, of which microbatches="
                f"{self.count} makes parts; got none."
            )
        (name, size), *others = sizes.items()
        for other, its in others:
            if its != size:
                raise ValueError(
                    f"Expected one length of the leading axis in all arrays of the batch, for "
                    f"microbatches={self.count}; got {size} of `{name}` and {its} of `{other}`. "
                    f"Pass what belongs to no example as the extra of the state, or in a model."
                )
        if size % self.count:
            raise ValueError(
                f"Expected a batch that microbatches={self.count} divides; got {size} examples "
                f"in `{name}`. Leave the last examples of an epoch out, or pad them and give such "
                f"parts a weight."
            )

    def shares(self, batch: Sequence[PyTree]) -> jax.Array | float:
        """What each part counts in the loss, a float32 array of a sum of 1."""
        if self.weight is None:
            return 1.0 / self.count
        weight = self.weight

        def of(number: jax.Array) -> jax.Array:
            found = weight(*Changeable(self.part(batch, number)).tree)
            if jnp.shape(found):
                raise TypeError(
                    f"Expected a scalar from weight, such as the number of tokens of a part; got "
                    f"shape {jnp.shape(found)}."
                )
            return jnp.asarray(found, jnp.float32)

        each = lax.map(of, jnp.arange(self.count))
        total = each.sum()
        return jnp.where(total > 0, each / jnp.where(total > 0, total, 1), 0)


class _Changed(NamedTuple):
    """What the parts so far have changed."""

    model: PyTree  # as of an `NewExtra`
    extra: PyTree
    batch: PyTree  # of the NNX objects in it


def gradients_of_parts(
    loss: LossFunction,
    state: StateParts,
    scale: jax.Array,
    batch: Sequence[PyTree],
    microbatches: Microbatches,
) -> tuple[Backward, PyTree]:
    """`compute_gradients` of a batch in parts: the loss and its scaled gradients are added up in
    float32, what a part has changed is what the next one starts from, and aux is stacked.

    Returns:
        What `compute_gradients` returns for the whole, and the changes of the objects in the batch.
    """
    shares = microbatches.shares(batch)
    if microbatches.count == 1:
        objects = Changeable(tuple(batch))
        whole = compute_gradients(loss, state, scale, objects.tree)
        return _if_any_counts(shares, whole), objects.changes()

    def of_part(changed: _Changed, number: Any) -> tuple[Backward, _Changed]:
        model, objects = Changeable(state.params).tree, Changeable(tuple(batch)).tree
        apply_changes(model, changed.model)
        apply_changes(objects, changed.batch)
        part = Changeable(microbatches.part(objects, number))
        own = state._replace(params=model, extra=changed.extra)
        found = compute_gradients(loss, own, scale, part.tree)
        extra = found.extra if isinstance(found.extra, NewExtra) else NewExtra({}, found.extra)
        return found, _Changed(extra.model, extra.extra, part.changes())

    first = _Changed({}, state.extra, {})
    found, changes = jax.eval_shape(functools.partial(of_part, first), jnp.int32(0))
    start = _Changed(
        Changeable(state.params).before(changes.model),
        state.extra,
        Changeable(tuple(batch)).before(changes.batch),
    )
    sums = jax.tree.map(_sum_of_none, (found.loss, found.grads))

    def add(carry: tuple[Any, _Changed], number: jax.Array) -> tuple[Any, Any]:
        sums, before = carry
        found, after = of_part(before, number)
        share = shares[number] if isinstance(shares, jax.Array) else shares
        sums = jax.tree.map(lambda s, x: _plus(s, x, share), sums, (found.loss, found.grads))
        after = jax.tree.map(lambda new, old: _if_counted(share, new, old), after, before)
        return (sums, after), found.aux

    carry, aux = lax.scan(add, (sums, start), jnp.arange(microbatches.count))
    (total, grads), changed = carry
    extra: Any = changed.extra
    if isinstance(found.extra, NewExtra):
        extra = NewExtra(changed.model, changed.extra)
    used = None if found.scale is None else scale
    return _if_any_counts(shares, Backward(total, extra, aux, grads, used)), changed.batch


def _if_any_counts(shares: jax.Array | float, found: Backward) -> Backward:
    """What a batch has led to. One of which no part counts has no loss, and no gradients."""
    if not isinstance(shares, jax.Array):
        return found
    counts = shares.any()
    grads = jax.tree.map(lambda g: jnp.where(counts, g, jnp.zeros_like(g)), found.grads)
    return found._replace(loss=jnp.where(counts, found.loss, jnp.nan), grads=grads, counts=counts)


def _sum_of_none(like: Any) -> jax.Array:
    """The sum of no parts, in float32 or wider."""
    return varying_like(gradients.upcast(jnp.zeros(like.shape, like.dtype)), [like])


def _plus(total: jax.Array, x: jax.Array, share: Any) -> jax.Array:
    """A sum with one more part."""
    return _if_counted(share, total + x.astype(total.dtype) * share, total)


def _if_counted(share: Any, new: jax.Array, old: jax.Array) -> jax.Array:
    """What a part has made of a value; the value as it was if the part counts nothing, as it may be
    NaN then: a mean of nothing."""
    new = jnp.asarray(new, old.dtype)
    return new if isinstance(share, float) else jnp.where(share == 0, old, new)
