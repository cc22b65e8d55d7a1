"""Beyond layouts: checkpoints, failures, data, host memory, hours, energy and money."""
