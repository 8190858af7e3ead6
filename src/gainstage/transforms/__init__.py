"""The optax face: functions of functions, such as scaled losses, gradients and training steps.

Users import them from `gainstage`; it knows nothing of the optimizers.
"""
