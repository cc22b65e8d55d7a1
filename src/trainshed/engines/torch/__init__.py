"""The torch engine: one decoder on PyTorch's own distributed parts, the same code on gloo/CPU and NCCL/GPU."""
