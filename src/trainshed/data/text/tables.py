"""Text of CSV and TSV files, row by row, and of JSON arrays, which are read whole."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from trainshed.errors import BadDocument, InputError

FIELD_BYTES = 256 * 1024 * 1024
"""A field larger than this is a quotation mark that nobody closed."""

ARRAY_BYTES = 1024 * 1024 * 1024
"""JSON has no boundaries to read an array by; one larger than this would take the memory of the machine."""

CONVERT_ARRAY = "jq -c '.[]' FILE.json > FILE.jsonl"


def csv_texts(chunks: Iterable[bytes], delimiter: str, column: str, where: str) -> Iterator[str | bytes | None]:
    """Yield the text of one column, row by row: None where a row has none, bytes where it is not UTF-8.

    The first line names the columns. Quoted fields may hold line ends, as RFC 4180 says; broken quoting is an error,
    since everything after it would be read as something else.
    """
    csv.field_size_limit(FIELD_BYTES)
    reader = csv.reader(_lines(chunks), delimiter=delimiter, strict=True)
    try:
        header = next(reader, None)
        if header is None:
            return
        if header.count(column) != 1:
            count = "no column" if column not in header else "more than one column"
            raise InputError(
                f"there is {count} {column!r}",
                where=where,
                hint=f"write --key with one of its columns, which its first line names: {', '.join(header)}",
            )
        at = header.index(column)
        for row in reader:
            if row:
                yield _checked(row[at]) if at < len(row) else None
    except csv.Error as error:
        raise BadDocument(
            f"broken CSV: {error}", where=f"{where}:{reader.line_num}", hint='write fields with " as "…""…"'
        ) from None


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Lines with their ends; bytes that are not UTF-8 survive as surrogates until their row is known."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    rest, first = "", True
    for chunk in chunks:
        text = rest + decoder.decode(chunk)
        if first and text:
            text, first = text.removeprefix("\ufeff"), False
        *whole, rest = text.split("\n")
        for line in whole:
            yield f"{line}\n"
    rest += decoder.decode(b"", final=True)
    if rest:
        yield rest


def _checked(text: str) -> str | bytes:
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogateescape")
    return text


def array_rows(chunks: Iterable[bytes], where: str) -> list[Any]:
    """Return the elements of a file that is one JSON array."""
    parts, size = [], 0
    for chunk in chunks:
        parts.append(chunk)
        size += len(chunk)
        if size > ARRAY_BYTES:
            raise InputError(
                f"this JSON array is larger than {ARRAY_BYTES // 2**20:,} MiB, and one is read whole",
                where=where,
                hint=f"write one object a line, which is read in pieces: {CONVERT_ARRAY}",
            )
    data = b"".join(parts).removeprefix(codecs.BOM_UTF8)
    if not data.strip():
        return []
    try:
        rows = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadDocument(
            f"broken JSON: {error}", where=where, hint="write --format jsonl if it holds one object a line"
        ) from None
    if not isinstance(rows, list):
        raise BadDocument(
            "this JSON file holds no array", where=where, hint="write --format jsonl if it holds one object a line"
        )
    return rows


def refuse_array(first: bytes, where: str) -> None:
    """Raise where a file that should hold one JSON object a line begins an array of them instead."""
    text = first.removeprefix(codecs.BOM_UTF8).lstrip()
    if not text.startswith(b"["):
        return
    try:
        row = orjson.loads(text.partition(b"\n")[0])
    except orjson.JSONDecodeError:
        row = [{}]  # it goes on over several lines
    if row and isinstance(row[0], dict):
        raise BadDocument(
            "this is a JSON array, not one JSON object a line",
            where=where,
            hint=f"write --format json to read it as one, or convert it: {CONVERT_ARRAY}",
        )
