"""A tiny Llama with a tokenizer that torchtune and transformers read alike, and conversations to train it on."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL_TOKENS = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|image|>"),
)
# As torchtune's Llama 3 tokenizer cuts text (tiktoken's cl100k).
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEQUENCE_LENGTH = 128
SIZES = {"layers": 2, "hidden": 32, "ffn": 64, "heads": 4, "kv_heads": 2}


def conversations() -> list[dict[str, Any]]:
    """Twelve conversations; one has a system prompt and two answers."""
    talks = [
        [
            {"role": "user", "content": f"What is {number} plus {number + 1}?"},
            {"role": "assistant", "content": f" The answer is {2 * number + 1}.\n"},
        ]
        for number in range(12)
    ]
    more = [{"role": "user", "content": "And then?"}, {"role": "assistant", "content": "Nothing."}]
    talks[3] = [{"role": "system", "content": "Be brief."}, *talks[3], *more]
    return [{"messages": messages} for messages in talks]


def llama3_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    texts = [message["content"] for talk in conversations() for message in talk["messages"]]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*texts, *["user assistant system"] * 5], trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def write_tiktoken(tokenizer: Tokenizer, file: Path) -> None:
    """Write the ranks of a byte-level BPE as tiktoken reads them."""
    to_byte = {letter: byte for byte, letter in bytes_to_unicode().items()}
    ranks = sorted((number, token) for token, number in tokenizer.get_vocab(with_added_tokens=False).items())
    lines = (
        f"{base64.b64encode(bytes(map(to_byte.__getitem__, token))).decode()} {number}\n" for number, token in ranks
    )
    file.parent.mkdir(parents=True)
    file.write_text("".join(lines))


def write_tokenizer(folder: Path) -> Tokenizer:
    """Write the tokenizer as the Hub has Llama 3's: for transformers, and in Meta's form below it."""
    tokenizer = llama3_tokenizer()
    write_tiktoken(tokenizer, folder / "original/tokenizer.model")
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(ends))
    return tokenizer


def write_base(folder: Path, vocab_size: int) -> LlamaForCausalLM:
    """Write the weights as transformers does."""
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=SIZES["hidden"],
        intermediate_size=SIZES["ffn"],
        num_hidden_layers=SIZES["layers"],
        num_attention_heads=SIZES["heads"],
        num_key_value_heads=SIZES["kv_heads"],
        max_position_embeddings=SEQUENCE_LENGTH,
        rms_norm_eps=1e-5,
        initializer_range=0.3,  # so that attention across conversations would show in the loss
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(sizes).float()
    model.save_pretrained(folder, safe_serialization=True)
    return model


def write_conversations(file: Path) -> None:
    """Write the conversations, one to a line."""
    file.write_text("".join(json.dumps(talk) + "\n" for talk in conversations()))
