"""What a precision costs, and what is computed in it: advice, measured plans, float8.

`autocast`, `keep_float32` and `advise` are in `gainstage`. It knows nothing of the optimizers.
"""

from gainstage.precision.advice import Advice, Candidate
from gainstage.precision.find_plan import find_plan
from gainstage.precision.noise_and_bias import GradientAccuracy
from gainstage.precision.plan import Plan, PlanEntry

__all__ = ["Advice", "Candidate", "GradientAccuracy", "Plan", "PlanEntry", "find_plan"]


def __dir__() -> list[str]:
    return __all__
