"""LoRA adapters as peft has them: read, merged, written."""
