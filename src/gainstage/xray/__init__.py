"""Looks inside a step: files of bad steps, and the X-ray of one operation after the other.

Users import it from `gainstage.diagnostics`; rooms above may import all of it.
"""
