"""Which files make up a corpus, and which shard reads which of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from trainshed.data.formats import Kind, TextDocuments, format_of
from trainshed.data.reading import Piece, split_piece
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
    """Cut the files that can be cut, in proportion to their size, until there are enough pieces."""
    total = sum(piece.size for piece in pieces if piece.splittable) or 1
    missing = shards - sum(not piece.splittable for piece in pieces)
    cut: list[Piece] = []
    for piece in pieces:
        parts = -(-missing * piece.size // total) if piece.splittable else 1
        store, path = open_store(piece.address, options)
        cut += split_piece(piece, parts, store, path) if parts > 1 else [piece]
    return cut
