"""Small runs: worlds of ranks that start in milliseconds, what they do, and what they leave."""
