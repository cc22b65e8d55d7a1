"""A tokenizer with further tokens: transformers' own `add_tokens` is the oracle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from support.models.made_tokenizers import CONFIGS, KINDS, save
from trainshed.data.tokenize.added_tokens import (
    added_token_files,
    added_token_problems,
    read_generation_config,
    with_added_tokens,
)
from trainshed.data.tokenize.encoders import choose_encoder
from trainshed.data.tokenize.tokenizer import load_tokenizer
from trainshed.errors import TokenizerError

TEXTS = [
    "a <tool>b c</tool> d<tool>",
    "<tool></tool>",
    "<tool",
    "tool>",
    "x<tools>y <tool >",
    "é<tool>é \n</tool>\n",
    "<tool:x>",
]
ADDED = ["<tool>", "</tool>", "<tool:x>", "two words"]


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen", "large"])
def test_texts_become_the_tokens_that_transformers_makes_of_them(kind: str, tmp_path: Path) -> None:
    save(KINDS[kind](), CONFIGS[kind], tmp_path / "plain")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "plain")
    theirs.add_tokens(ADDED)
    plain = load_tokenizer(str(tmp_path / "plain"))
    ours = with_added_tokens(plain, ADDED)
    assert ours.vocab_size == plain.vocab_size + len(ADDED) == len(theirs)
    assert ours.sha256 != plain.sha256
    (tmp_path / "added").mkdir()
    for name, data in added_token_files(plain, ADDED).items():
        (tmp_path / "added" / name).write_bytes(data)
    again = AutoTokenizer.from_pretrained(tmp_path / "added")
    encoder, _ = choose_encoder(ours)
    encoded = [row.tolist() for row in encoder.encode(TEXTS).rows()]
    for text, ids in zip(TEXTS, encoded, strict=True):
        assert ids == theirs.encode(text, add_special_tokens=False) == again.encode(text, add_special_tokens=False)
        assert again.decode(ids, skip_special_tokens=True) == text, "an added token is part of the text"
    assert load_tokenizer(str(tmp_path / "added")).sha256 == ours.sha256


def test_special_tokens_settings_and_templates_stay(tmp_path: Path) -> None:
    settings = CONFIGS["llama3"] | {
        "chat_template": "{{ messages }}",
        "bos_token": {"content": "<|begin_of_text|>", "lstrip": False},
        "added_tokens_decoder": {"0": {"content": "<|begin_of_text|>", "special": True}},
    }
    save(KINDS["llama3"](), settings, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [1, 2], "vocab_size": 2000}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    plain = load_tokenizer(str(tmp_path))
    ours = with_added_tokens(plain, ["<tool>"])
    assert ours.special_texts == plain.special_texts
    assert ours.special_tokens == plain.special_tokens
    assert ours.chat_templates == {"default": "{{ messages }}"}
    assert ours.config["added_tokens_decoder"].keys() == {"0", str(plain.vocab_size)}
    generation = json.loads(read_generation_config(plain.address)["generation_config.json"])
    assert generation == {"temperature": 0.6, "eos_token_id": [1, 2]}


def test_a_token_that_is_there_is_named_with_its_number(tmp_path: Path) -> None:
    save(KINDS["gpt2"](), CONFIGS["gpt2"], tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    (problem,) = added_token_problems(tokenizer, ["<tool>", "<|endoftext|>"])
    known = tokenizer.token("<|endoftext|>")
    assert known is not None
    assert problem.path == ("model", "added_tokens", 1)
    assert problem.what == f"'<|endoftext|>' is a token already (number {known.id} of {tmp_path})"


def test_overlapping_texts_stay_tokens_and_one_without_a_number_of_its_own_is_refused(tmp_path: Path) -> None:
    save(KINDS["gpt2"](), CONFIGS["gpt2"], tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    # All begin at the same place: the longest wins, and each stays itself.
    assert with_added_tokens(tokenizer, ["<|end", "<|endoftext|>x"]).vocab_size == tokenizer.vocab_size + 2
    # Here `tokenizers` would count from another number on.
    holes = json.loads(tokenizer.json)
    holes["model"]["vocab"]["beyond"] = 5000
    (tmp_path / "tokenizer.json").write_text(json.dumps(holes))
    with pytest.raises(TokenizerError, match="with the added tokens '<tool>' becomes") as refused:
        with_added_tokens(load_tokenizer(str(tmp_path)), ["<tool>"])
    assert "add them with transformers" in str(refused.value.hint)
