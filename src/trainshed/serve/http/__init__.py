"""The HTTP API of a served model: OpenAI's words, Megatron's words, health, metrics, and a page to try it."""
