"""One algorithm per file; each reads like its paper."""

from gainstage.optimizers.adam import Adam
from gainstage.optimizers.sgd import SGD

__all__ = ["SGD", "Adam"]
