"""What this machine has to train on."""

from __future__ import annotations

from trainshed.errors import MissingExtra


def gpu_count() -> int:
    """Return how many GPUs ranks on this machine would find."""
    try:
        import torch
    except ImportError:
        raise MissingExtra.named("train", "training") from None
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
