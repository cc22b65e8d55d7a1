"""The tables of published measurements, and one row of them as it was published."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from trainshed.errors import InputError
from trainshed.shipped import shipped_folder


class SkippedRow(Exception):
    """Raised for a row that says too little, or that the planner cannot describe."""


@dataclass(frozen=True)
class PublishedRow:
    """One published measurement; what it does not say is None."""

    fields: dict[str, str]
    number: int

    def text(self, key: str) -> str:
        """Return a field, empty where the table has none."""
        return (self.fields.get(key) or "").strip()

    def value(self, key: str) -> float | None:
        """Return a field as a number."""
        try:
            return float(self.text(key).replace(",", ""))
        except ValueError:
            return None

    def count(self, key: str, default: int | None = None) -> int:
        """Return a field as a whole number, or skip the row."""
        value = self.value(key)
        if value is None:
            if default is None:
                raise SkippedRow(f"the row does not say its {key}")
            return default
        return int(value)

    @property
    def source(self) -> str:
        """Where it was published."""
        return self.text("source")

    @property
    def model(self) -> str:
        """The model's name in the table."""
        return self.text("model")

    @cached_property
    def notes(self) -> str:
        """Its notes, in lower case."""
        return self.text("notes").lower()

    @property
    def out_of_memory(self) -> bool:
        """Whether the run ran out of memory."""
        return bool(re.search(r"\boom\b", self.notes)) and self.value("step_time_s") is None

    @property
    def step_seconds(self) -> float | None:
        """The measured step, or the one that follows from the measured tokens a second."""
        if (seconds := self.value("step_time_s")) is not None:
            return seconds
        rate, tokens = self.value("tokens_per_s_per_gpu"), self._tokens()
        gpus = self.value("num_gpus")
        return tokens / rate / gpus if rate and tokens and gpus else None

    def _tokens(self) -> float | None:
        batch, length = self.value("global_batch"), self.value("seq_len")
        return batch * length if batch and length else None

    @property
    def memory_gib(self) -> float | None:
        """The measured peak; None for LoRA and QLoRA in torchtune's ablation, which keep activations on the host."""
        return None if re.search(r"technique: q?lora", self.notes) else self.value("peak_mem_gib")

    @property
    def memory_metric(self) -> str:
        """Which peak was measured: allocated, reserved, active, nvidia-smi or unstated."""
        if stated := self.text("memory_metric"):
            return stated
        if "nvidia-smi" in self.notes:
            return "nvidia-smi"
        if "torchtitan" in self.source or "max_reserved" in self.notes:
            return "reserved"
        return "active" if "active" in self.notes else "allocated"

    @property
    def memory_stage(self) -> str:
        """The stage of the peak: `last` (Megatron's golden files log the last rank), `first` or `worst`."""
        if self.text("engine") == "nanotron":
            # Rank 0 writes the table of a benchmark (nanotron's helpers.py, log_throughput).
            return "first"
        if stated := self.text("memory_stage"):
            return stated
        return "last" if "last global rank" in self.notes else "worst"

    @property
    def mfu(self) -> float | None:
        """Published MFU."""
        return self.value("mfu")

    @property
    def group(self) -> tuple[str, ...]:
        """What rows must share for their layouts to be compared."""
        keys = ("source", "model", "num_gpus", "seq_len", "global_batch", "precision", "gpu", "engine")
        return tuple(self.text(key) for key in keys)


def read_rows(path: str | Path) -> list[PublishedRow]:
    """Read a CSV with the columns of the published tables."""
    try:
        with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
            reader = csv.DictReader(file)
            rows = [PublishedRow(dict(fields), number) for number, fields in enumerate(reader, start=2)]
            known = set(reader.fieldnames or ())
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except csv.Error as error:
        raise InputError(f"is not a table of comma-separated values: {error}", where=str(path)) from None
    missing = {"model", "layers", "gpu", "num_gpus", "tp", "pp"} - known
    if missing:
        raise InputError(
            f"has no column {', '.join(sorted(missing))}",
            where=str(path),
            hint="the columns are those of the shipped measurements: trainshed plan validate --columns",
        )
    return rows


def shipped_tables() -> list[Path]:
    """Return the published tables that come with the project; code that was packed for a job does not have them."""
    folder = shipped_folder("measurements")
    if not folder.is_dir():
        raise InputError(
            "the published measurements are not in the code that travels with a job",
            hint="name a table, or run this command where Trainshed is installed",
        )
    return [folder / name for name in ("throughput_memory.csv", "finetuning.csv", "out_of_memory.csv")]


def column_names() -> list[str]:
    """Return the columns of the tables."""
    with open(shipped_tables()[0], encoding="utf-8", newline="") as file:
        return next(csv.reader(file))


def read_tables(paths: Iterable[str | Path]) -> list[PublishedRow]:
    """Read several tables as one."""
    return [row for path in paths for row in read_rows(path)]
