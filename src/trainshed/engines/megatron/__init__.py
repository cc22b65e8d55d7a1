"""Megatron-LM: a recipe as the arguments of its pretrain_gpt.py, and its argument lists as a recipe."""

from trainshed.engines.megatron.importing import read_megatron
from trainshed.engines.megatron.launch import megatron_launch

__all__ = ["megatron_launch", "read_megatron"]
