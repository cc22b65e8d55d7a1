"""Calibrations: how much longer the steps of measured runs take than predicted, by GPU, engine and version.

They are stored in a YAML file that the cluster file names, one entry per run, in the order in which they were added. No
other file calibrates a plan, and a plan says which entry it used.
"""

from __future__ import annotations

import datetime
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from trainshed.errors import InputError
from trainshed.recipe.section import PositiveFloat, PositiveInt, Section, Text
from trainshed.recipe.validation import validate
from trainshed.recipe.yaml_io import decode_utf8, parse_yaml
from trainshed.storage import LocalStore

_FILE_HEADER = """\
# Measured divided by predicted, per run: `trainshed plan calibrate RUN --to THIS_FILE` adds to it. A plan takes the
# last entry of its GPU and engine (and version, where it is asked for one).
"""


class Calibration(Section):
    """Measured divided by predicted figures of one run."""

    gpu: Text = Field(description="Name in the catalog")
    engine: Text = Field(description="What stepped the model: torch, megatron, nemo or torchtune")
    version: Text | None = Field(None, description="The engine's version; null: unknown")
    factor: PositiveFloat = Field(description="Measured step seconds divided by predicted ones")
    memory_factor: PositiveFloat | None = Field(
        None, description="Measured peak memory divided by predicted; null: not measured"
    )
    learnt_from: Text = Field(description="The run or log it was learnt from", alias="from")
    steps: PositiveInt = Field(description="How many steps were measured")
    date: Text | None = Field(None, description="When the run was, by its own account; null: it does not say")

    @property
    def description(self) -> str:
        """How a plan describes it."""
        version = f" {self.version}" if self.version else ""
        when = f" of {self.date}" if self.date else ""
        memory = f", memory times {self.memory_factor:.3f}" if self.memory_factor else ""
        where = f"for {self.engine}{version} on {self.gpu}, from {self.learnt_from}{when}"
        return f"steps times {self.factor:.3f}{memory} {where}"

    @property
    def key(self) -> tuple[str | None, ...]:
        """What identifies the run: a second entry of the same run replaces the first."""
        return (self.gpu, self.engine, self.version, self.learnt_from)


class _CalibrationFile(Section):
    """A calibration file."""

    calibrations: list[Calibration] = Field(description="One entry per run, the latest last")


@dataclass(frozen=True)
class Calibrations:
    """The entries of one file."""

    entries: tuple[Calibration, ...] = ()
    path: str | None = None
    digest: str | None = None
    """The sha256 of the file, which plans store."""

    def entry_for(self, gpu: str, engine: str, version: str | None = None) -> Calibration | None:
        """Return the last entry of a GPU and an engine, and of a version where one is given."""
        fitting = [entry for entry in self.entries if (entry.gpu, entry.engine) == (gpu, engine)]
        if version is not None:
            fitting = [entry for entry in fitting if entry.version == version]
        return fitting[-1] if fitting else None

    def to_plain(self, entry: Calibration | None) -> dict[str, Any]:
        """Return what a plan stores: the file, its hash, and the entry that was used or null."""
        values = None if entry is None else entry.model_dump(by_alias=True)
        return {"file": self.path, "sha256": self.digest, "entry": values}

    def missing_note(self, gpu: str, engine: str, version: str | None = None) -> str:
        """Say that the file has no entry for a GPU and an engine, and which entries it has."""
        known = sorted({f"{entry.engine} on {entry.gpu}" for entry in self.entries}) or ["nothing"]
        wanted = f"{engine}{f' {version}' if version else ''} on {gpu}"
        return f"{self.path} has no calibration of {wanted} (only of {', '.join(known)}): the plan is not calibrated"


def read_calibrations(path: str | os.PathLike[str]) -> Calibrations:
    """Read a calibration file."""
    file = Path(path)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot be read: {error.strerror}",
            where=str(file),
            hint=f"`trainshed plan calibrate RUN --to {file}` writes one",
        ) from None
    checked = validate(_CalibrationFile, parse_yaml(decode_utf8(content, str(file)), str(file)))
    return Calibrations(tuple(checked.calibrations), str(file), hashlib.sha256(content).hexdigest())


def store_calibration(path: str | os.PathLike[str], added: Calibration) -> Calibrations:
    """Add an entry to a file, or replace the earlier entry of the same run; a missing file is created."""
    file = Path(path)
    before = read_calibrations(file).entries if file.exists() else ()
    entries = [*(entry for entry in before if entry.key != added.key), added]
    plain = [entry.model_dump(by_alias=True, exclude_none=True) for entry in entries]
    body = _FILE_HEADER + yaml.safe_dump({"calibrations": plain}, sort_keys=False, allow_unicode=True, width=110)
    LocalStore(file.absolute().parent).put(file.name, body.encode())
    return read_calibrations(file)


def round_factor(value: float) -> float:
    """Return a factor with as many figures as a measurement has."""
    return float(f"{value:.4g}")


def utc_day(seconds_since_1970: float) -> str:
    """Return the day of an event, in UTC: a plan must not depend on where it is read."""
    return datetime.datetime.fromtimestamp(seconds_since_1970, datetime.UTC).date().isoformat()
