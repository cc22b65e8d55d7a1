"""Convert weights from one format to another, streamed and proven.

The files of a target are written in threads, each from the boxes it needs, so memory does not grow with the model. When
all files exist, the target is opened with its own reader and compared with the source (`verdict.py`). Then the verdict
and, last of all, the manifest are written, and the target appears. Killed before that, the same command continues.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from trainshed.checkpoints.convert.source import ConversionSource
from trainshed.checkpoints.convert.target import ConversionTarget, explain_disk_errors, hash_file
from trainshed.checkpoints.formats import TargetFormat, open_weights
from trainshed.checkpoints.hf.companion_files import (
    COMPANIONS_FOLDER,
    has_tokenizer,
    read_companions,
    with_chat_template,
)
from trainshed.checkpoints.megatron.unsupported import latent_norm_note
from trainshed.checkpoints.prove.verdict import Verdict, prove, prove_quantized, write_verdict
from trainshed.checkpoints.quantization import WeightQuantization, quantization_of
from trainshed.checkpoints.weights import OutputFile, Weights, WeightsWriter, dtype_name
from trainshed.errors import InputError, TrainshedError
from trainshed.models.parameters import parameter_count
from trainshed.reporting import SILENT, ProgressTask, Reporter
from trainshed.storage import FileEntry, LocalStore, Manifest, StoreOptions
from trainshed.storage.manifest import MANIFEST

KIND = "weights"
Dtype = Literal["bf16", "fp32", "fp16", "fp8", "q8_0"]
_DTYPES = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp16": torch.float16,
    # What is not quantised.
    "fp8": torch.bfloat16,
    "q8_0": torch.float32,
}
# Index, config, tokenizer files: what a target has besides its weights.
_OTHER_BYTES = 64 * 1024
DEFAULT_WORKERS = 4
UNITS_VERSION = 3
"""The version of the bytes of output files: a conversion that another version has started is started again."""


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion; `kept` of its `units` files existed already, from a run that was killed."""

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
    chat_template: str | None = None,
    end_tokens: Sequence[int] = (),
    vocab_size: int | None = None,
    averaged: bool = False,
    replace: bool = False,
    logits: bool = True,
    workers: int = DEFAULT_WORKERS,
    scratch: Path | None = None,
    options: StoreOptions | None = None,
    reporter: Reporter = SILENT,
) -> Conversion:
    """Convert the weights at `source` into the folder `target`, both addresses in any store, and prove them.

    `tokenizer` is a folder whose tokenizer replaces the source's own, `chat_template` the text of a template that
    replaces that of the tokenizer, `end_tokens` what ends an answer by it; `vocab_size` and `averaged` are as for
    `open_weights`. A target in a bucket is first written to the local disk, below `scratch`, and each file is uploaded
    when it is complete. A verdict that failed is stored and returned like one that passed: the caller decides.

    A target that holds another conversion is refused. With `replace` it is made anew, also where the source has changed
    since: the target is what a run exports, and the run has trained longer.
    """
    if workers < 1:
        raise InputError(f"{workers} workers", hint="write at least 1")
    to.check_dtype(dtype)
    scheme = quantization_of(dtype)
    if to.layout_note is not None:
        reporter.note(to.layout_note)
    target_place = ConversionTarget(target, scratch, options)
    earlier = target_place.manifest()
    source_weights = ConversionSource(source, options, vocab_size, averaged=averaged)
    spec = {"from": source_weights.pinned, "format": source_weights.format, "tokenizer": tokenizer, **to.to_plain()}
    if dtype is not None:
        spec["dtype"] = dtype_name(_DTYPES[dtype]) if scheme is None else scheme.name
    if chat_template is not None:
        spec["chat_template"] = chat_template
    if end_tokens:
        spec["end_tokens"] = list(end_tokens)
    if averaged:
        spec["weights"] = "ema"
    if replace:
        spec["source"] = hashlib.sha256(json.dumps(source_weights.fingerprint()).encode()).hexdigest()
    if earlier is not None and replace and _is_another(earlier, spec):
        reporter.note(f"{target} holds what this run exported before: it is made anew")
        target_place.clear()
        earlier = None
    if earlier is not None:
        if _is_another(earlier, spec):
            raise target_place.occupied_error(f"the conversion of {earlier.spec.get('from', 'something else')}")
        if not (target_place.is_local and source_weights.is_read_in_place):
            reporter.note("this conversion is done already; it was not compared once more, as it is not on this disk")
            return _conversion_result(source_weights, target, earlier, target_place.verdict(), made_now=0)
    with target_place.folder.locked(), source_weights.open(target_place.folder.path, reporter) as weights:
        if "megatron" in f"{source_weights.format} {to.name}" and (note := latent_norm_note(weights.config)):
            reporter.note(note)
        companions = read_companions(
            source_weights.address, source_weights.format, tokenizer=tokenizer, options=options
        )
        companions = with_chat_template(companions, chat_template, end_tokens)
        job = _ConversionJob(
            weights, target_place, to, _choose_dtype(dtype, weights, reporter), scheme, companions, workers, reporter
        )
        if earlier is not None:
            job.prove_again(earlier)
            return _conversion_result(source_weights, target, earlier, target_place.verdict(), made_now=0)
        manifest, kept, verdict = job.run(
            {**spec, "dtype": spec["dtype"] if scheme is not None else dtype_name(job.dtype)},
            source_weights.fingerprint(),
            logits=logits,
        )
    return _conversion_result(source_weights, target, manifest, verdict, made_now=manifest.facts["units"] - kept)


def _is_another(earlier: Manifest, spec: Mapping[str, Any]) -> bool:
    """Whether a target holds something else than is asked for."""
    return earlier.kind != KIND or any(earlier.spec.get(key) != spec.get(key) for key in (*spec, "weights"))


def _conversion_result(
    source: ConversionSource, target: str, manifest: Manifest, verdict: Verdict, *, made_now: int
) -> Conversion:
    return Conversion(
        source=source.pinned,
        source_format=source.format,
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
        scheme: WeightQuantization | None,
        companions: Mapping[str, bytes],
        workers: int,
        reporter: Reporter,
    ) -> None:
        self.dtype, self._scheme = dtype, scheme
        self._weights, self._place, self._to, self._companions = weights, place, to, companions
        self._workers, self._reporter = workers, reporter
        self._folder, self._target_folder = place.folder, place.folder.target
        self._writer: WeightsWriter = to.writer(weights.config, dtype, companions, scheme)

    def prove_again(self, earlier: Manifest) -> None:
        """Compare what an earlier conversion wrote with the source again, tensor by tensor."""
        earlier.verify_files(LocalStore(self._place.path), deep=False)
        if not self._prove(self._place.path, logits=False).passed:
            raise self._place.occupied_error(f"a conversion of what was once at {earlier.spec['from']}")
        self._reporter.note("this conversion is done already; its tensors were compared once more")
        self._folder.remove()  # the earlier conversion may have been killed just before this

    def run(self, spec: Mapping[str, Any], fingerprint: list[object], *, logits: bool) -> tuple[Manifest, int, Verdict]:
        """Write the target; return its manifest, how many files existed already, and the verdict."""
        if self._to.name == "hf" and not has_tokenizer(self._companions):
            self._reporter.warn("the export has no tokenizer: the source brings none, and --tokenizer names none")
        config = self._weights.config
        # The bytes of torch.save depend on torch, so another torch does not continue this conversion.
        versions = {"units": UNITS_VERSION, "torch": torch.__version__}
        self._folder.start({**spec, "source": fingerprint, "config": config.model_dump(mode="json"), **versions})
        outputs = self._writer.output_files()
        finished = self._folder.finished_files(outputs, self._workers, self._reporter)
        if finished:
            self._reporter.note(f"{len(finished)} of {len(outputs)} files are there already")
        entries = self._write_files(outputs, finished)
        with explain_disk_errors(self._target_folder):
            self._writer.finish(self._target_folder, entries)
            self._keep_companions()
        with self._folder.syncing(entry.path for entry in entries):
            verdict = self._prove(self._target_folder, logits=logits)
        write_verdict(self._target_folder, verdict)
        manifest = self._manifest(spec, entries)
        self._place.publish(manifest, {entry.path for entry in entries})
        return manifest, len(finished), verdict

    def _write_files(self, outputs: list[OutputFile], finished: Mapping[str, FileEntry]) -> list[FileEntry]:
        """Write all files that do not exist yet; the first error stops the others."""
        missing = [(number, output) for number, output in enumerate(outputs) if output.path not in finished]
        total = sum(output.bytes for _, output in missing)
        self._folder.check_space(
            total + _OTHER_BYTES,
            lambda free: f"the conversion needs {total / 1e9:,.4f} GB more, and {free / 1e9:,.4f} GB are free",
            hint="free some space or name a target on another disk, then run the same command again",
        )
        with self._reporter.task("converting", total=total, unit="B") as task:
            progress = _SharedProgress(task)

            def make(number: int, output: OutputFile) -> FileEntry:
                file = self._folder.file(output)
                with explain_disk_errors(file):
                    checksum = self._writer.write(output, self._weights, file, progress.advance, threads)
                    entry = FileEntry(output.path, file.stat().st_size, checksum)
                self._place.upload(output.path)
                self._folder.mark(number, entry)
                return entry

            # One thread per file, more where there are few files; PyTorch's own threads would compete with these.
            at_once = max(1, min(len(missing), self._workers))
            threads = max(1, self._workers // at_once)
            one_each = partial(torch.set_num_threads, 1)
            with ThreadPoolExecutor(at_once, "trainshed-convert", initializer=one_each) as pool:
                futures = [pool.submit(make, number, output) for number, output in missing]
                try:
                    wait(futures, return_when=FIRST_EXCEPTION)
                finally:
                    progress.stopped = any(not future.done() for future in futures)
                    pool.shutdown(wait=True, cancel_futures=True)
        errors = [error for future in futures if not future.cancelled() and (error := future.exception())]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, _ConversionStopped))
        written = {entry.path: entry for entry in (future.result() for future in futures)}
        return [finished.get(output.path) or written[output.path] for output in outputs]

    def _keep_companions(self) -> None:
        if self._to.name not in ("hf", "gguf"):
            store = LocalStore(self._target_folder)
            for name, data in self._companions.items():
                store.put(f"{COMPANIONS_FOLDER}/{name}", data)

    def _prove(self, folder: Path, *, logits: bool) -> Verdict:
        with open_weights(folder) as target:
            if self._scheme is not None:
                return prove_quantized(
                    self._weights, target, self._scheme, logits=logits, workers=self._workers, reporter=self._reporter
                )
            return prove(
                self._weights, target, dtype=self.dtype, logits=logits, workers=self._workers, reporter=self._reporter
            )

    def _manifest(self, spec: Mapping[str, Any], entries: list[FileEntry]) -> Manifest:
        known = {entry.path: entry for entry in entries}
        paths = [info.path for info in LocalStore(self._target_folder).list() if info.path != MANIFEST]
        files = [known.get(path) or hash_file(self._target_folder, path) for path in paths]
        config = self._weights.config
        facts = {
            "family": config.family,
            "parameters": parameter_count(config),
            "dtypes": [spec["dtype"]],
            "units": len(entries),
        }
        return Manifest.of(KIND, spec, files, facts)


class _ConversionStopped(TrainshedError):
    """A file that was given up because another one failed."""


class _SharedProgress:
    """A progress task that several threads advance; once it is stopped, every thread ends at its next box."""

    def __init__(self, task: ProgressTask) -> None:
        self._task, self._lock = task, threading.Lock()
        self.stopped = False

    def advance(self, amount: int) -> None:
        if self.stopped:
            raise _ConversionStopped("stopped")
        with self._lock:
            self._task.advance(amount)


def _choose_dtype(given: Dtype | None, weights: Weights, reporter: Reporter) -> torch.dtype:
    """Return the given dtype, otherwise the stored one; several dtypes become one that holds them all exactly."""
    if given is not None:
        return _DTYPES[given]
    stored = weights.dtypes
    if len(stored) == 1:
        return getattr(torch, stored[0])
    wide = torch.float64 if "float64" in stored else torch.float32
    reporter.note(
        f"the weights are stored as {' and '.join(stored)}: all are written as {dtype_name(wide)}, which loses nothing"
    )
    return wide
