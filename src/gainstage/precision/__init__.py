"""What is computed in half precision or float8: measured plans, policies, float8 products.

`autocast` and `keep_float32` are in `gainstage`. It knows nothing of the optimizers.
"""

from gainstage.precision import float8
from gainstage.precision.plan import Operation, Plan
from gainstage.precision.policy import Policy
from gainstage.precision.tuning import tune

__all__ = ["Operation", "Plan", "Policy", "float8", "tune"]


def __dir__() -> list[str]:
    return __all__
