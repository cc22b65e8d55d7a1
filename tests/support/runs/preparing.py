"""Preparing tokens in a test: inputs written, the command's steps taken, results read back, and the oracle's bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from support.models import made_tokenizers
from trainshed.data.prepare import PrepareResult, ShardJob, TokenizeConfig, prepare
from trainshed.data.text.corpus import assign_shards, find_inputs
from trainshed.data.text.formats import DocumentBoundary, TextFormatName
from trainshed.data.tokenize.tokenizer import Tokenizer
from trainshed.data.tokens.indexed_dataset import token_dtype
from trainshed.data.tokens.token_files import shard_name
from trainshed.reporting import ProgressTask

TokenizerFolder = Callable[[str], Path]
MadeTokenizer = Callable[[str], Tokenizer]
WriteTokens = Callable[..., str]
"""What the fixtures of these names are."""

ODD_TEXTS = [
    "",
    "two\nlines\r\nand a tab\t.",
    "naïve café, 日本語, 👩‍👩‍👧‍👦, \u2028 and \u0000",
    "a special token inside: <|endoftext|> <s> </s>.",
    "  spaces  ",
    "\ufeffa byte order mark",
    "𲨷.s: a letter of Unicode 17",
]


def documents(count: int = 300, *, odd: bool = True) -> list[str]:
    """Docstrings, with odd and empty documents between them."""
    texts = [made_tokenizers.docstrings()[i % 1500] for i in range(count)]
    if odd:
        for number, text in enumerate(ODD_TEXTS):
            texts.insert(number * 13 % (len(texts) + 1), text)
    return texts


def jsonl(texts: Sequence[str], key: str = "text") -> bytes:
    return b"".join(json.dumps({"id": i, key: text}).encode() + b"\n" for i, text in enumerate(texts))


@dataclass
class Notes:
    """A reporter that remembers."""

    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    advanced: float = 0

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    @contextmanager
    def task(self, label: str, *, total: float | None, unit: str) -> Iterator[ProgressTask]:
        yield self  # type: ignore[misc]

    def advance(self, amount: float) -> None:
        self.advanced += amount

    def describe(self, text: str) -> None:
        pass


def prepare_text(
    inputs: Sequence[str | Path] | str | Path,
    tokenizer: Tokenizer,
    output: str | Path,
    *,
    shards: int = 1,
    workers: int = 1,
    key: str = "text",
    kind: TextFormatName | None = None,
    split: DocumentBoundary = "file",
    eod: bool = True,
    bos: bool = False,
    on_bad_line: Literal["stop", "skip"] = "stop",
    **options: Any,
) -> PrepareResult:
    """What `trainshed data prepare` does."""
    patterns = [inputs] if isinstance(inputs, str | Path) else inputs
    pieces = find_inputs([str(pattern) for pattern in patterns], key=key, format=kind, documents=split)
    how = TokenizeConfig(
        tokenizer,
        eod=tokenizer.end_of_document() if eod else None,
        bos=tokenizer.beginning_of_document() if bos else None,
        on_bad_line=on_bad_line,
    )
    jobs = [
        ShardJob(shard_name(str(output), number, shards), tuple(assigned))
        for number, assigned in enumerate(assign_shards(pieces, shards))
    ]
    return prepare(jobs, how, workers=workers, **options)


def contents(prefix: str | Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def left_behind(folder: Path) -> list[str]:
    """Files that only a resume needs."""
    return sorted(path.name for path in folder.rglob("*") if "partial" in path.name or path.name.endswith(".part"))


def megatron_bytes(
    megatron: SimpleNamespace,
    folder: Path,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    eod: bool = True,
    bos: bool = False,
) -> tuple[bytes, bytes]:
    """What megatron-core writes for these documents, encoded one by one without special tokens."""
    dtype = token_dtype(tokenizer.vocab_size)
    prefix = folder / "megatron"
    builder = megatron.indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype.type)
    for text in texts:
        ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
        if ids:
            begin = [tokenizer.beginning_of_document().id] if bos else []
            end = [tokenizer.end_of_document().id] if eod else []
            builder.add_item(megatron.torch.from_numpy(np.array([*begin, *ids, *end], np.int64)))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return contents(prefix)
