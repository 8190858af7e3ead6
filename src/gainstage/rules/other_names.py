"""The arguments of rules, by the names that they have in other libraries."""

from gainstage._base.configurable import Class, lists_arguments

# Of torch, Keras and flax.
_OTHER_NAMES = {
    "growth_factor": "multiplier",
    "growth_interval": "increment_period",
    "growth_steps": "increment_period",
    "dynamic_growth_steps": "increment_period",
    "init_scale": "initial_loss_scale",
    "initial_scale": "initial_loss_scale",
    "minimum_scale": "min_scale",
}


def explains_arguments(cls: type[Class]) -> type[Class]:
    """Makes the constructor of a rule list its arguments, with ours for one of another library."""
    return lists_arguments(cls, _OTHER_NAMES)
