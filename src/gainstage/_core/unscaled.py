"""One warning per process in which `loss_scaled` gets gradients, but no loss was ever scaled."""

import warnings

MESSAGE = (
    "No loss was multiplied by the loss scale before this update of gainstage.loss_scaled, so "
    "small gradients are lost as without it. Use gainstage.train_step, or compute gradients with "
    "gainstage.value_and_grad(loss_fn, opt_state). If a trainer differentiates by itself, give it "
    "gainstage.self_scaled(loss_fn). To silence this warning: "
    'warnings.filterwarnings("ignore", message="No loss was multiplied").'
)

# Why there is nothing to warn about in this process: a loss was "scaled", or "local"ly; somebody
# has "read" the scale to do so; or the warning was "given". Empty at first.
SETTLED: set[str] = set()


def warn() -> None:
    """Warns that no loss was scaled; the caller has seen that `SETTLED` is empty."""
    SETTLED.add("given")
    warnings.warn(MESSAGE, stacklevel=3)
