"""What GGUF says of a tokenizer: tokens with their kinds, merges, special tokens, how it cuts text, its template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainshed.checkpoints.hf.companion_files import special_token_ids
from trainshed.data.tokenize.tokenizer import TEMPLATE_FILES, TOKENIZER_FILES, tokenizer_from_files
from trainshed.errors import TokenizerError

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {_WORDS + r"\p{N}{1,3}" + _SPACES: "llama-bpe", _WORDS + r"\p{N}" + _SPACES: "qwen2"}
"""How text is cut, and llama.cpp's name for it (`llama-vocab.cpp`)."""
_BYTE_LEVEL = "gpt-2"
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


@dataclass(frozen=True)
class GgufVocabulary:
    """The tokenizer of a GGUF file."""

    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    cut: str
    ids: Mapping[str, int]
    """`bos`, `eos` and `padding`, as far as there are such tokens."""
    adds_bos: bool
    chat_template: str | None


def gguf_vocabulary(companions: Mapping[str, bytes], vocab_size: int) -> GgufVocabulary:
    """Read the tokenizer beside weights; raises where there is none, or one that GGUF readers would cut otherwise."""
    if "tokenizer.json" not in companions:
        raise TokenizerError(
            "a GGUF file carries its tokenizer, and there is no tokenizer.json",
            where="tokenizer",
            hint="name a folder with one: `tokenizer:` in the recipe, or --tokenizer",
        )
    body = json.loads(companions["tokenizer.json"])
    model = body["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        kind = "BPE with byte fallback (sentencepiece)" if model.get("byte_fallback") else model.get("type")
        raise TokenizerError(
            f"a tokenizer of kind {kind} is not written into GGUF", where="tokenizer.json", hint="byte-level BPE is"
        )
    _refuse_normalizer(body.get("normalizer"))
    tokens = {index: text for text, index in model["vocab"].items()}
    kinds = dict.fromkeys(tokens, NORMAL)
    for added in body.get("added_tokens") or ():
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added.get("special") else USER_DEFINED
    if tokens and max(tokens) >= vocab_size:
        raise TokenizerError(
            f"the tokenizer has a token {max(tokens)}, and the model {vocab_size} rows", where="tokenizer.json"
        )
    ids = {key: _first(value) for key, value in special_token_ids(companions).items()}
    named = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
    return GgufVocabulary(
        tokens=[tokens.get(index, f"[PAD{index}]") for index in range(vocab_size)],
        kinds=[kinds.get(index, UNUSED) for index in range(vocab_size)],
        merges=[merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        cut=_cut(body.get("pre_tokenizer")),
        ids={name: ids[key] for name, key in named.items() if isinstance(ids.get(key), int)},
        adds_bos=_adds_bos(companions["tokenizer.json"], ids.get("bos_token_id")),
        chat_template=_chat_template(companions),
    )


def _refuse_normalizer(normalizer: Mapping[str, Any] | None) -> None:
    """Refuse what changes text before it is cut, which a GGUF file cannot say; llama.cpp leaves out Qwen's NFC too."""
    steps = (normalizer or {}).get("normalizers") or ([normalizer] if normalizer else [])
    changing = [step["type"] for step in steps if step["type"] != "NFC"]
    if changing:
        raise TokenizerError(
            f"this tokenizer changes text before it cuts it ({', '.join(changing)}), and a GGUF file cannot say so",
            where="tokenizer.json: normalizer",
            hint="export as hf",
        )


def _cut(pre_tokenizer: Mapping[str, Any] | None) -> str:
    """Return llama.cpp's name for how a tokenizer cuts text; one that it does not know would give other tokens."""
    steps = (pre_tokenizer or {}).get("pretokenizers") or ([pre_tokenizer] if pre_tokenizer else [])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True) and not steps[0].get("add_prefix_space"):
        return _BYTE_LEVEL
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        name = _PATTERNS.get((steps[0].get("pattern") or {}).get("Regex", ""))
        if name is not None:
            return name
    raise TokenizerError(
        f"llama.cpp does not know how this tokenizer cuts text ({', '.join(kinds) or 'not at all'})",
        where="tokenizer.json: pre_tokenizer",
        hint="GPT-2's, Llama 3's and Qwen's ways are written; export as hf otherwise",
    )


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value


def _adds_bos(tokenizer_json: bytes, bos: Any) -> bool:
    from tokenizers import Tokenizer as HfTokenizer

    ids = HfTokenizer.from_str(tokenizer_json.decode()).encode("a").ids
    return bos is not None and ids[:1] == [bos]


def _chat_template(companions: Mapping[str, bytes]) -> str | None:
    known = {name: data for name, data in companions.items() if name in (*TOKENIZER_FILES, *TEMPLATE_FILES)}
    return tokenizer_from_files("tokenizer.json", known).chat_templates.get("default")
