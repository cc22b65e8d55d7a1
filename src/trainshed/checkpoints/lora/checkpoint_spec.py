"""What the checkpoint of a LoRA run says besides its adapters: the settings and the base, in its manifest's spec.

    lora    the recipe's `train.lora`
    base    {from: the recipe's `model.from` with its commit, sha256: the hash of all its files}
    added   {start, count, base_rows} of `model.added_tokens`: the rows that the base lacks
    model   the architecture, as in every checkpoint

Such a checkpoint holds only `model.<names of adapters>` and their optimizer state. This module needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainshed.checkpoints.base import BaseWeights
from trainshed.checkpoints.formats import detect_format
from trainshed.checkpoints.native.folder import CompleteCheckpoint, find_checkpoint
from trainshed.errors import CorruptData, InputError, NotFound
from trainshed.models.parameters import AddedRows
from trainshed.recipe import Lora
from trainshed.recipe.validation import validate
from trainshed.recipe.yaml_io import SourceMap, YamlDocument
from trainshed.run_folder import ENGINE, PREPARED_FILE, RECIPE_FILE, read_prepared
from trainshed.storage import StoreOptions, open_store, parse

LORA, BASE, ADDED = "lora", "base", "added"


@dataclass(frozen=True)
class AdapterSpec:
    """The settings of a run's adapters, and its base."""

    lora: Lora
    base_address: str
    base_sha256: str | None
    added: AddedRows | None = None

    def to_plain(self) -> dict[str, Any]:
        """As a part of a checkpoint's spec."""
        base = {"from": self.base_address, "sha256": self.base_sha256}
        plain: dict[str, Any] = {LORA: self.lora.model_dump(mode="json", exclude_none=True), BASE: base}
        return plain if self.added is None else plain | {ADDED: asdict(self.added)}

    @classmethod
    def read(cls, spec: Mapping[str, Any], where: str) -> AdapterSpec:
        """Read it from a checkpoint's spec."""
        base = spec.get(BASE)
        if not isinstance(base, dict) or not isinstance(base.get("from"), str):
            raise CorruptData(
                "the checkpoint holds adapters and does not say what they were trained on",
                where=where,
                hint="it was written by another version: name the base with --base",
            )
        lora = validate(Lora, YamlDocument(dict(spec[LORA]), SourceMap(where)))
        added = spec.get(ADDED)
        return cls(lora, base["from"], base.get("sha256"), None if added is None else AddedRows(**added))


def holds_adapters(checkpoint: CompleteCheckpoint) -> bool:
    """Whether a checkpoint holds adapters and not whole weights."""
    return isinstance(checkpoint.manifest.spec.get(LORA), dict)


def find_adapter_checkpoint(address: str, options: StoreOptions | None = None) -> CompleteCheckpoint | None:
    """Return the checkpoint with adapters at an address; None where there are whole weights, or none at all."""
    try:
        if detect_format(address, options) != "native":
            return None
        checkpoint = find_checkpoint(*open_store(address, options))
    except NotFound:
        return None
    return checkpoint if holds_adapters(checkpoint) else None


def run_folder_of(address: str) -> Path | None:
    """Return the folder of the run that weights belong to: this folder, or one that contains it."""
    if parse(address).scheme != "file":
        return None
    folder = Path(os.path.abspath(str(parse(address))))
    return next((run for run in (folder, *folder.parents[:2]) if (run / RECIPE_FILE).is_file()), None)


def prepared_base(address: str, sha256: str | None = None) -> Path | None:
    """Return the folder of the base weights that the run of an address was prepared with, as far as it is here.

    With `sha256` the files must be those that the run began with.
    """
    run = run_folder_of(address)
    if run is not None and sha256 is None and (engine_base := run / ENGINE / "base").is_dir():
        return engine_base.resolve()  # what another engine was given
    if run is None or not (run / PREPARED_FILE).is_file():
        return None
    folder = read_prepared((run / PREPARED_FILE).read_bytes(), run / PREPARED_FILE).get("base")
    if not folder or not Path(folder).is_dir():
        return None
    base = BaseWeights.from_folder(Path(folder))
    if sha256 is not None and base.sha256 != sha256:
        raise InputError(
            "the base weights are not those that these adapters were trained on: their files have changed",
            where=folder,
            hint="name the base they were trained on with --base",
        )
    return base.files
