"""Text formats that a plugin registers: one class reads the documents of a file."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from trainshed.errors import BadDocument, TrainshedError
from trainshed.plugins import Registry


class DocumentReader(ABC):
    """Reads the documents of one file. The class is registered in `TEXT_FORMATS`, and a source's `format` names it.

    The file is decompressed already (.gz, .zst) and is read once, from its start. The same bytes must give the same
    documents: their order is the order of the data. A file is read by one process and never cut.
    """

    def __init__(self, key: str) -> None:
        """Take the source's `key`: the field that holds the text, where a format has fields."""
        self.key = key

    @abstractmethod
    def documents(self, file: BinaryIO) -> Iterator[str | None]:
        """Yield the text of each document; None is a row without text, which `data.on_bad_line` decides about."""


_OURS = "trainshed.data.text.reader:InputReader"
TEXT_FORMATS: Registry[Any] = Registry(
    "text format", dict.fromkeys(("jsonl", "json", "csv", "tsv", "parquet", "text"), _OURS)
)
"""By name: a `DocumentReader`. Our own formats are all read by `InputReader`."""


def read_registered(name: str, key: str, chunks: Iterable[bytes], where: str) -> Iterator[str | None]:
    """Yield the documents of a file in a registered format; the chunks are read to their end in any case."""
    reader: DocumentReader = TEXT_FORMATS.find(name)(key)
    chunks = iter(chunks)
    row = 0
    try:
        for document in reader.documents(io.BufferedReader(_ChunkStream(chunks))):
            row += 1
            yield document
    except TrainshedError:
        raise
    except Exception as error:
        raise BadDocument(
            f"the text format {name} cannot read this: {type(error).__name__}: {error}",
            where=f"{where}, after row {row}",
            hint=f"{TEXT_FORMATS.place(name)} has registered it",
        ) from error
    for _ in chunks:  # what the reader left: the hash is of the whole file
        pass


class _ChunkStream(io.RawIOBase):
    """Chunks of bytes as a file that is read from its start."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = chunks, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = chunk
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size
