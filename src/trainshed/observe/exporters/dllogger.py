"""NVIDIA's DLLogger lines, as NeMo writes them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from trainshed.observe.exporters.file_exporter import Exporter
from trainshed.run_folder import DLLOGGER


class DLLoggerExporter(Exporter):
    """NVIDIA's DLLogger lines with NeMo's names of the figures; attempts of a run follow each other in one file."""

    name = DLLOGGER
    _began: float | None = None

    def open(self) -> BinaryIO:
        """Open the file where NeMo has it; a line that a kill left unfinished is ended first."""
        self.folder = self.folder / "rank-0"
        self.folder.mkdir(exist_ok=True)
        path = self.folder / "dllogger.json"
        unfinished = path.is_file() and path.stat().st_size > 0 and not _ends_a_line(path)
        file = path.open("ab")
        if unfinished:
            file.write(b"\n")
        return file

    def records(self, event: Mapping[str, Any]) -> Iterator[bytes]:
        """Write steps and validations; what is not finite has no figure in JSON and is left out."""
        kind = event["kind"]
        if kind == "start":
            values = {key: event[key] for key in ("run", "layout", "world_size", "device", "parameters")}
            yield self._line(event, "PARAMETER", {f"cfg/{key}": value for key, value in values.items()})
        elif kind == "step":
            figures = {
                "reduced_train_loss": event["loss"],
                "lr": event["lr"],
                "global_step": event["step"] + 1,
                "consumed_samples": event.get("samples") or event["tokens"] // self.sequence_length,
                "train_step_timing in s": event["step_seconds"],
                "grad_norm": event["grad_norm"],
            }
            yield self._line(
                event, event["step"] + 1, {key: value for key, value in figures.items() if value is not None}
            )
        elif kind == "validation" and event["loss"] is not None:
            named = event.get("set_losses") or {}
            sets = {f"val_loss/{name}": loss for name, loss in named.items() if loss is not None}
            yield self._line(event, event["step"], {"val_loss": event["loss"], "global_step": event["step"], **sets})

    def _line(self, event: Mapping[str, Any], step: int | str, data: dict[str, Any]) -> bytes:
        now = event.get("time") or time.time()
        self._began = now if self._began is None else self._began
        body = {
            "timestamp": str(now),
            "datetime": str(datetime.fromtimestamp(now)),
            "elapsedtime": str(now - self._began),
            "type": "LOG",
            "step": step,
            "data": data,
        }
        return b"DLLL " + orjson.dumps(body) + b"\n"


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
