"""What is proven of weights: tensors bit by bit, logits, the loss on a fixed batch; and the verdict that keeps it."""
