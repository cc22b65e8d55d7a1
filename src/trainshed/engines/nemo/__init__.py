"""NVIDIA NeMo: release 24.07 by its Hydra file, current ones by a Megatron-Bridge script; and NeMo files read."""
