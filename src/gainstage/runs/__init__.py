"""Records and judges a run: writers, alarms, replayed rules, and reports."""
