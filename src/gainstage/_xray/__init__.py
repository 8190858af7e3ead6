"""Looks inside a step: files of bad steps, and the X-ray of one operation after the other.

Users import `gainstage.xray`, and the rest from `gainstage.diagnostics`. Rooms above may import all
of it.
"""
