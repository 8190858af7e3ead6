"""Named arrays with a state, and the bridge from code that assigns to them to pure functions.

Any room above may import all of it; most need `bridge` and `Variable`.
"""
