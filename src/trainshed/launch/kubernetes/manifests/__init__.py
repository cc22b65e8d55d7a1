"""A job as Kubernetes objects: plain dicts built by small functions, and their YAML."""
