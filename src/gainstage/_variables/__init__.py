"""Named arrays, where they lie, and the bridge from code that assigns them to pure functions.

Any room above may import all of it; most need `bridge` and `Variable`.
"""
