"""Weights from one format into another, streamed and proven.

A target is made unit by unit in threads, each from the boxes it needs, so memory does not grow with the model. When all
files are there the target is opened with its own reader and held against the source (`verdict.py`); verdict and, last
of all, the manifest are written, and the target appears. Killed before that, the same command goes on where it was.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from trainshed.checkpoints.convert.source import ConversionSource
from trainshed.checkpoints.convert.target import MANIFEST, ConversionTarget, explain_disk_errors, hash_file
from trainshed.checkpoints.formats import TargetFormat, open_weights
from trainshed.checkpoints.hf.companion_files import COMPANIONS_FOLDER, has_tokenizer, read_companions
from trainshed.checkpoints.prove.verdict import Verdict, prove, write_verdict
from trainshed.checkpoints.weights import OutputFile, Weights, WeightsWriter
from trainshed.errors import InputError, NoSpace, TrainshedError
from trainshed.models.parameters import parameter_count
from trainshed.reporting import SILENT, ProgressTask, Reporter
from trainshed.storage import FileEntry, LocalStore, Manifest, StoreOptions

KIND = "weights"
Dtype = Literal["bf16", "fp32"]
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Tables of contents, config, tokenizer files: what a target has besides its units.
_OTHER_BYTES = 64 * 1024
DEFAULT_WORKERS = 4
UNITS_VERSION = 2
"""Of the bytes of units: what an older version has begun is not gone on with."""


@dataclass(frozen=True)
class Conversion:
    """What a conversion made; `kept` of its `units` were there from an earlier start."""

    source: str
    source_format: str
    target: str
    format: str
    dtype: str
    family: str
    parameters: int
    units: int
    kept: int
    bytes: int
    verdict: Verdict


def convert_weights(
    source: str,
    target: str,
    to: TargetFormat,
    *,
    dtype: Dtype | None = None,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    logits: bool = True,
    workers: int = DEFAULT_WORKERS,
    scratch: Path | None = None,
    options: StoreOptions | None = None,
    reporter: Reporter = SILENT,
) -> Conversion:
    """Convert the weights at `source` into the folder `target`, both addresses in any store, and prove them.

    `tokenizer` names a folder whose tokenizer goes with the target in place of the source's own; `vocab_size` is as
    for `open_weights`. A target in a bucket is made on this machine's disk first, below `scratch`, and uploaded as its
    files are done. A verdict that failed is stored like one that passed, and returned: whoever asked decides.
    """
    if workers < 1:
        raise InputError(f"{workers} workers", hint="write at least 1")
    if to.remark is not None:
        reporter.note(to.remark)
    place = ConversionTarget(target, scratch, options)
    earlier = place.finished()
    origin = ConversionSource(source, options, vocab_size)
    asked = {"from": origin.pinned, "format": origin.format, "tokenizer": tokenizer, **to.to_plain()}
    if dtype is not None:
        asked["dtype"] = _dtype_name(_DTYPES[dtype])
    if earlier is not None:
        _refuse_another(earlier, asked, place)
        if not (place.is_local and origin.is_at_hand):
            reporter.note("this conversion is done already; it was not compared once more, as it is not on this disk")
            return _conversion_result(origin, target, earlier, place.verdict(), made_now=0)
    with place.folder.held(), origin.opened(place.folder.place, reporter) as weights:
        companions = read_companions(origin.address, origin.format, tokenizer=tokenizer, options=options)
        work = _ConversionJob(
            weights, place, to, _choose_dtype(dtype, weights, reporter), companions, workers, reporter
        )
        if earlier is not None:
            work.prove_again(earlier)
            return _conversion_result(origin, target, earlier, place.verdict(), made_now=0)
        manifest, kept, verdict = work.run(
            {**asked, "dtype": _dtype_name(work.dtype)}, origin.fingerprint(), logits=logits
        )
    return _conversion_result(origin, target, manifest, verdict, made_now=manifest.facts["units"] - kept)


def _refuse_another(earlier: Manifest, asked: Mapping[str, Any], place: ConversionTarget) -> None:
    """A target is never written over: whatever else is there stays."""
    if earlier.kind != KIND or any(earlier.spec.get(key) != value for key, value in asked.items()):
        raise place.occupied(f"the conversion of {earlier.spec.get('from', 'something else')}")


def _conversion_result(
    origin: ConversionSource, target: str, manifest: Manifest, verdict: Verdict, *, made_now: int
) -> Conversion:
    return Conversion(
        source=origin.pinned,
        source_format=origin.format,
        target=target,
        format=manifest.spec["to"],
        dtype=manifest.spec["dtype"],
        family=manifest.facts["family"],
        parameters=manifest.facts["parameters"],
        units=manifest.facts["units"],
        kept=manifest.facts["units"] - made_now,
        bytes=manifest.total_bytes,
        verdict=verdict,
    )


class _ConversionJob:
    def __init__(
        self,
        weights: Weights,
        place: ConversionTarget,
        to: TargetFormat,
        dtype: torch.dtype,
        companions: Mapping[str, bytes],
        workers: int,
        reporter: Reporter,
    ) -> None:
        self.dtype = dtype
        self._weights, self._place, self._to, self._companions = weights, place, to, companions
        self._workers, self._reporter = workers, reporter
        self._folder, self._made = place.folder, place.folder.target
        self._writer: WeightsWriter = to.writer(weights.config, dtype, companions)

    def prove_again(self, earlier: Manifest) -> None:
        """Hold what an earlier conversion made against the source once more, tensor by tensor."""
        earlier.verify_files(LocalStore(self._place.path), deep=False)
        if not self._proven(self._place.path, logits=False).passed:
            raise self._place.occupied(f"a conversion of what was once at {earlier.spec['from']}")
        self._reporter.note("this conversion is done already; its tensors were compared once more")
        self._folder.remove()  # it may have been killed between the last two things it does

    def run(self, spec: Mapping[str, Any], fingerprint: list[object], *, logits: bool) -> tuple[Manifest, int, Verdict]:
        """Make the target; return what it is, how many units were there already, and what was proven."""
        if self._to.name == "hf" and not has_tokenizer(self._companions):
            self._reporter.warn("the export has no tokenizer: the source brings none, and --tokenizer names none")
        config = self._weights.config
        begun = {**spec, "source": fingerprint, "config": config.model_dump(mode="json"), "units": UNITS_VERSION}
        self._folder.begin(begun)
        units = self._writer.units()
        whole = self._folder.whole_units(units, self._workers, self._reporter)
        if whole:
            self._reporter.note(f"{len(whole)} of {len(units)} files are there already: going on with the others")
        entries = self._written(units, whole)
        with explain_disk_errors(self._made):
            self._writer.finish(self._made, entries)
            self._keep_companions()
        with self._folder.reaching_the_disk(entry.path for entry in entries):
            verdict = self._proven(self._made, logits=logits)
        write_verdict(self._made, verdict)
        manifest = self._manifest(spec, entries)
        self._place.publish(manifest, {entry.path for entry in entries})
        return manifest, len(whole), verdict

    def _written(self, units: list[OutputFile], whole: Mapping[str, FileEntry]) -> list[FileEntry]:
        """Write all units that are not there yet; the first error stops the others."""
        missing = [(number, unit) for number, unit in enumerate(units) if unit.path not in whole]
        total = sum(unit.bytes for _, unit in missing)
        self._check_space(total)
        with self._reporter.task("converting", total=total, unit="B") as task:
            progress = _SharedProgress(task)

            def make(number: int, unit: OutputFile) -> FileEntry:
                file = self._folder.file(unit)
                with explain_disk_errors(file):
                    checksum = self._writer.write(unit, self._weights, file, progress.advance, threads)
                    entry = FileEntry(unit.path, file.stat().st_size, checksum)
                self._place.upload(unit.path)
                self._folder.mark(number, entry)
                return entry

            # A thread to a file, more where files are few; PyTorch's own below these would stand in their way.
            at_once = max(1, min(len(missing), self._workers))
            threads = max(1, self._workers // at_once)
            one_each = partial(torch.set_num_threads, 1)
            with ThreadPoolExecutor(at_once, "trainshed-convert", initializer=one_each) as pool:
                futures = [pool.submit(make, number, unit) for number, unit in missing]
                try:
                    wait(futures, return_when=FIRST_EXCEPTION)
                finally:
                    progress.stopped = any(not future.done() for future in futures)
                    pool.shutdown(wait=True, cancel_futures=True)
        errors = [error for future in futures if not future.cancelled() and (error := future.exception())]
        if errors:
            raise min(errors, key=lambda each: isinstance(each, _ConversionStopped))
        made = {entry.path: entry for entry in (future.result() for future in futures)}
        return [whole.get(unit.path) or made[unit.path] for unit in units]

    def _check_space(self, needed_bytes: int) -> None:
        free_bytes = shutil.disk_usage(self._made).free
        if needed_bytes + _OTHER_BYTES > free_bytes:
            raise NoSpace(
                f"the conversion needs {needed_bytes / 1e9:,.4f} GB more, and {free_bytes / 1e9:,.4f} GB are free",
                where=str(self._folder.place.parent),
                hint="free some space or name a target on another disk, then run the same command again",
            )

    def _keep_companions(self) -> None:
        if self._to.name != "hf":
            store = LocalStore(self._made)
            for name, data in self._companions.items():
                store.put(f"{COMPANIONS_FOLDER}/{name}", data)

    def _proven(self, folder: Path, *, logits: bool) -> Verdict:
        with open_weights(folder) as made:
            return prove(
                self._weights, made, dtype=self.dtype, logits=logits, workers=self._workers, reporter=self._reporter
            )

    def _manifest(self, spec: Mapping[str, Any], entries: list[FileEntry]) -> Manifest:
        known = {entry.path: entry for entry in entries}
        paths = [info.path for info in LocalStore(self._made).list() if info.path != MANIFEST]
        files = [known.get(path) or hash_file(self._made, path) for path in paths]
        config = self._weights.config
        facts = {
            "family": config.family,
            "parameters": parameter_count(config),
            "dtypes": [spec["dtype"]],
            "units": len(entries),
        }
        return Manifest.of(KIND, spec, files, facts)


class _ConversionStopped(TrainshedError):
    """A unit that was given up because another one failed."""


class _SharedProgress:
    """A task that several threads advance; once it is stopped, whoever writes ends at its next box."""

    def __init__(self, task: ProgressTask) -> None:
        self._task, self._lock = task, threading.Lock()
        self.stopped = False

    def advance(self, amount: int) -> None:
        if self.stopped:
            raise _ConversionStopped("stopped")
        with self._lock:
            self._task.advance(amount)


def _choose_dtype(asked: Dtype | None, weights: Weights, reporter: Reporter) -> torch.dtype:
    """What is asked for, else what is stored; several dtypes become one that holds them all exactly."""
    if asked is not None:
        return _DTYPES[asked]
    stored = weights.dtypes
    if len(stored) == 1:
        return getattr(torch, stored[0])
    wide = torch.float64 if "float64" in stored else torch.float32
    reporter.note(
        f"the weights are stored as {' and '.join(stored)}: all are written as {_dtype_name(wide)}, which loses nothing"
    )
    return wide


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
