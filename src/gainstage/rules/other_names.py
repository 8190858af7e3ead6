"""The arguments of rules, by the names that they have in other libraries."""

from gainstage._base import configurable

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

explains_arguments = configurable.lists_arguments(_OTHER_NAMES)
