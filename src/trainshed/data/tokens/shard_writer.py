"""What writing one shard means, wherever it goes: on a disk (`local_shard`) or in a bucket (`remote_shard`)."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trainshed.data.encode.block_tokenizer import Tokens
from trainshed.errors import AccessDenied, NoSpace, StorageError
from trainshed.storage.manifest import FileEntry

if TYPE_CHECKING:
    import numpy as np

BAD_LINES_KEPT = 20
"""How many bad lines the manifest quotes; it counts them all."""


@dataclass(frozen=True)
class Counts:
    """What a shard holds so far."""

    documents: int = 0
    empty_documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    bad_lines: int = 0
    bad_line_examples: tuple[str, ...] = ()

    def plus(self, other: Counts) -> Counts:
        """Add two counts."""
        return Counts(
            self.documents + other.documents,
            self.empty_documents + other.empty_documents,
            self.tokens + other.tokens,
            self.text_bytes + other.text_bytes,
            self.bad_lines + other.bad_lines,
            (self.bad_line_examples + other.bad_line_examples)[:BAD_LINES_KEPT],
        )


@dataclass
class Progress:
    """How far a shard has got: pieces read to the end (their hashes), and a position in the next one."""

    piece_hashes: list[str | None] = field(default_factory=list)
    position: int = 0
    counts: Counts = field(default_factory=Counts)


class ShardWriter(Protocol):
    """Takes the tokens of one shard, in order."""

    progress: Progress
    """How far it has got: after opening, how far an earlier attempt had got."""

    def append(self, tokens: Tokens, counts: Counts, position: int) -> None:
        """Write a block's tokens; `position` is where reading stands behind it."""
        ...

    def piece_done(self, sha256: str | None) -> None:
        """Note that a piece was read to its end."""
        ...

    def finish(self, dtype: np.dtype) -> list[FileEntry]:
        """Make `.bin` and `.idx` complete and visible."""
        ...


@contextmanager
def explained(where: str) -> Iterator[None]:
    """Turn what the disk says into our words."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(Path(where).parent).free
            raise NoSpace(
                f"the disk is full ({free / 1e6:.0f} MB left)",
                where=where,
                hint="free some space and run it again: it goes on where it stopped",
            ) from None
        kind = AccessDenied if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else StorageError
        raise kind(f"cannot be written: {(error.strerror or str(error)).lower()}", where=where) from error
