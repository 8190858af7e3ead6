"""What every room stands on: arrays, checks, configurations, warnings, and JAX's private names.

It imports nothing of Gainstage, and any room may import all of it.
"""
