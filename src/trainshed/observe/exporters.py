"""What a training writes besides its events, for tools that people already use: TensorBoard files, DLLogger lines.

An exporter receives every event of rank 0 as it is emitted. Files are flushed every half minute and before a checkpoint
counts, so a run that is killed and resumes from that checkpoint leaves no gap. An exporter that cannot write warns once
and stops; the run goes on.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, ClassVar, Protocol, Self

import orjson

from trainshed.observe.events import REWARD_KEYS
from trainshed.plugins import Registry
from trainshed.recipe import Observe
from trainshed.run_folder import DLLOGGER, TENSORBOARD

FLUSH_SECONDS = 30.0
_FLOAT32_MAX = 3.4028234663852886e38


class RunListener(Protocol):
    """What an exporter is: entered when rank 0 starts, called with each of its events, left when it ends.

    One that a plugin registers is made with the run's folder, and with its options as keyword arguments.
    """

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take one event: `{"kind": "step", "step": 4, "loss": 2.5, …}`."""
        ...


class Exporter(ABC):
    """Writes one file during a training; a subclass says what an event becomes."""

    name: ClassVar[str]

    def __init__(self, run_folder: Path, *, sequence_length: int, warn: Callable[[str], None]) -> None:
        self.folder = run_folder / self.name
        self.sequence_length = sequence_length
        self._warn = warn
        self._file: BinaryIO | None = None
        self._flushed = time.monotonic()
        self._guarded(self._start)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._guarded(self._close)

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Write what an event becomes here, if anything."""
        if self._file is not None:
            self._guarded(lambda: self._take(event))

    @abstractmethod
    def open(self) -> BinaryIO:
        """Open the file that this attempt writes to, and write how it begins."""

    @abstractmethod
    def records(self, event: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield what an event becomes in the file."""

    def _start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = self.open()
        self._file.flush()

    def _take(self, event: Mapping[str, Any]) -> None:
        assert self._file is not None
        for record in self.records(event):
            self._file.write(record)
        due = time.monotonic() - self._flushed > FLUSH_SECONDS
        if due or event["kind"] in ("checkpoint", "validation", "end"):
            self._file.flush()
            self._flushed = time.monotonic()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            file, self._file = self._file, None
            if file is not None:
                with suppress(OSError):  # its buffer cannot be written either
                    file.close()
            self._warn(f"observe.{self.name}: nothing more is written there: {error.strerror}, {self.folder}")


_TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "z_loss": "train/z_loss",
    "moe_balance": "train/moe_balance",
    "moe_z": "train/moe_z",
    **{name: f"train/{name}" for name in REWARD_KEYS},
    "tokens": "train/tokens",
    "step_seconds": "performance/step_seconds",
    "tokens_per_second_per_gpu": "performance/tokens_per_second_per_gpu",
    "mfu": "performance/mfu",
    "memory_gib": "performance/memory_gib",
}


class TensorBoardExporter(Exporter):
    """Scalars in TensorBoard's event files, one file an attempt; steps are counted from 1.

    The format is TensorFlow's: masked CRC-32C around `Event` protocol buffers (event.proto, summary.proto).
    """

    name = TENSORBOARD

    def open(self) -> BinaryIO:
        """Open a file that sorts after those of earlier attempts."""
        name = f"events.out.tfevents.{time.time_ns() / 1e9:.6f}.{socket.gethostname()}.{os.getpid()}"
        file = (self.folder / name).open("xb")
        file.write(_record(_event(0, _text(3, "brain.Event:2"))))
        return file

    def records(self, event: Mapping[str, Any]) -> Iterator[bytes]:
        """Write the figures of steps and validations; after a resume, drop what an earlier attempt did beyond it."""
        step, kind = event.get("step"), event["kind"]
        if step is None:
            return
        if kind == "resume":
            # SessionLog.START: TensorBoard discards earlier points of this step and later ones.
            yield _record(_event(step + 1, _bytes(7, _varint(1, 1))))
        elif kind == "step":
            scalars = [(tag, event[key]) for key, tag in _TAGS.items() if event.get(key) is not None]
            yield _record(_event(step + 1, _scalars(scalars)))
        elif kind == "validation" and event["loss"] is not None:
            keys = ("loss", *REWARD_KEYS)
            scalars = [(f"validation/{key}", event[key]) for key in keys if event.get(key) is not None]
            yield _record(_event(step, _scalars(scalars)))


class DLLoggerExporter(Exporter):
    """NVIDIA's DLLogger lines with NeMo's names of the figures; attempts of a run follow each other in one file."""

    name = DLLOGGER

    def open(self) -> BinaryIO:
        """Open the file where NeMo has it; a line that a kill left unfinished is ended first."""
        self._began = time.time()
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
            yield self._line("PARAMETER", {f"cfg/{key}": value for key, value in values.items()})
        elif kind == "step":
            figures = {
                "reduced_train_loss": event["loss"],
                "lr": event["lr"],
                "global_step": event["step"] + 1,
                "consumed_samples": event["tokens"] // self.sequence_length,
                "train_step_timing in s": event["step_seconds"],
                "grad_norm": event["grad_norm"],
            }
            yield self._line(event["step"] + 1, {key: value for key, value in figures.items() if value is not None})
        elif kind == "validation" and event["loss"] is not None:
            yield self._line(event["step"], {"val_loss": event["loss"], "global_step": event["step"]})

    def _line(self, step: int | str, data: dict[str, Any]) -> bytes:
        now = time.time()
        body = {
            "timestamp": str(now),
            "datetime": str(datetime.fromtimestamp(now)),
            "elapsedtime": str(now - self._began),
            "type": "LOG",
            "step": step,
            "data": data,
        }
        return b"DLLL " + orjson.dumps(body) + b"\n"


EXPORTERS: Registry[Callable[..., RunListener]] = Registry(
    "exporter", {"tensorboard": TensorBoardExporter, "dllogger": DLLoggerExporter}
)
"""By name. Ours are switched by the key of their name under `observe`, those of plugins by `observe.exporters`."""


def open_exporters(
    observe: Observe, run_folder: Path, *, sequence_length: int, warn: Callable[[str], None]
) -> Iterator[RunListener]:
    """Yield the exporters that a recipe asks for."""
    for name in (TensorBoardExporter.name, DLLoggerExporter.name):
        if getattr(observe, name) is not False:
            yield EXPORTERS[name](run_folder, sequence_length=sequence_length, warn=warn)
    for name, options in (observe.exporters or {}).items():
        made = partial(EXPORTERS.find(name), run_folder, **options)
        yield GuardedListener(name, made, warn)


class GuardedListener:
    """An exporter of a plugin. One that fails warns once and gets no more events; the run goes on."""

    def __init__(self, name: str, make: Callable[[], RunListener], warn: Callable[[str], None]) -> None:
        self.name, self._warn = name, warn
        self._listener: RunListener | None = None
        self._guarded(lambda: self._open(make))

    def _open(self, make: Callable[[], RunListener]) -> None:
        made = make()
        made.__enter__()
        self._listener = made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        listener = self._listener
        if listener is not None:
            self._guarded(lambda: listener.__exit__(kind, error, at))

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Hand an event on."""
        listener = self._listener
        if listener is not None:
            self._guarded(lambda: listener(event))

    def _guarded(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            self._listener = None
            self._warn(f"observe.exporters.{self.name}: nothing more is exported: {type(error).__name__}: {error}")


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_CRC_TABLE = _crc_table()


def _masked_crc(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    # Masked as TFRecord does it: a CRC over data that contains CRCs is weak.
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked_crc(length) + data + _masked_crc(data)


def _event(step: int, body: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", time.time()) + _varint(2, step) + body


def _scalars(figures: list[tuple[str, float]]) -> bytes:
    # Single precision ends at 3.4e38, and diverging gradients may be larger.
    singles = ((tag, value if abs(value) <= _FLOAT32_MAX else math.copysign(math.inf, value)) for tag, value in figures)
    values = (_bytes(1, _text(1, tag) + b"\x15" + struct.pack("<f", value)) for tag, value in singles)
    return _bytes(5, b"".join(values))


def _varint(field: int, value: int) -> bytes:
    return _number(field << 3) + _number(value)


def _text(field: int, text: str) -> bytes:
    return _bytes(field, text.encode())


def _bytes(field: int, data: bytes) -> bytes:
    return _number(field << 3 | 2) + _number(len(data)) + data


def _number(value: int) -> bytes:
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)
