"""`gainstage advise`: what each precision costs on a user's loss, parameters and batches."""

import operator
import sys
from typing import Any

from gainstage import advise
from gainstage._xray.from_file import imported_from
from gainstage.precision import Advice
from gainstage.precision.cards import known_card


def main(words: str, count: int | None, card: str | None, has_aux: bool) -> int:
    """Prints the advice.

    Args:
        words: "module:function", of a function that returns (loss_fn, params, batches), or
            (model, batches) with a Keras model.
        count: how many batches to use, None for all.
        card: the name of the card of the times, None for that of this machine.
        has_aux: whether the loss returns (loss, aux).

    Returns:
        The exit status: 0, or 1 after an error.
    """
    try:
        known_card(card)
        given = imported_from("MODULE:FUNCTION", words, operator.call, "gainstage advise")
        advice = _advised(given, words, count, card, has_aux)
    except (TypeError, ValueError, RuntimeError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    print(advice)
    return 0


def _advised(
    returned: Any, words: str, count: int | None, card: str | None, has_aux: bool
) -> Advice:
    """The advice for what a function has returned."""
    size = len(returned) if isinstance(returned, tuple) else 0
    if size == 3:
        loss_fn, params, batches = returned
        some = batches if count is None else batches[:count]
        return advise(loss_fn, params, some, card=card, has_aux=has_aux)
    keras: Any = sys.modules.get("keras")
    if size == 2 and keras is not None and isinstance(returned[0], keras.Model):
        from gainstage.interop import keras_measured

        model, batches = returned
        some = batches if count is None else keras_measured.first(batches, count)
        return keras_measured.advise(model, some, card=card)
    raise ValueError(
        f"Expected (loss_fn, params, batches) from {words}, or (model, batches) with a Keras "
        f"model; got {f'a tuple of {size}' if size else type(returned).__name__}."
    )
