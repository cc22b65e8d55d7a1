"""Logs of other training programs as our own events: one module per program, chosen by what the log says."""
