"""Programs as JAX traces them: read, run again with changes, and named by the user's lines.

Any room above may import all of it; only `jaxprs` goes through the equations of a program.
"""
