"""Megatron's checkpoints: `torch_dist` (one, free of any layout) and legacy `torch` (a file per rank), both ways."""
