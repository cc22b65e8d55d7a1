"""Arithmetic before any GPU is held: layouts, FLOPs (later memory, time, search, cost)."""
