"""Tiny models and tokenizers, as the libraries they imitate save them."""
