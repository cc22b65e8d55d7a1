"""Weights as transformers saves them: read box by box, written shard by shard."""
