"""Tokenizers, the encoders that turn documents into token ids, and the workers that run them in parallel."""
