"""What a precision costs, and what is computed in it: advice, measured plans, float8.

`autocast` and `keep_float32` are in `gainstage`. It knows nothing of the optimizers.
"""

from gainstage.precision.advice import Advice, Cost, advise
from gainstage.precision.noise_and_bias import Price
from gainstage.precision.plan import Operation, Plan
from gainstage.precision.tuning import tune

__all__ = ["Advice", "Cost", "Operation", "Plan", "Price", "advise", "tune"]


def __dir__() -> list[str]:
    return __all__
