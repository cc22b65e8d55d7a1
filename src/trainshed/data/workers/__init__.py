"""Tokenising blocks in parallel, in order: in threads or in processes."""
