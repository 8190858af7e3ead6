"""What is said to those who change an optimizer after Keras's was made of it."""

import weakref

from gainstage._base.warn import warn
from gainstage.optimizers._internals import store_of
from gainstage.optimizers.optimizer import Optimizer


class Original:
    """The optimizer that a `KerasOptimizer` trains a copy of.

    Args:
        optimizer: it, when it is copied.
    """

    def __init__(self, optimizer: Optimizer):
        self._of, self._copy = weakref.ref(optimizer), store_of(optimizer).note_copy()
        self._told = False

    def check(self) -> None:
        """Warns, once, if it was changed since, and neither copied again nor used itself. Call it
        where the copy is used."""
        optimizer = self._of()
        if optimizer is None or self._told or not store_of(optimizer).changed_since(self._copy):
            return
        self._told = True
        warn(
            f"{optimizer.name!r} was changed after it was given to Keras, which trains a copy of "
            f"it, with the old settings. Change the copy: model.optimizer.learning_rate = ...; an "
            f"option such as momentum, if there is a LossScaleOptimizer around it: "
            f"model.optimizer.inner_optimizer.momentum = ..."
        )
