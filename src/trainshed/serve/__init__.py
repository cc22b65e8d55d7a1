"""Trying a model at once: generation with a key/value cache, and its HTTP API."""
