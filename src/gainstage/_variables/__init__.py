"""Named arrays, where they lie, and how code that assigns to them becomes a pure function.

Any room above may import all of it.
"""
