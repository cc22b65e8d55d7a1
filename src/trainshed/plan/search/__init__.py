"""The search for the fastest layout of a training that fits."""
