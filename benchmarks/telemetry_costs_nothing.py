"""A train step takes as long with telemetry as without, and with a rule that measures.

In an applied step telemetry needs the norm, which the check computes. The largest element needs one
more reading: it is measured in every 17th step, exponents in one of a hundred. `AdaptiveLossScale`
measures the largest element in every step.
"""

from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import gainstage as gs
from gainstage._scaling.step_telemetry import LOOK

from . import harness, models
from .train_steps_do_not_notice_scaling import SCALE, case, keras_style

PLAIN = "ours"
VARIANTS = {
    PLAIN: {},
    "ours, telemetry": {"telemetry": True},
    "ours, telemetry and underflow": {"telemetry": True, "underflow_every": 100},
    "ours, AdaptiveLossScale": {"rule": gs.AdaptiveLossScale(SCALE)},
}


def steps(name: str, dtype: str) -> tuple[harness.Builders, Any]:
    """The variants for one model and the dtype that it computes in."""
    model = models.model(name, dtype)
    builders = {n: partial(keras_style, model, **options) for n, options in VARIANTS.items()}
    return builders, model.batch


def main(argv: Sequence[str] | None = None) -> None:
    """Measures Adam on each model, in each dtype to compute in."""
    options = harness.arguments(
        __doc__, argv, models=("mlp transformer", "mlp"), dtypes=("float32 float16",) * 2
    )
    cases = [
        case(name, dtype, partial(steps, name, dtype), [PLAIN], calls=LOOK)
        for name, dtype in product(options.models, options.dtypes)
    ]
    harness.run(Path(__file__).stem, __doc__, cases, options)


if __name__ == "__main__":
    main()
