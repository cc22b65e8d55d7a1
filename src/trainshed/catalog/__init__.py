"""Facts as data files with their sources: models (later GPUs, machines, fabrics, prices)."""
