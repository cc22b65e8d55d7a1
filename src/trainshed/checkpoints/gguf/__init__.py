"""GGUF, the single file that llama.cpp and the tools around it read: written by the `gguf` package, and read back."""
