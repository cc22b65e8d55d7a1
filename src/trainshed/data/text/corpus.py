"""Which files make up a corpus, and which shard reads which of them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from trainshed.data.text.formats import Kind, TextDocuments, format_of
from trainshed.data.text.reading import Piece, most_parts, split_piece
from trainshed.errors import AddressError, InputError, NotFound
from trainshed.storage import expand, open_store

if TYPE_CHECKING:
    from trainshed.storage import Found, StoreOptions


def find_pieces(
    patterns: Sequence[str],
    *,
    key: str = "text",
    kind: Kind | None = None,
    documents: TextDocuments = "file",
    options: StoreOptions | None = None,
) -> list[Piece]:
    """List the files of a corpus: patterns in the order given, the files of each sorted by path.

    The order of documents in the output is this order, so it must not depend on anything else.
    """
    pieces: list[Piece] = []
    seen: set[str] = set()
    for pattern in patterns:
        for found in _expanded(pattern, options):
            if found.address in seen:
                raise InputError(
                    "this file is named by two inputs",
                    where=found.address,
                    hint="write inputs that do not overlap",
                )
            seen.add(found.address)
            pieces.append(
                Piece(
                    found.address,
                    found.info.size,
                    found.info.version,
                    format_of(found.address, kind),
                    key,
                    documents,
                )
            )
    return pieces


def _expanded(pattern: str, options: StoreOptions | None) -> list[Found]:
    try:
        return expand(pattern, options)
    except NotFound as error:
        # What a person wrote matches nothing: that is wrong input, not a store that failed.
        raise AddressError(error.what, where=error.where, hint=error.hint) from None


def assign_shards(pieces: list[Piece], shards: int, options: StoreOptions | None = None) -> list[list[Piece]]:
    """Give each shard a run of consecutive files, by count; cut files only where there are fewer than shards.

    By count and not by size: a file that grows then changes one shard, not the borders of all of them.
    """
    if len(pieces) < shards:
        pieces = _split_to(pieces, shards, options)
    if len(pieces) < shards:
        raise InputError(
            f"{shards} shards are asked for, but the input can be cut into {len(pieces)} at most",
            hint=f"write --shards {len(pieces)} or less: compressed files and whole-file documents cannot be cut",
        )
    cuts = [len(pieces) * i // shards for i in range(shards + 1)]
    return [pieces[a:b] for a, b in pairwise(cuts)]


def _split_to(pieces: list[Piece], shards: int, options: StoreOptions | None) -> list[Piece]:
    """Cut the files that can be cut, always the one with the largest parts, until there are enough pieces."""
    places = [open_store(piece.address, options) for piece in pieces]
    parts = [1] * len(pieces)
    room = [most_parts(piece, *place) for piece, place in zip(pieces, places, strict=True)]
    largest: list[tuple[float, int]] = [
        (-piece.size, number) for number, piece in enumerate(pieces) if room[number] > 1
    ]
    heapq.heapify(largest)
    for _ in range(shards - len(pieces)):
        if not largest:
            break
        _, number = heapq.heappop(largest)
        parts[number] += 1
        if parts[number] < room[number]:
            heapq.heappush(largest, (-pieces[number].size / parts[number], number))
    return [
        part
        for piece, count, place in zip(pieces, parts, places, strict=True)
        for part in (split_piece(piece, count, *place) if count > 1 else [piece])
    ]
