"""The prediction of one layout: step time and memory, computed operation by operation."""
