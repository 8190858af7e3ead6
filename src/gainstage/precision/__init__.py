"""What a precision costs, and what is computed in it: advice, measured plans, float8.

`autocast`, `keep_float32` and `advise` are in `gainstage`. It knows nothing of the optimizers.
"""

from gainstage.precision.advice import Advice, Cost
from gainstage.precision.noise_and_bias import Price
from gainstage.precision.plan import Operation, Plan
from gainstage.precision.tuning import tune

__all__ = ["Advice", "Cost", "Operation", "Plan", "Price", "tune"]


def __dir__() -> list[str]:
    return __all__
