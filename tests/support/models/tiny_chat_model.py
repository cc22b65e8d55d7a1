"""A tiny random Llama with a tokenizer of bytes and a chat template, as transformers would save it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from support.models.tiny_models import save_tiny_hf

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'assistant' and loop.first %}{{ raise_exception('the user must begin') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tiny_chat_model(folder: Path, max_positions: int = 64, **changes: Any) -> Path:
    """Save it, with some sizes changed, and return where; its tokens are the 256 bytes, then <s> and </s>."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    begin, end = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    save_tiny_hf("llama", folder, vocab_size=len(letters) + 2, max_positions=max_positions, **changes)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end, "bos_token_id": begin}))
    return folder
