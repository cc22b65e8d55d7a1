"""Conversations to tokens: rows to messages, a chat template to one text, and which of its tokens are learned."""
