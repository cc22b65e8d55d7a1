"""A shard in a bucket: one multipart object that nobody sees until it is whole. A rerun starts the shard again."""

from __future__ import annotations

import hashlib
import tempfile
from contextlib import ExitStack, suppress
from typing import IO, TYPE_CHECKING

from trainshed.data.encode.block_tokenizer import Tokens
from trainshed.data.tokens.shard_writer import Counts, Progress, explained
from trainshed.storage.manifest import FileEntry

if TYPE_CHECKING:
    import numpy as np

    from trainshed.storage import Store


class RemoteShardWriter:
    """A shard in a bucket: tokens stream up as they come, lengths wait on a local scratch file for the index."""

    def __init__(self, store: Store, path: str, stack: ExitStack) -> None:
        self._store, self._path = store, path
        self.progress = Progress()
        # Its own stack, so that `finish` can complete the upload while leaving early in any way aborts it.
        self._upload = ExitStack()
        stack.callback(self._abort)
        self._writer = self._upload.enter_context(store.writer(f"{path}.bin"))
        self._lengths: IO[bytes] = stack.enter_context(tempfile.NamedTemporaryFile(prefix="trainshed-lengths-"))
        self._digest = hashlib.sha256()
        self._size = 0

    def append(self, tokens: Tokens, counts: Counts, position: int) -> None:
        """Send a block on its way."""
        self._writer.write(tokens.data)
        self._digest.update(tokens.data)
        self._size += len(tokens.data)
        with explained(self._lengths.name):
            self._lengths.write(tokens.lengths)
        self.progress.counts = self.progress.counts.plus(counts)
        self.progress.position = position

    def piece_done(self, sha256: str | None) -> None:
        """Note that a piece was read to its end."""
        self.progress.piece_hashes.append(sha256)

    def finish(self, dtype: np.dtype) -> list[FileEntry]:
        """Complete the upload, then write the index."""
        from trainshed.data.tokens.indexed import index_bytes, lengths_from_file

        with explained(self._lengths.name):
            self._lengths.flush()
        for ending in ("manifest.json", "idx"):  # of older tokens: see LocalShardWriter.finish
            self._store.delete(f"{self._path}.{ending}")
        self._upload.close()
        digest, size = hashlib.sha256(), 0
        with self._store.writer(f"{self._path}.idx") as writer:
            for data in index_bytes(dtype, lengths_from_file(self._lengths.name)):
                writer.write(data)
                digest.update(data)
                size += len(data)
        name = self._path.rsplit("/", 1)[-1]
        return [
            FileEntry(f"{name}.bin", self._size, f"sha256:{self._digest.hexdigest()}"),
            FileEntry(f"{name}.idx", size, f"sha256:{digest.hexdigest()}"),
        ]

    def _abort(self) -> None:
        """Leave the upload as an error would, so that nobody ever sees a part of a shard; a finished one is closed."""
        with suppress(_Unfinished), self._upload:
            raise _Unfinished


class _Unfinished(Exception):
    pass
