"""Where a conversion reads from: what format it is in, which version of it, and a copy where it must be on a disk."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainshed.checkpoints.base import HF_EXCLUDE, HF_INCLUDE
from trainshed.checkpoints.formats import WeightsFormat, detect_format, open_weights
from trainshed.checkpoints.native.folder import find_checkpoint
from trainshed.checkpoints.weights import Weights
from trainshed.reporting import Reporter
from trainshed.storage import LocalStore, StoreOptions, copy_tree, join, open_folder, open_store, parse


class ConversionSource:
    """Weights at an address; `pinned` names them for ever where their store can (the Hub's commit)."""

    def __init__(self, address: str, options: StoreOptions | None, vocab_size: int | None = None) -> None:
        self._asked, self._options, self._vocab_size = address, options, vocab_size
        self.format: WeightsFormat = detect_format(address, options)
        self._is_local = parse(address).scheme == "file"
        store, path = open_store(address, options)
        self.pinned = os.path.abspath(str(parse(address))) if self._is_local else join(store.url, path)
        self._folder: Path | None = None

    @property
    def is_at_hand(self) -> bool:
        """Whether it is read where it is; anything else is fetched first."""
        return self._is_local or self.format == "native"

    @property
    def address(self) -> str:
        """Where the weights are read: the address itself, or the copy of it."""
        return self._asked if self._folder is None else str(self._folder)

    @contextmanager
    def opened(self, place: Path, reporter: Reporter) -> Iterator[Weights]:
        """Open the weights; formats that are read from a disk are fetched below `place` first, if need be."""
        if not self.is_at_hand:
            name = f"source-{hashlib.sha256(self.pinned.encode()).hexdigest()[:16]}"
            for other in place.glob("source-*"):
                if other.name != name:
                    shutil.rmtree(other)
            self._folder = place / name
            include, exclude = (HF_INCLUDE, HF_EXCLUDE) if self.format == "hf" else ((), ())
            copy_tree(
                self.pinned,
                str(self._folder),
                include=include,
                exclude=exclude,
                reporter=reporter,
                options=self._options,
            )
        with open_weights(
            self.address, vocab_size=self._vocab_size, options=self._options, reporter=reporter
        ) as weights:
            yield weights

    def fingerprint(self) -> list[object]:
        """What changes whenever the source does: of a checkpoint its manifest, else every file's version."""
        if self.format == "native":
            found = find_checkpoint(*open_store(self._asked, self._options))
            return [found.path, found.manifest.sha256]
        if self._folder is not None:
            return [[info.path, info.size] for info in LocalStore(self._folder).list()] + [self.pinned]
        return [[info.path, info.size, info.version] for info in open_folder(self._asked, self._options).list()]
