"""The recipe and cluster files: schema, loading, overrides."""
