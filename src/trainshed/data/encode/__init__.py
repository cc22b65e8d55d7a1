"""Tokenizers, and the encoders that turn documents into ids: a fast one, and the reference that proves it."""
