"""A tokenizer as files: where it may lie, what it is called, and which token ends a document."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from support.models import made_tokenizers
from support.runs.preparing import MadeTokenizer, TokenizerFolder
from trainshed.data.tokenize.tokenizer import load_tokenizer, tokenizer_from_files
from trainshed.errors import NotFound, TokenizerError


def write_folder(folder: Path, backend: Backend, **config: object) -> str:
    return str(made_tokenizers.save(backend, config, folder))


def bare(specials: list[str]) -> Backend:
    """A tokenizer of a few letters and some special tokens."""
    from tokenizers import models

    backend = Backend(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    backend.add_special_tokens(specials)
    return backend


def test_a_folder_and_its_tokenizer_json_alone_give_the_same_ids(tokenizer_folder: TokenizerFolder) -> None:
    folder = tokenizer_folder("llama3")
    whole, alone = load_tokenizer(str(folder)), load_tokenizer(str(folder / "tokenizer.json"))
    assert whole.backend.encode("Some text.").ids == alone.backend.encode("Some text.").ids
    assert whole.vocab_size == alone.vocab_size == 2000
    assert whole.end_of_document() == alone.end_of_document() == whole.token("<|end_of_text|>")
    assert whole.beginning_of_document() == alone.beginning_of_document()
    assert whole.sha256 != alone.sha256


def test_the_hash_is_of_every_file_that_decides_and_of_nothing_else(
    tmp_path: Path, tokenizer_folder: TokenizerFolder
) -> None:
    source = tokenizer_folder("gpt2")
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in source.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "model.safetensors").write_bytes(b"weights")
    before = load_tokenizer(str(source)).sha256
    assert load_tokenizer(str(copy)).sha256 == before
    (copy / "special_tokens_map.json").write_text("{}")
    assert load_tokenizer(str(copy)).sha256 != before


def test_gpt2s_two_files_are_enough(tmp_path: Path, made_tokenizer: MadeTokenizer) -> None:
    original = made_tokenizer("gpt2").backend
    model = json.loads(original.to_str())["model"]
    merges = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"])])
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text(merges)
    found = load_tokenizer(str(tmp_path))
    for text in ["Some text, 123.", "naïve 日本 <|endoftext|> \n\n", *made_tokenizers.docstrings()[:100]]:
        assert found.backend.encode(text).ids == original.encode(text, add_special_tokens=False).ids
    assert found.end_of_document().text == "<|endoftext|>"
    assert found.special_tokens == ["<|endoftext|>"]
    (tmp_path / "merges.txt").write_text("zz yy\n")
    with pytest.raises(TokenizerError, match=r"vocab\.json and merges\.txt do not fit together"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"tokenizer_class": "Qwen2Tokenizer"}, "is a Qwen2Tokenizer"),
        ({"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, "adds a space before a text"),
        ({"added_tokens_decoder": {"9": {"content": "<|im_end|>"}}}, r"has added tokens \(<\|im_end\|>\)"),
    ],
)
def test_the_two_files_of_another_tokenizer_than_gpt2s_are_refused(
    tmp_path: Path, made_tokenizer: MadeTokenizer, config: dict[str, object], what: str
) -> None:
    """They have no word on how text is cut, and GPT-2's way would give other tokens."""
    model = json.loads(made_tokenizer("gpt2").json)["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    gpt2 = {"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": {"0": {"content": "<|endoftext|>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(gpt2))
    assert load_tokenizer(str(tmp_path)).backend.encode("a b").ids
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match=f"this tokenizer {what}") as error:
        load_tokenizer(str(tmp_path))
    assert "save_pretrained" in (error.value.hint or "")


def test_a_sentencepiece_model_alone_is_refused_with_the_way_to_convert_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    with pytest.raises(TokenizerError, match="sentencepiece model") as error:
        load_tokenizer(str(tmp_path))
    assert "save_pretrained" in (error.value.hint or "")


def test_a_folder_without_a_tokenizer_says_what_one_is(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(TokenizerError, match="there is no tokenizer here") as error:
        load_tokenizer(str(tmp_path))
    assert "tokenizer.json" in (error.value.hint or "")
    with pytest.raises(TokenizerError, match="there is no tokenizer here"):
        load_tokenizer(str(tmp_path / "missing.json"))


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"model": {"type": "Nope"}}', b"\xff\xfe"])
def test_a_broken_tokenizer_json_is_told_as_such(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(TokenizerError, match=r"its tokenizer\.json cannot be read"):
        _ = load_tokenizer(str(tmp_path)).backend


@pytest.mark.parametrize("data", [b"{", b"[]", b"17"])
def test_a_broken_configuration_is_named(tmp_path: Path, tokenizer_folder: TokenizerFolder, data: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folder("gpt2") / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_bytes(data)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json is not a JSON object"):
        load_tokenizer(str(tmp_path))


def test_org_slash_name_is_the_hubs_unless_such_a_folder_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer_folder: TokenizerFolder
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []

    def no_store(address: str, _: object) -> None:
        asked.append(address)
        raise NotFound("not in this test", where=address)

    with monkeypatch.context() as patch:
        patch.setattr("trainshed.data.tokenize.tokenizer.open_store", no_store)
        for address in ("org/name", "hf://org/name", "./org/name", "org/name/folder", "org/tokenizer.json", "name"):
            with pytest.raises(NotFound):
                load_tokenizer(address)
    assert asked == ["hf://org/name", "hf://org/name", "./org/name", "org/name/folder", "org/tokenizer.json", "name"]
    here = tmp_path / "org" / "name"
    here.mkdir(parents=True)
    (here / "tokenizer.json").write_bytes((tokenizer_folder("gpt2") / "tokenizer.json").read_bytes())
    assert load_tokenizer("org/name").address == "org/name"


@pytest.mark.parametrize(
    ("config", "specials", "expected"),
    [
        ({"eos_token": "</s>"}, ["<s>", "</s>"], "</s>"),
        ({"eos_token": {"content": "</s>", "lstrip": False}}, ["<s>", "</s>"], "</s>"),
        ({"eos_token": "<|im_end|>"}, ["<|endoftext|>", "<|im_end|>"], "<|im_end|>"),
        ({"eos_token": None}, ["<|end_of_text|>"], "<|end_of_text|>"),
        ({}, ["<|endoftext|>", "<|im_end|>"], "<|endoftext|>"),
    ],
)
def test_the_end_of_a_document_is_what_the_configuration_names_else_the_one_usual_token(
    tmp_path: Path, config: dict[str, object], specials: list[str], expected: str
) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, bare(specials), **config))
    assert tokenizer.end_of_document() == tokenizer.token(expected)
    assert tokenizer.end_of_document("a").id == 0


def test_an_end_of_document_is_never_guessed(tmp_path: Path) -> None:
    none = load_tokenizer(write_folder(tmp_path / "none", bare(["[SEP]"])))
    with pytest.raises(TokenizerError, match="names no eos_token, and of the usual tokens none is there") as error:
        none.end_of_document()
    assert "--eod TOKEN with one of its special tokens ([SEP]), or --no-eod" in (error.value.hint or "")
    several = load_tokenizer(write_folder(tmp_path / "several", bare(["</s>", "<|endoftext|>"])))
    with pytest.raises(TokenizerError, match=r"several could be it \(<\|endoftext\|>, </s>\)"):
        several.end_of_document()
    named = load_tokenizer(write_folder(tmp_path / "named", bare(["</s>"]), eos_token="<eos>"))
    with pytest.raises(TokenizerError, match="names '<eos>' as eos_token, which is not in its vocabulary"):
        named.end_of_document()
    with pytest.raises(TokenizerError, match="--eod asks for the token '<x>'") as error:
        named.end_of_document("<x>")
    assert "its special tokens are: </s>" in (error.value.hint or "")
    nothing = load_tokenizer(write_folder(tmp_path / "nothing", bare([])))
    with pytest.raises(TokenizerError) as error:
        nothing.end_of_document()
    assert "it has none" in (error.value.hint or "")


def test_the_special_tokens_map_counts_where_the_configuration_is_silent(tmp_path: Path) -> None:
    write_folder(tmp_path, bare(["</s>", "<eos>"]), eos_token=None)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<eos>"}}))
    assert load_tokenizer(str(tmp_path)).end_of_document().text == "<eos>"


def test_truncation_and_padding_that_somebody_saved_do_not_touch_documents(
    tmp_path: Path, tokenizer_folder: TokenizerFolder
) -> None:
    backend = Backend.from_file(str(tokenizer_folder("gpt2") / "tokenizer.json"))
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=16)
    tokenizer = load_tokenizer(write_folder(tmp_path, backend))
    assert len(tokenizer.backend.encode("a b c d e f g h i j k l m n o p q r s t u v").ids) > 16
    assert len(tokenizer.backend.encode("a").ids) == 1


def test_the_vocabulary_is_as_large_as_its_largest_id_needs(tmp_path: Path, made_tokenizer: MadeTokenizer) -> None:
    backend = bare(["</s>"])
    plain = json.loads(backend.to_str())
    plain["added_tokens"][0]["id"] = 70_000
    plain["model"]["vocab"]["</s>"] = 70_000
    assert load_tokenizer(write_folder(tmp_path, Backend.from_str(json.dumps(plain)))).vocab_size == 70_001
    assert made_tokenizer("large").vocab_size == made_tokenizers.INT32_VOCAB


def test_it_travels_to_worker_processes(made_tokenizer: MadeTokenizer) -> None:
    tokenizer = made_tokenizer("qwen")
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again == tokenizer
    assert again.backend.encode("Some text.").ids == tokenizer.backend.encode("Some text.").ids
    assert "tokenizer.json" not in repr(again)
    same = tokenizer_from_files(tokenizer.address, {"tokenizer.json": tokenizer.json})
    assert same.decode(same.backend.encode("text<|endoftext|>").ids) == "text<|endoftext|>"
