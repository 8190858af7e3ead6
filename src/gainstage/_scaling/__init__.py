"""A loss scale around an update: the gradients are read once, and a step is taken or skipped.

Both faces, `transforms` and `optimizers`, import `scaled_step` and what it is made of.
"""
