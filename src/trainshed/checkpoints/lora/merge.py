"""A LoRA adapter merged into Hugging Face weights: shard by shard, in the memory of one tensor.

A shard is copied as it is and the tensors that the adapter changes are written over where they lie: names, order and
dtypes stay the base's. The result appears when it is complete; killed before that, the same command goes on.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from trainshed.checkpoints.base import EXCLUDE, INCLUDE, KIND
from trainshed.checkpoints.converting.folder import ConversionFolder, hashed
from trainshed.checkpoints.hf.safetensors_file import StoredTensor
from trainshed.checkpoints.hf.weights import HfWeights
from trainshed.checkpoints.lora.adapter import CONFIG as ADAPTER_CONFIG
from trainshed.checkpoints.lora.adapter import WEIGHTS as ADAPTER_WEIGHTS
from trainshed.checkpoints.lora.adapter import Adapter
from trainshed.checkpoints.proving.probe import MANIFEST
from trainshed.checkpoints.proving.verdict import VERDICT
from trainshed.checkpoints.weights import Unit
from trainshed.errors import InputError, NoSpace
from trainshed.models.families import HF_FAMILIES
from trainshed.models.hf_tensors import hf_tensors
from trainshed.reporting import SILENT, Reporter, Task
from trainshed.storage import FileEntry, LocalStore, Manifest
from trainshed.storage.globs import selected


@dataclass(frozen=True)
class Merged:
    """What a merge made."""

    base: str
    adapter: str
    target: str
    family: str
    tensors: int
    changed: int
    rank: int
    files: int
    bytes: int

    def to_plain(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


def merge(base: Path, adapter: Path, target: Path, *, reporter: Reporter = SILENT) -> Merged:
    """Merge the adapter in a folder into the weights in another, into a third that is not there yet."""
    target = Path(os.path.abspath(target))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError("there is something already", where=str(target), hint="choose another folder, or remove it")
    folder = ConversionFolder(target.with_name(f".{target.name}.merging"))
    with HfWeights(base) as weights, folder.held():
        tensors = {tensor.name: tensor for tensor in hf_tensors(weights.config)}
        added = Adapter(adapter, tensors)
        _refuse_tied(weights, added)
        shards = _shards(weights)
        folder.begin(_fingerprint(base, adapter, shards))
        entries = _written(folder, shards, weights, added, reporter)
        for info in LocalStore(base).list():
            copied = selected(info.path, INCLUDE, EXCLUDE) and not info.path.endswith(".safetensors")
            if copied and info.path != VERDICT:
                shutil.copyfile(base / info.path, folder.target / info.path)
                entries.append(hashed(folder.target, info.path))
        HfWeights(folder.target).close()
        spec = {"from": os.path.abspath(base), "adapter": os.path.abspath(adapter)}
        facts = {"family": weights.config.family, "parameters": weights.parameters, "dtypes": weights.dtypes}
        manifest = Manifest.of(KIND, spec, entries, facts)
        manifest.write(LocalStore(folder.target), MANIFEST)
        folder.publish(target)
        return Merged(
            base=spec["from"],
            adapter=spec["adapter"],
            target=str(target),
            family=weights.config.family,
            tensors=len(tensors),
            changed=len(added.changes),
            rank=added.config.rank,
            files=len(manifest.files),
            bytes=manifest.total_bytes,
        )


def _refuse_tied(weights: HfWeights, adapter: Adapter) -> None:
    embedding = HF_FAMILIES[weights.config.family].names.tensors["embedding"][0] + ".weight"
    if weights.config.tied_embeddings and embedding in adapter.changes:
        raise InputError(
            f"the adapter changes `{embedding}`, which is the head of this model too, and PEFT changed it only as one",
            where=str(adapter.folder),
            hint="untie them first: save the base with transformers under `tie_word_embeddings: false`",
        )


def _shards(weights: HfWeights) -> dict[Path, list[tuple[str, StoredTensor]]]:
    """The files of the base, each with the tensors in it."""
    shards: dict[Path, list[tuple[str, StoredTensor]]] = {}
    for name, stored in weights.stored.items():
        shards.setdefault(stored.file, []).append((name, stored))
    return dict(sorted(shards.items()))


def _fingerprint(base: Path, adapter: Path, shards: dict[Path, Any]) -> dict[str, Any]:
    """What a merge that was killed must find unchanged to go on."""
    files = [*shards, adapter / ADAPTER_CONFIG, adapter / ADAPTER_WEIGHTS]
    states = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return {"base": os.path.abspath(base), "adapter": os.path.abspath(adapter), "files": states}


def _written(
    folder: ConversionFolder,
    shards: dict[Path, list[tuple[str, StoredTensor]]],
    weights: HfWeights,
    adapter: Adapter,
    reporter: Reporter,
) -> list[FileEntry]:
    units = [Unit(file.name, file.stat().st_size) for file in shards]
    whole = folder.whole_units(units, 1, reporter)
    missing = [(number, unit) for number, unit in enumerate(units) if unit.path not in whole]
    needed_bytes = sum(unit.bytes for _, unit in missing)
    free_bytes = shutil.disk_usage(folder.place).free
    if needed_bytes > free_bytes:
        raise NoSpace(
            f"the merge needs {needed_bytes / 1e9:,.3f} GB, and {free_bytes / 1e9:,.3f} GB are free",
            where=str(folder.place.parent),
            hint="free some space, or name a target on another disk",
        )
    files = {file.name: file for file in shards}
    with reporter.task("merging", total=needed_bytes, unit="B") as task:
        for number, unit in missing:
            _write_shard(files[unit.path], folder.file(unit), shards[files[unit.path]], adapter, task)
            whole[unit.path] = hashed(folder.target, unit.path)
            folder.mark(number, whole[unit.path])
    return [whole[unit.path] for unit in units]


def _write_shard(
    source: Path, target: Path, tensors: list[tuple[str, StoredTensor]], adapter: Adapter, task: Task
) -> None:
    """Copy a shard and write what the adapter changes over its bytes."""
    shutil.copyfile(source, target)
    task.advance(source.stat().st_size)
    with safe_open(source, framework="pt") as file, target.open("r+b") as handle:
        for name, stored in tensors:
            if name not in adapter.changes:
                continue
            task.describe(name)
            merged = adapter.merge(name, file.get_tensor(stored.name)).contiguous()
            handle.seek(stored.start)
            handle.write(merged.reshape(-1).view(torch.uint8).numpy().data)
