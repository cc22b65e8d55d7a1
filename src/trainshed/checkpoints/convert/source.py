"""The source of a conversion: its format, its version, and a local copy where the format must be read from a disk."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainshed.checkpoints.base import HF_EXCLUDE, HF_INCLUDE
from trainshed.checkpoints.formats import WeightsFormat, detect_format, open_weights
from trainshed.checkpoints.hf.weights import HfWeights
from trainshed.checkpoints.native.folder import find_checkpoint
from trainshed.checkpoints.weights import Weights
from trainshed.recipe import ModelConfig
from trainshed.reporting import Reporter
from trainshed.storage import LocalStore, StoreOptions, copy_tree, join, open_folder, open_store, parse


class ConversionSource:
    """Weights at an address; `pinned` is the address with its version where the store has one (the Hub's commit)."""

    def __init__(
        self, address: str, options: StoreOptions | None, vocab_size: int | None = None, *, averaged: bool = False
    ) -> None:
        self._address, self._options, self._vocab_size, self._averaged = address, options, vocab_size, averaged
        self.format: WeightsFormat = detect_format(address, options)
        self._is_local = parse(address).scheme == "file"
        store, path = open_store(address, options)
        self.pinned = os.path.abspath(str(parse(address))) if self._is_local else join(store.url, path)
        self._folder: Path | None = None

    @property
    def is_read_in_place(self) -> bool:
        """Whether it is read where it is stored; otherwise it is fetched first."""
        return self._is_local or self.format == "native"

    @property
    def address(self) -> str:
        """Where the weights are read: the address itself, or the copy of it."""
        return self._address if self._folder is None else str(self._folder)

    @contextmanager
    def open(self, working_folder: Path, reporter: Reporter, config: ModelConfig | None = None) -> Iterator[Weights]:
        """Open the weights; where they are not read in place, they are first fetched into `working_folder`.

        With `config` they are checked against that architecture instead of their own.
        """
        if not self.is_read_in_place:
            name = f"source-{hashlib.sha256(self.pinned.encode()).hexdigest()[:16]}"
            for other in working_folder.glob("source-*"):
                if other.name != name:
                    shutil.rmtree(other)
            self._folder = working_folder / name
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
            self.address,
            config=config,
            vocab_size=self._vocab_size,
            averaged=self._averaged,
            options=self._options,
            reporter=reporter,
        ) as weights:
            if isinstance(weights, HfWeights):
                weights.check_tied_head()
            yield weights

    def fingerprint(self) -> list[object]:
        """Return what changes with the source: of a checkpoint its manifest, otherwise the version of every file."""
        if self.format == "native":
            checkpoint = find_checkpoint(*open_store(self._address, self._options))
            return [checkpoint.path, checkpoint.manifest.sha256]
        if self._folder is not None:
            return [[info.path, info.size] for info in LocalStore(self._folder).list()] + [self.pinned]
        return [[info.path, info.size, info.version] for info in open_folder(self._address, self._options).list()]
