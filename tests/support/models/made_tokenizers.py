"""Small tokenizers of the kinds people use, learned from the docstrings of Python's own standard library.

Each is a `tokenizers` object as its family publishes it, only with a small vocabulary; `save` writes it as a folder
with a tokenizer_config.json, as `save_pretrained` would.
"""

from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

VOCAB = 2000
INT32_VOCAB = 65_500
"""Megatron stores ids as int32 from this vocabulary size on."""

# The split patterns as their models' tokenizer.json files have them.
LLAMA3_PATTERN = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")


@cache
def docstrings() -> tuple[str, ...]:
    """Real English with code, tables and quotes in it, the same on every machine with this Python."""
    return tuple(islice(_docstrings(), 1500))


def _docstrings() -> Iterator[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.glob("*.py")):
        tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) > 40:
                    yield text


def gpt2() -> Tokenizer:
    """Byte-level BPE with GPT-2's own split, no normalizer, no post-processor that adds anything."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return _learned(tokenizer, ["<|endoftext|>"], byte_level=True)


def llama3() -> Tokenizer:
    """Llama 3: its own split, merges ignored for words in the vocabulary, and a post-processor that adds BOS."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = _split_then_bytes(LLAMA3_PATTERN)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    _learned(tokenizer, specials, byte_level=True)
    begin, begin_id = specials[0], tokenizer.token_to_id(specials[0])
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(
                single=f"{begin} $A",
                pair=f"{begin} $A {begin} $B",
                special_tokens=[(begin, begin_id)],
            ),
        ]
    )
    return tokenizer


def llama2() -> Tokenizer:
    """Llama 2: sentencepiece BPE as `transformers` converts it, with byte fallback and BOS."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    specials = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=specials + [f"<0x{byte:02X}>" for byte in range(256)],
        max_token_length=12,
        show_progress=False,
    )
    # Learned word by word; the published ones have no pre-tokenizer, and so does this one afterwards.
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.train_from_iterator(docstrings(), trainer)
    tokenizer.pre_tokenizer = None  # type: ignore[assignment]
    plain = json.loads(tokenizer.to_str())
    plain["added_tokens"] = [token for token in plain["added_tokens"] if token["content"] in specials]
    tokenizer = Tokenizer.from_str(json.dumps(plain))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def qwen() -> Tokenizer:
    """Qwen 2: NFC, its own split (single digits), chat tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _split_then_bytes(QWEN2_PATTERN)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return _learned(tokenizer, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], byte_level=True)


def bert() -> Tokenizer:
    """WordPiece over lower-cased text without accents: nothing that the fast encoder knows."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    specials = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]
    tokenizer.train_from_iterator(
        docstrings(), trainers.WordPieceTrainer(vocab_size=VOCAB, special_tokens=specials, show_progress=False)
    )
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", tokenizer.token_to_id("[SEP]")), ("[CLS]", tokenizer.token_to_id("[CLS]"))
    )
    return tokenizer


def large() -> Tokenizer:
    """A vocabulary that no longer fits Megatron's uint16: GPT-2's kind filled up with added words."""
    tokenizer = gpt2()
    missing = INT32_VOCAB - tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken(f"⟦{number}⟧", normalized=False) for number in range(missing)])
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": gpt2,
    "llama3": llama3,
    "llama2": llama2,
    "qwen": qwen,
    "bert": bert,
    "large": large,
}
CONFIGS: dict[str, dict[str, object]] = {
    "gpt2": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
    "llama2": {"bos_token": {"content": "<s>"}, "eos_token": {"content": "</s>"}, "add_bos_token": True},
    "qwen": {"bos_token": None, "eos_token": "<|endoftext|>"},
    "bert": {"sep_token": "[SEP]", "cls_token": "[CLS]"},
    "large": {"eos_token": "<|endoftext|>"},
}


def save(tokenizer: Tokenizer, config: dict[str, object], folder: Path) -> Path:
    """Write a tokenizer folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _split_then_bytes(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _learned(tokenizer: Tokenizer, specials: list[str], *, byte_level: bool) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if byte_level else []
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(docstrings(), trainer)
    return tokenizer
