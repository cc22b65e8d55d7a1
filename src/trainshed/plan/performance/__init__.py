"""How fast and how full: one layout of one job, predicted operation by operation."""
