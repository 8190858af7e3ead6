"""A run of steps: each compiled as one program, audited, and mended where half precision is wrong.

Users have `train_step`, `audit` and `mend` in `gainstage`. It knows nothing of the optimizers.
"""
