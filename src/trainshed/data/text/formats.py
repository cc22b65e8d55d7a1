"""What kind of text a file holds, and its bytes made readable: names to formats, compressed chunks to plain ones."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from trainshed.errors import BadDocument, InputError, MissingExtra
from trainshed.redaction import shown_address

# The recipe's schema and the flag of `data prepare` say the same; a test holds them together.
Kind = Literal["jsonl", "json", "csv", "tsv", "parquet", "text"]
Compression = Literal["gz", "zst"]
TextDocuments = Literal["file", "line", "blank_line"]
"""Where a plain-text document ends: at the end of its file, of each line, or at each blank line."""

ENDINGS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "text",
    ".md": "text",
    ".markdown": "text",
    ".rst": "text",
}
_MARKUP = (
    "holds markup beside its text",
    "extract the text first (trafilatura does), or write --format text to take it as it is, tags included",
)
_PRINTED = ("is made for printing", "extract its text into .txt or .jsonl files first")
_ARCHIVE = ("is an archive", "unpack it first")
REFUSED = {
    **dict.fromkeys((".html", ".htm", ".xhtml", ".xml"), _MARKUP),
    **dict.fromkeys((".pdf", ".docx", ".epub"), _PRINTED),
    **dict.fromkeys((".tar", ".tgz", ".zip"), _ARCHIVE),
    ".xlsx": ("is a spreadsheet", "save it as .csv"),
    ".arrow": ("is an Arrow file", "save it as parquet: datasets.load_from_disk(DIR).to_parquet(FILE)"),
}
"""Endings of what people have as well and what is not read by itself: what it is, and what to do."""
COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst", ".zstd": "zst"}

# Small enough that even a file compressed a thousandfold inflates to a bounded piece at a time.
INFLATE_BYTES = 256 * 1024


@dataclass(frozen=True)
class Format:
    """How to read a file: what it holds and how it is compressed."""

    kind: Kind
    compression: Compression | None = None

    @property
    def by_line(self) -> bool:
        """Whether a place in the file is a line of it; otherwise it is a row."""
        return self.kind in ("jsonl", "text")


def format_of(address: str, kind: Kind | None = None) -> Format:
    """Tell a file's format by its name; `kind` overrules the ending."""
    name = shown_address(address).lower().removesuffix("?…")
    compression = next((c for ending, c in COMPRESSIONS.items() if name.endswith(ending)), None)
    if compression:
        name = name.rsplit(".", 1)[0]
    found = kind or next((k for ending, k in ENDINGS.items() if name.endswith(ending)), None)
    if found is None:
        ending = next((each for each in REFUSED if name.endswith(each)), None)
        if ending is not None:
            what, hint = REFUSED[ending]
            raise InputError(f"a {ending} file {what}", where=address, hint=hint)
        raise InputError(
            "cannot tell from its name what this file holds",
            where=address,
            hint=f"known endings: {', '.join(ENDINGS)} (all but parquet also with .gz or .zst); "
            f"or write --format with one of {', '.join(get_args(Kind))}",
        )
    if found == "parquet" and compression:
        raise InputError(
            "a compressed parquet file cannot be read in pieces", where=address, hint="decompress it first"
        )
    return Format(found, compression)


def decompress(chunks: Iterable[bytes], compression: Compression | None, where: str) -> Iterator[bytes]:
    """Inflate a stream of chunks; several frames or members in a row are one stream, a cut one is an error."""
    if compression is None:
        yield from chunks
    elif compression == "gz":
        yield from _inflate_gz(chunks, where)
    else:
        yield from _inflate_zst(chunks, where)


def _pieces(chunks: Iterable[bytes]) -> Iterator[bytes]:
    for chunk in chunks:
        for at in range(0, len(chunk), INFLATE_BYTES):
            yield chunk[at : at + INFLATE_BYTES]


def _inflate_gz(chunks: Iterable[bytes], where: str) -> Iterator[bytes]:
    member = zlib.decompressobj(wbits=31)
    started = False
    try:
        for piece in _pieces(chunks):
            data = piece
            while data:
                if member.eof:
                    member, started = zlib.decompressobj(wbits=31), False
                    data = data.lstrip(b"\0")  # tools pad archives with zeros
                    if not data:
                        break
                started = True
                yield member.decompress(data)
                data = member.unused_data
    except zlib.error as error:
        raise _broken(where, "gzip", str(error)) from None
    if started and not member.eof:
        raise _broken(where, "gzip", "the file ends in the middle of the data")


def _inflate_zst(chunks: Iterable[bytes], where: str) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise MissingExtra.named("data", "reading .zst files") from None
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
    frame = decompressor.decompressobj()
    started = False
    try:
        for piece in _pieces(chunks):
            data = piece
            while data:
                if frame.eof:
                    frame, started = decompressor.decompressobj(), False
                started = True
                yield frame.decompress(data)
                data = frame.unused_data if frame.eof else b""
    except zstandard.ZstdError as error:
        raise _broken(where, "zstd", str(error)) from None
    if started and not frame.eof:
        raise _broken(where, "zstd", "the file ends in the middle of the data")


def _broken(where: str, what: str, detail: str) -> BadDocument:
    return BadDocument(f"this {what} file is damaged: {detail}", where=where, hint="fetch it again")
