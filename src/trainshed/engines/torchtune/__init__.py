"""torchtune: fine-tuning of whole models and of LoRA adapters by its distributed recipes; and its files read."""
