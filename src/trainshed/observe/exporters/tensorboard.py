"""TensorBoard's event files."""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from trainshed.observe.exporters.figures import figure_point
from trainshed.observe.exporters.file_exporter import Exporter
from trainshed.run_folder import TENSORBOARD

_FLOAT32_MAX = 3.4028234663852886e38


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
        if event["kind"] == "resume" and event.get("step") is not None:
            # SessionLog.START: TensorBoard discards earlier points of this step and later ones.
            yield _record(_event(event["step"] + 1, _bytes(7, _varint(1, 1)), event.get("time")))
        elif (point := figure_point(event)) is not None:
            yield _record(_event(point.step, _scalars(point.figures), point.time))


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


def _event(step: int, body: bytes, at: float | None = None) -> bytes:
    return b"\x09" + struct.pack("<d", time.time() if at is None else at) + _varint(2, step) + body


def _scalars(figures: Mapping[str, float]) -> bytes:
    # Single precision ends at 3.4e38, and diverging gradients may be larger.
    singles = (
        (tag, value if abs(value) <= _FLOAT32_MAX else math.copysign(math.inf, value)) for tag, value in figures.items()
    )
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
