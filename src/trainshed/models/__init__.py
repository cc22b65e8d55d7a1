"""The decoder: which tensors it has, how they start, how each Hugging Face family maps onto it, its layers."""
