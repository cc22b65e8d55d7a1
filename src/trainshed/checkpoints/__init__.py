"""Weights on disk: native checkpoints, Hugging Face's safetensors, the base weights of a run and their proof."""
