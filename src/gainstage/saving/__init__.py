"""Files of arrays: a state is saved and restored with names, shapes and dtypes that are compared.

Users have `save` and `load` in `gainstage`.
"""
