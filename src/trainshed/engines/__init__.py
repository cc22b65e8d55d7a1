"""What steps a model: `torch` is ours; adapters for other frameworks stand beside it."""
