"""Varied real text gathered from the machine itself: documentation, licences, changelogs, source code. No download."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import random
import string
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import orjson

ROOTS = ("/usr/share", "/usr/lib/python3", "/usr/include", sysconfig.get_paths()["stdlib"], sys.prefix)
ENDINGS = {
    *(".py", ".md", ".txt", ".rst", ".h", ".c", ".html", ".js", ".css", ".po", ".json", ".gz", ".pl", ".pm", ".ts"),
    *(".hpp", ".cpp", ".java", ".tcl", ".xml", ".sh"),
}
SHORTEST, LONGEST = 200, 400_000


def documents() -> Iterator[str]:
    """Yield every distinct text below the roots that is neither tiny nor huge, in a fixed order."""
    seen: set[bytes] = set()
    for root in ROOTS:
        for folder, folders, files in os.walk(root):
            folders.sort()
            for name in sorted(files):
                path = Path(folder) / name
                if path.is_symlink() or path.suffix not in ENDINGS:
                    continue
                try:
                    data = path.read_bytes()
                    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
                except (OSError, UnicodeDecodeError, EOFError, gzip.BadGzipFile):
                    continue
                digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
                if SHORTEST <= len(text) <= LONGEST and digest not in seen:
                    seen.add(digest)
                    yield text


def gather(target: Path, megabytes: float) -> Path:
    """Write TARGET with at least that much text; beyond what the machine has, letters are swapped to make new words."""
    if target.exists():
        return target
    texts = list(documents())
    random.Random(0).shuffle(texts)
    partial = target.with_suffix(".partial")
    written, swap = 0, 0
    with partial.open("wb") as file:
        while written < megabytes * 1e6:
            letters = list(string.ascii_lowercase)
            random.Random(swap).shuffle(letters)
            table = str.maketrans(string.ascii_lowercase, "".join(letters)) if swap else {}
            for text in texts:
                row = text.translate(table) if table else text
                file.write(orjson.dumps({"text": row}) + b"\n")
                written += len(row.encode())
                if written >= megabytes * 1e6:
                    break
            swap += 1
    partial.replace(target)
    return target


def byte_level_bpe(corpus: Path, target: Path, vocab_size: int = 32_000) -> Path:
    """Train a byte-level BPE with Llama 3's split on 20 MB of the corpus; return the tokenizer's folder."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    if target.exists():
        return target
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )

    def sample() -> Iterator[str]:
        room = 20_000_000
        with corpus.open("rb") as file:
            for line in file:
                text = orjson.loads(line)["text"]
                room -= len(text)
                yield text
                if room < 0:
                    return

    tokenizer.train_from_iterator(sample(), trainer)
    target.mkdir(parents=True)
    (target / "tokenizer_config.json").write_bytes(
        orjson.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    )
    tokenizer.save(str(target / "tokenizer.json"))
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("--megabytes", type=float, default=150)
    arguments = parser.parse_args()
    gather(arguments.target, arguments.megabytes)
