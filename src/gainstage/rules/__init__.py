"""One rule per file, beside those that everything needs, which are in `_core.rules`."""

from gainstage.rules.adaptive import AdaptiveLossScale

__all__ = ["AdaptiveLossScale"]
