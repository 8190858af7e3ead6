"""Functions of functions and of optax transformations: scaled losses, gradients and steps."""
