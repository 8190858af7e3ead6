"""What is computed in half precision or float8: autocast, measured plans, policies.

Users import it from `gainstage` and `gainstage.diagnostics`; it knows nothing of the optimizers.
"""
