"""Argument lists and shell scripts for Megatron-LM, read as a recipe."""
