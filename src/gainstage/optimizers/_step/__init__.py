"""What happens around an optimizer's `update_step`: its variables, options, gradients and state.

The optimizers, and the rooms that wrap or save them, may import all of it.
"""
