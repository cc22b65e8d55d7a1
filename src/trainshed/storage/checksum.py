"""Checksums of files, written with their algorithm in front: `blake3:<hex>`, `sha256:<hex>`.

What we write ourselves gets BLAKE3, which is more than twice as fast as SHA-256 with instructions of its own and many
times as fast without. SHA-256 stays where others state it (the Hub's LFS files, lists of URLs) and where a digest names
something (specs, runs, orders, manifests): such names never change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args

ChecksumAlgorithm = Literal["blake3", "sha256"]
SHA256_PREFIX = "sha256:"
DEFAULT_ALGORITHM: ChecksumAlgorithm = "blake3"
_HEX_DIGITS = 64  # of either: both digests have 256 bits


class Hasher:
    """A checksum that grows while bytes stream by."""

    def __init__(self, algorithm: ChecksumAlgorithm = DEFAULT_ALGORITHM) -> None:
        self.algorithm = algorithm
        self._digest = _new_digest(algorithm)
        self.size = 0

    @classmethod
    def like(cls, checksum: str) -> Hasher:
        """A hasher whose result can be compared with a checksum."""
        return cls(algorithm_of(checksum))

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes."""
        self._digest.update(data)
        self.size += len(data)

    @property
    def checksum(self) -> str:
        """The checksum of all bytes so far."""
        return f"{self.algorithm}:{self._digest.hexdigest()}"


def checksum_of(
    data: bytes | bytearray | memoryview | Iterable[bytes], algorithm: ChecksumAlgorithm = DEFAULT_ALGORITHM
) -> str:
    """The checksum of bytes, or of a stream of them."""
    hasher = Hasher(algorithm)
    for chunk in (data,) if isinstance(data, bytes | bytearray | memoryview) else data:
        hasher.update(chunk)
    return hasher.checksum


def sha256_of(data: bytes | Iterable[bytes]) -> str:
    """The SHA-256 of bytes, or of a stream of them: for what it names."""
    return checksum_of(data, "sha256")


def hashing(chunks: Iterable[bytes], hasher: Hasher) -> Iterator[bytes]:
    """Pass chunks on unchanged while `hasher` sees them."""
    for chunk in chunks:
        hasher.update(chunk)
        yield chunk


def algorithm_of(checksum: str) -> ChecksumAlgorithm:
    """Which algorithm made a checksum."""
    name = checksum.partition(":")[0]
    for known in get_args(ChecksumAlgorithm):
        if name == known:
            return known
    raise ValueError(f"{checksum!r} is not a checksum of ours")


def is_checksum(text: object) -> bool:
    """Whether a value is a checksum as we write it."""
    if not isinstance(text, str):
        return False
    name, _, digits = text.partition(":")
    known = name in get_args(ChecksumAlgorithm)
    return known and len(digits) == _HEX_DIGITS and all(digit in "0123456789abcdef" for digit in digits)


def is_sha256(text: object) -> bool:
    """Whether a value is a SHA-256 as we write it."""
    return is_checksum(text) and str(text).startswith(SHA256_PREFIX)


def _new_digest(algorithm: ChecksumAlgorithm) -> Any:
    if algorithm == "sha256":
        return hashlib.sha256()
    from blake3 import blake3  # here: whoever only reads specs and lists needs none

    return blake3()
