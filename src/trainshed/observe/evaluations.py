"""Evaluations as they are stored: `evaluation.json` with its manifest, beside the weights or in their run.

<run>/evaluations/step-00000100/<kind>-<name>-<hash>/    of a checkpoint of a run
<weights>/evaluations/<kind>-<name>-<hash>/              of other weights, beside their verdict

The hash is that of the spec: the weights, what they are measured by, and how. The same evaluation is found again and
not computed twice.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from trainshed.errors import TrainshedError
from trainshed.run_folder import EVALUATIONS, EXPORT
from trainshed.storage import FileEntry, Manifest, Store
from trainshed.storage.checksum import sha256_of
from trainshed.storage.manifest import MANIFEST

EVALUATION_SCHEMA = "trainshed.evaluation/1"
EVALUATION_FILE = "evaluation.json"
EvaluationKind = Literal["perplexity", "task", "questions"]
MAIN_SCORES = ("score", "acc_norm", "acc", "exact_match", "f1", "loss", "bits_per_byte", "word_perplexity")
"""Which score stands for an evaluation where there is room for one, the first that it has."""
_HASH_DIGITS = 12


@dataclass(frozen=True)
class EvaluationRecord:
    """The scores of one set of weights by one measure.

    `spec` is all that decides the scores; `details` are what they come from (samples, answers, scores of subtasks).
    """

    kind: EvaluationKind
    name: str
    scores: Mapping[str, float | None]
    spec: Mapping[str, Any]
    checkpoint: str
    """The run of a checkpoint, or the address of other weights as it may be shown."""
    step: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What it is called in reports."""
        return self.name if self.kind in ("task", self.name) else f"{self.kind} {self.name}"

    @property
    def main_score(self) -> tuple[str, float | None]:
        """The score that stands for it."""
        name = next((name for name in MAIN_SCORES if name in self.scores), next(iter(self.scores), "none"))
        return name, self.scores.get(name)

    def scores_text(self) -> str:
        """Return the scores on one line."""
        return "  ".join(f"{name} {format_score(value)}" for name, value in self.scores.items())

    def to_bytes(self) -> bytes:
        """Return it as it is stored; the same evaluation gives the same bytes."""
        body = {
            "schema": EVALUATION_SCHEMA,
            "kind": self.kind,
            "name": self.name,
            "checkpoint": self.checkpoint,
            "step": self.step,
            "scores": dict(self.scores),
            "details": dict(self.details),
            "spec": dict(self.spec),
            "versions": dict(self.versions),
        }
        return orjson.dumps(body, option=orjson.OPT_INDENT_2) + b"\n"

    def to_plain(self) -> dict[str, Any]:
        """Return it for a report as JSON."""
        return orjson.loads(self.to_bytes())

    @classmethod
    def from_bytes(cls, data: bytes) -> EvaluationRecord:
        """Read what `to_bytes` gave; raises `ValueError` for anything else."""
        body = orjson.loads(data)
        if not isinstance(body, dict) or body.pop("schema", None) != EVALUATION_SCHEMA:
            raise ValueError("is not an evaluation that this Trainshed reads")
        try:
            return cls(**body)
        except TypeError as error:
            raise ValueError(str(error)) from None


def format_score(value: float | None) -> str:
    """Write a score for people."""
    if value is None:
        return "not finite"
    return f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.4f}"


def finite_scores(scores: Mapping[str, float]) -> dict[str, float | None]:
    """Return scores as JSON has them: what is not finite is null."""
    return {name: value if math.isfinite(value) else None for name, value in scores.items()}


def evaluation_folder(kind: EvaluationKind, name: str, spec: Mapping[str, Any]) -> str:
    """Return the folder of an evaluation below `evaluations`: the same spec finds it again."""
    digest = hashlib.sha256(orjson.dumps(spec, option=orjson.OPT_SORT_KEYS)).hexdigest()[:_HASH_DIGITS]
    words = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[-60:] or "evaluation"
    return f"{kind}-{words}-{digest}"


def read_evaluation(store: Store, folder: str) -> EvaluationRecord | None:
    """Return the evaluation of a folder; None where there is none, or not a whole one."""
    try:
        manifest = Manifest.read(store, f"{folder}/{MANIFEST}")
        manifest.verify_files(store, folder)
        return EvaluationRecord.from_bytes(store.read(f"{folder}/{EVALUATION_FILE}"))
    except (TrainshedError, ValueError):
        return None


def write_evaluation(store: Store, folder: str, record: EvaluationRecord) -> None:
    """Store an evaluation, its manifest last."""
    data = record.to_bytes()
    store.put(f"{folder}/{EVALUATION_FILE}", data)
    entry = FileEntry(EVALUATION_FILE, len(data), sha256_of(data))
    manifest = Manifest.of("evaluation", record.spec, [entry], {"versions": dict(record.versions)})
    manifest.write(store, f"{folder}/{MANIFEST}")


def list_evaluations(store: Store, folder: str = "") -> list[EvaluationRecord]:
    """Return the evaluations of a run or of weights, by step and then by name."""
    start = f"{folder}/" if folder else ""
    paths: list[str] = []
    for place in (f"{start}{EVALUATIONS}", f"{start}{EXPORT}/{EVALUATIONS}"):
        paths += [info.path for info in store.list(place) if info.path.endswith(f"/{MANIFEST}")]
    records = (read_evaluation(store, path.removesuffix(f"/{MANIFEST}")) for path in paths)
    return sort_evaluations(record for record in records if record is not None)


def sort_evaluations(records: Iterable[EvaluationRecord]) -> list[EvaluationRecord]:
    """Return evaluations by step and then by name; those without a step last."""
    return sorted(records, key=lambda record: (record.step is None, record.step or 0, record.kind, record.name))


def evaluation_table(records: Iterable[EvaluationRecord]) -> dict[str, dict[str, dict[int | None, float | None]]]:
    """Return every score over the steps: {label: {metric: {step: score}}}; weights without a step are at None."""
    table: dict[str, dict[str, dict[int | None, float | None]]] = {}
    for record in sort_evaluations(records):
        for metric, value in record.scores.items():
            table.setdefault(record.label, {}).setdefault(metric, {})[record.step] = value
    return table
