"""LoRA adapters: in PEFT's folders and in our checkpoints, merged into weights, exported."""
