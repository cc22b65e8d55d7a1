"""The fast encoder gives the reference's ids or is not used; each choice says why."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from support.models import made_tokenizers
from support.runs.preparing import ODD_TEXTS, MadeTokenizer, TokenizerFolder, documents, jsonl, prepare_text
from trainshed.cli import run_cli
from trainshed.data.tokenize.encoders import (
    EncodedBatch,
    FastEncoder,
    ReferenceEncoder,
    choose_encoder,
    compare_to_reference,
    edge_case_texts,
    require_reference_ids,
)
from trainshed.data.tokenize.tokenizer import Tokenizer, load_tokenizer
from trainshed.errors import InputError, TokenizerError

SUPPORTED = ["gpt2", "llama3", "llama2", "qwen", "large"]
SHARED = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])

TOKEN_STRINGS = [
    *("<|endoftext|>", "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>"),
    *("<s>", "</s>", "<unk>", "<0x0A>", "<0xFF>", "▁", "Ġ", "⟦7⟧", "⟦77⟧", "⟦", "<|", "|>", "[UNK]"),
]
PIECES = st.one_of(
    st.text(max_size=20),
    st.text("aB'sLl 1.\n\t\r_-é▁ſ", max_size=12),
    st.sampled_from(TOKEN_STRINGS),
    st.sampled_from(ODD_TEXTS),
    st.sampled_from([text[:60] for text in made_tokenizers.docstrings()[:200]]),
)
TEXTS = st.lists(PIECES, max_size=6).map("".join)


@pytest.fixture(scope="session")
def fast_encoder(made_tokenizer: MadeTokenizer) -> Callable[[str], FastEncoder]:
    return cache(lambda kind: FastEncoder(made_tokenizer(kind)))


def with_added(folder: Path, kind: str, *tokens: AddedToken) -> Tokenizer:
    """A tokenizer of a kind with further tokens."""
    made = made_tokenizers.KINDS[kind]()
    made.add_tokens(list(tokens))
    return load_tokenizer(str(made_tokenizers.save(made, made_tokenizers.CONFIGS[kind], folder)))


@pytest.mark.parametrize("kind", SUPPORTED)
def test_the_fast_encoder_is_chosen_for_the_usual_kinds_and_says_on_what_grounds(
    made_tokenizer: MadeTokenizer, kind: str
) -> None:
    encoder, reason = choose_encoder(made_tokenizer(kind))
    assert isinstance(encoder, FastEncoder)
    assert encoder.name.startswith("gigatoken 0.")
    assert "same ids as tokenizers on" in reason


@pytest.mark.parametrize("kind", SUPPORTED)
def test_both_encoders_agree_on_documents_and_awkward_texts(made_tokenizer: MadeTokenizer, kind: str) -> None:
    tokenizer = made_tokenizer(kind)
    assert compare_to_reference(tokenizer, FastEncoder(tokenizer), documents(1500)) is None
    assert compare_to_reference(tokenizer, FastEncoder(tokenizer), edge_case_texts(tokenizer)) is None


@pytest.mark.parametrize("kind", SUPPORTED)
@SHARED
@given(texts=st.lists(TEXTS, min_size=1, max_size=8))
@example(texts=["a", "", "𲨷.s", "b", "\u088f's"])
def test_both_encoders_agree_on_anything(
    made_tokenizer: MadeTokenizer, fast_encoder: Callable[[str], FastEncoder], kind: str, texts: list[str]
) -> None:
    require_reference_ids(made_tokenizer(kind), fast_encoder(kind), texts, "here")


@pytest.mark.parametrize("kind", [*SUPPORTED, "bert"])
def test_no_encoder_adds_a_token_at_the_beginning_or_end(made_tokenizer: MadeTokenizer, kind: str) -> None:
    tokenizer = made_tokenizer(kind)
    adding = tokenizer.backend.encode("Some text.").ids
    plain = tokenizer.backend.encode("Some text.", add_special_tokens=False).ids
    assert (len(adding) > len(plain)) == (kind in ("llama3", "llama2", "bert"))
    encoder, _ = choose_encoder(tokenizer)
    encoded = encoder.encode(["Some text.", "", "Some text."])
    assert encoded.ids.tolist() == plain * 2
    assert encoded.lengths.tolist() == [len(plain), 0, len(plain)]


def test_special_token_strings_inside_documents_become_those_tokens_as_the_reference_has_it(
    made_tokenizer: MadeTokenizer,
) -> None:
    tokenizer = made_tokenizer("llama3")
    encoder, _ = choose_encoder(tokenizer)
    end = tokenizer.end_of_document()
    assert encoder.encode([f"a{end.text}b"]).ids.tolist().count(end.id) == 1


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "llama2", "qwen"])
@pytest.mark.parametrize("flag", ["single_word", "lstrip", "rstrip", "normalized", "special", "none"])
def test_added_tokens_are_honoured_or_the_fast_encoder_is_not_used(tmp_path: Path, kind: str, flag: str) -> None:
    flags = {} if flag == "none" else {flag: True}
    words = ["<mask>", "foo bar", "ADDED", "cafe\u0301", "日本"]
    tokenizer = with_added(tmp_path, kind, *(AddedToken(word, **{"normalized": False, **flags}) for word in words))
    encoder, reason = choose_encoder(tokenizer)
    surroundings = ["{}", "x{}", "{}x", " {} ", "\n\n{}\n\n x", "{}{}", "1{}2", "_{}_", "日{}本", "{}'s", "é{}é"]
    spellings = [*words, *(word.lower() for word in words), *(word[:-1] for word in words), "café"]
    texts = [around.format(word, word) for word in spellings for around in surroundings]
    assert compare_to_reference(tokenizer, encoder, texts) is None, reason


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "llama2", "qwen"])
def test_the_battery_finds_that_the_fast_encoder_ignores_single_word(tmp_path: Path, kind: str) -> None:
    """A finding about gigatoken 0.10; if this fails, it has learned it, and the test above still holds."""
    tokenizer = with_added(tmp_path, kind, AddedToken("ADDED", single_word=True, normalized=False))
    encoder, reason = choose_encoder(tokenizer)
    assert isinstance(encoder, ReferenceEncoder)
    assert reason.startswith("tokenizers 0.")
    assert "(slow): gigatoken gives other ids for this tokenizer (text " in reason


def test_the_battery_finds_that_overlapping_added_tokens_are_matched_differently(tmp_path: Path) -> None:
    words = [
        AddedToken("foo", normalized=True),
        AddedToken("foo bar", normalized=True),
        AddedToken("o b", normalized=False),
    ]
    tokenizer = with_added(tmp_path, "gpt2", *words)
    encoder, _ = choose_encoder(tokenizer)
    texts = ["foo bar", "foo ba", "foo b", "xfoo bar", "foofoo bar", "o b"]
    assert compare_to_reference(tokenizer, encoder, texts) is None


def test_what_it_does_not_support_falls_back_with_the_reason(made_tokenizer: MadeTokenizer) -> None:
    tokenizer = made_tokenizer("bert")
    encoder, reason = choose_encoder(tokenizer)
    assert isinstance(encoder, ReferenceEncoder)
    assert 'gigatoken does not support this tokenizer (Unsupported model type "WordPiece"' in reason
    assert compare_to_reference(tokenizer, encoder, documents(50)) is None


def test_asking_for_the_fast_encoder_where_it_cannot_be_used_is_refused(
    tmp_path: Path, tokenizer_folder: TokenizerFolder, made_tokenizer: MadeTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match="--encoder gigatoken cannot be used: gigatoken does not support") as error:
        choose_encoder(made_tokenizer("bert"), "gigatoken")
    assert error.value.hint == "write --encoder tokenizers, or leave it out"
    (tmp_path / "a.jsonl").write_bytes(jsonl(["text"]))
    command = ["data", "prepare", "--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "out"), "--no-eod"]
    command += ["--tokenizer", str(tokenizer_folder("bert")), "--encoder", "gigatoken"]
    assert run_cli(command) == 2
    assert run_cli([*command, "--workers", "2"]) == 2
    assert "cannot be used" in capsys.readouterr().err


def test_without_the_fast_encoder_installed_the_reference_is_used_and_that_is_said(
    made_tokenizer: MadeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    encoder, reason = choose_encoder(made_tokenizer("gpt2"))
    assert isinstance(encoder, ReferenceEncoder)
    assert reason.endswith("(slow): gigatoken is not installed")


def test_asking_for_the_reference_gets_it(made_tokenizer: MadeTokenizer) -> None:
    encoder, reason = choose_encoder(made_tokenizer("gpt2"), "tokenizers")
    assert isinstance(encoder, ReferenceEncoder)
    assert reason == "tokenizers, as asked"


class Wrong:
    """Right but for one word."""

    name = "wrong 1.0"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._reference = ReferenceEncoder(tokenizer)

    def encode(self, texts: Sequence[str]) -> EncodedBatch:
        return self._reference.encode([text.replace("colour", "color") for text in texts])


def test_a_wrong_encoder_is_stopped_with_the_text_that_differs(made_tokenizer: MadeTokenizer) -> None:
    tokenizer = made_tokenizer("gpt2")
    require_reference_ids(tokenizer, Wrong(tokenizer), ["the color of money"], "shard 3")
    with pytest.raises(TokenizerError) as error:
        require_reference_ids(tokenizer, Wrong(tokenizer), ["the color", "the colour of money"], "shard 3")
    assert error.value.where == "shard 3"
    assert error.value.what.startswith("wrong 1.0 and tokenizers disagree: text 'the colour of money': from token ")
    assert "--encoder tokenizers" in (error.value.hint or "")


@pytest.mark.parametrize("shards", [1, 3])
def test_a_sample_of_every_shard_is_compared(
    tmp_path: Path, made_tokenizer: MadeTokenizer, monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    tokenizer = made_tokenizer("gpt2")
    texts = ["a line of text"] * 30
    texts[-3] = "its colour"
    (tmp_path / "a.txt").write_text("\n".join(texts))
    monkeypatch.setattr(
        "trainshed.data.tokenize.workers.choose_encoder", lambda tokenizer, *_, **__: (Wrong(tokenizer), "")
    )
    with pytest.raises(TokenizerError, match="'its colour'") as error:
        prepare_text(tmp_path / "a.txt", tokenizer, tmp_path / "out", split="line", shards=shards)
    assert error.value.where == str(tmp_path / "a.txt")
    assert not (tmp_path / "out-00002-of-00003.manifest.json").exists()
    assert (tmp_path / "out-00000-of-00003.manifest.json").exists() == (shards == 3)
