"""Merge an adapter into Hugging Face weights exactly as PEFT would, shard by shard, and prove the result.

A shard is copied and the tensors that the adapter changes are overwritten in place, so names, order and dtypes stay
those of the base, and the memory is that of one tensor. The result is opened and compared with base and adapter tensor
by tensor. It appears when it is complete; killed before that, the same command continues.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from trainshed.checkpoints.base import HF_EXCLUDE, HF_INCLUDE, KIND
from trainshed.checkpoints.convert.target import ConversionFolder, hash_file
from trainshed.checkpoints.formats import detect_format
from trainshed.checkpoints.hf.safetensors_header import SafetensorsEntry
from trainshed.checkpoints.hf.weights import SAFETENSORS_DTYPES, HfWeights
from trainshed.checkpoints.lora.adapted_weights import AdaptedWeights, refuse_another_base
from trainshed.checkpoints.lora.adapter import LoraAdapter
from trainshed.checkpoints.lora.find import open_adapter, with_rows_of
from trainshed.checkpoints.prove.verdict import VERDICT, Verdict, prove, write_verdict
from trainshed.checkpoints.weights import OutputFile, join_names
from trainshed.errors import InputError
from trainshed.reporting import SILENT, ProgressTask, Reporter
from trainshed.storage import FileEntry, LocalStore, Manifest
from trainshed.storage.listing import is_selected
from trainshed.storage.manifest import MANIFEST


@dataclass(frozen=True)
class MergeResult:
    """The result of a merge."""

    base: str
    adapter: str
    target: str
    family: str
    tensors: int
    changed: int
    rank: int
    files: int
    bytes: int
    verdict: Verdict

    def to_plain(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


def merge_adapter(
    base: Path, adapter: str | Path, target: Path, *, logits: bool = True, reporter: Reporter = SILENT
) -> MergeResult:
    """Merge an adapter (PEFT's folder, a LoRA run or its checkpoint) into the weights in a folder: a new folder.

    A verdict that failed is stored and returned like one that passed: the caller decides.
    """
    if (stored := detect_format(base)) != "hf":
        raise InputError(
            f"an adapter is merged into weights for transformers, and these are {stored}",
            where=str(base),
            hint=f"`trainshed model convert {base} FOLDER --to hf` first; a LoRA run itself converts to merged weights",
        )
    target = Path(os.path.abspath(target))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError("there is something already", where=str(target), hint="choose another folder, or remove it")
    folder = ConversionFolder(target.with_name(f".{target.name}.merging"))
    with HfWeights(base) as weights, folder.locked():
        weights.check_tied_head()
        if with_rows_of(str(adapter), weights, reporter=reporter) is not weights:
            raise InputError(
                f"the adapter has rows for added tokens beyond the {weights.config.vocab_size:,} of the base, and a "
                "merge writes tensors of the same size",
                where=str(adapter),
                hint="write `export: {merge: true}` in the recipe, or `trainshed model convert RUN FOLDER --to hf`; of "
                "a folder of PEFT's, resize the base with transformers first (resize_token_embeddings)",
            )
        added = open_adapter(str(adapter), weights.config, reporter=reporter)
        refuse_another_base(added, weights)
        if unknown := sorted(added.changed_tensors - weights.entries.keys()):
            raise InputError(
                f"Hugging Face's {weights.config.family} has no tensor of its own for {join_names(unknown)}",
                where=str(adapter),
                hint="write `export: {merge: true}` in the recipe, or `trainshed model convert RUN FOLDER --to hf`",
            )
        shards = _shards_by_file(weights)
        folder.start(_fingerprint(base, added, shards))
        entries = _write_shards(folder, shards, weights, added, reporter)
        for info in LocalStore(base).list():
            copied = is_selected(info.path, HF_INCLUDE, HF_EXCLUDE) and not info.path.endswith(".safetensors")
            if copied and info.path != VERDICT:
                shutil.copyfile(base / info.path, folder.target / info.path)
                entries.append(hash_file(folder.target, info.path))
        verdict = _prove(weights, added, folder.target, logits=logits, reporter=reporter)
        write_verdict(folder.target, verdict)
        entries.append(hash_file(folder.target, VERDICT))
        spec = {"from": os.path.abspath(base), "adapter": added.where}
        facts = {"family": weights.config.family, "parameters": weights.parameter_count, "dtypes": weights.dtypes}
        manifest = Manifest.of(KIND, spec, entries, facts)
        manifest.write(LocalStore(folder.target), MANIFEST)
        folder.publish(target)
        return MergeResult(
            base=spec["from"],
            adapter=spec["adapter"],
            target=str(target),
            family=weights.config.family,
            tensors=len(added.tensors),
            changed=len(added.changed_tensors),
            rank=added.rank,
            files=len(manifest.files),
            bytes=manifest.total_bytes,
            verdict=verdict,
        )


def _prove(base: HfWeights, adapter: LoraAdapter, target: Path, *, logits: bool, reporter: Reporter) -> Verdict:
    def stored_dtype(name: str) -> torch.dtype:
        return getattr(torch, SAFETENSORS_DTYPES[base.entries[name].dtype])

    with HfWeights(target) as merged:
        return prove(AdaptedWeights(base, adapter, stored_dtype=stored_dtype), merged, logits=logits, reporter=reporter)


def _shards_by_file(weights: HfWeights) -> dict[Path, list[tuple[str, SafetensorsEntry]]]:
    """Return the files of the base, each with its tensors."""
    shards: dict[Path, list[tuple[str, SafetensorsEntry]]] = {}
    for name, stored in weights.entries.items():
        shards.setdefault(stored.file, []).append((name, stored))
    return dict(sorted(shards.items()))


def _fingerprint(base: Path, adapter: LoraAdapter, shards: dict[Path, Any]) -> dict[str, Any]:
    """Return what must be unchanged for a killed merge to continue."""
    states = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in shards]
    return {"base": os.path.abspath(base), "adapter": adapter.where, "version": adapter.version, "files": states}


def _write_shards(
    folder: ConversionFolder,
    shards: dict[Path, list[tuple[str, SafetensorsEntry]]],
    weights: HfWeights,
    adapter: LoraAdapter,
    reporter: Reporter,
) -> list[FileEntry]:
    outputs = [OutputFile(file.name, file.stat().st_size) for file in shards]
    finished = folder.finished_files(outputs, 1, reporter)
    missing = [(number, output) for number, output in enumerate(outputs) if output.path not in finished]
    needed_bytes = sum(output.bytes for _, output in missing)
    folder.check_space(
        needed_bytes,
        lambda free: f"the merge needs {needed_bytes / 1e9:,.3f} GB, and {free / 1e9:,.3f} GB are free",
        hint="free some space, or name a target on another disk",
    )
    files = {file.name: file for file in shards}
    with reporter.task("merging", total=needed_bytes, unit="B") as task:
        for number, output in missing:
            _write_shard(files[output.path], folder.file(output), shards[files[output.path]], adapter, task)
            finished[output.path] = hash_file(folder.target, output.path)
            folder.mark(number, finished[output.path])
    return [finished[output.path] for output in outputs]


def _write_shard(
    source: Path, target: Path, tensors: list[tuple[str, SafetensorsEntry]], adapter: LoraAdapter, task: ProgressTask
) -> None:
    """Copy a shard and overwrite the tensors that the adapter changes."""
    shutil.copyfile(source, target)
    task.advance(source.stat().st_size)
    changed = adapter.changed_tensors
    with safe_open(source, framework="pt") as file, target.open("r+b") as handle:
        for name, stored in tensors:
            if name not in changed:
                continue
            task.describe(name)
            merged = adapter.merge(name, file.get_tensor(stored.name)).contiguous()
            handle.seek(stored.start)
            handle.write(merged.reshape(-1).view(torch.uint8).numpy().data)
