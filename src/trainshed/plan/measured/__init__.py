"""What was measured here: calibrations from runs, machine files from probes."""
