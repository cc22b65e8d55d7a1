"""Weights on disk: native checkpoints, Hugging Face's and Megatron's, converted and proven; what a run starts from."""
