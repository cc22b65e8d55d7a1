"""The verbs of jobs on a target: render, submit, status, logs, cancel, ls."""
