"""Records and judges a run: telemetry, writers, alarms, and reports.

Users import it from `gainstage.diagnostics`; rooms above may import all of it.
"""
