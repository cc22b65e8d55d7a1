"""One checksum everywhere: SHA-256, written `sha256:<hex>`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

PREFIX = "sha256:"


class Hasher:
    """A checksum that grows while bytes stream by."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self.size = 0

    def update(self, data: bytes | memoryview) -> None:
        """Add bytes."""
        self._digest.update(data)
        self.size += len(data)

    @property
    def sha256(self) -> str:
        """The checksum of all bytes so far."""
        return PREFIX + self._digest.hexdigest()


def sha256_of(data: bytes | Iterable[bytes]) -> str:
    """The checksum of bytes, or of a stream of them."""
    hasher = Hasher()
    for chunk in (data,) if isinstance(data, bytes) else data:
        hasher.update(chunk)
    return hasher.sha256


def hashing(chunks: Iterable[bytes], hasher: Hasher) -> Iterator[bytes]:
    """Pass chunks on unchanged while `hasher` sees them."""
    for chunk in chunks:
        hasher.update(chunk)
        yield chunk


def is_sha256(text: object) -> bool:
    """Whether a value is a checksum as we write it."""
    if not isinstance(text, str) or not text.startswith(PREFIX):
        return False
    digits = text.removeprefix(PREFIX)
    return len(digits) == 64 and all(digit in "0123456789abcdef" for digit in digits)
