"""Addresses: which store a text means, and which path inside it.

    s3://bucket/path        gs://bucket/path        az://account/container/path
    hf://[datasets/|spaces/]org/name[@revision][/path]
    http(s)://host/path     file:///path            plain/path, /plain/path, ~/plain/path, on Windows C:/plain/path

The path may hold glob characters; nothing here looks at a disk or a network.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

from trainshed.errors import AddressError
from trainshed.redaction import credentials_in, shown_address

SCHEMES = ("s3", "gs", "az", "hf", "http", "https", "file")
_MISTAKEN_SCHEMES = {
    "gcs": "gs://bucket/path",
    "s3a": "s3://bucket/path",
    "s3n": "s3://bucket/path",
    "minio": "s3://bucket/path with the endpoint in AWS_ENDPOINT_URL",
    "azure": "az://account/container/path",
    "abfs": "az://account/container/path",
    "abfss": "az://account/container/path",
    "wasb": "az://account/container/path",
    "wasbs": "az://account/container/path",
    "adl": "az://account/container/path",
    "huggingface": "hf://org/name or hf://datasets/org/name",
}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/+")
HAS_DRIVES = os.name == "nt"
"""Whether paths begin with the letter of a drive, and may have backslashes: on Windows."""
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_ACCOUNT = re.compile(r"[a-z0-9]{3,24}")
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# The Hub's two kinds of revision with slashes; any other slash in a revision is written %2F.
_HUB_REFS = re.compile(r"refs/(?:pr/\d+|convert/[\w.-]+)")


@dataclass(frozen=True)
class Address:
    """One parsed address: `root` names the store, `path` is inside it (no leading or trailing slash)."""

    scheme: str
    root: str
    path: str = ""

    @property
    def url(self) -> str:
        """The store's root as it would be written."""
        return self.root if self.scheme == "file" else f"{self.scheme}://{self.root}"

    def __str__(self) -> str:
        return join(self.url, self.path)


def parse(text: str) -> Address:
    """Split an address into its store and the path inside it, or say what to write."""
    if not text or not text.strip():
        raise AddressError("an empty address", hint="write a path or one of " + _examples())
    if any(ord(character) < 32 or ord(character) == 127 for character in text):
        raise AddressError("an address with a control character", where=repr(text), hint="remove it")
    match = None if HAS_DRIVES and _DRIVE.match(text) else _SCHEME.match(text)
    if match is None:
        scheme, colon, rest = text.partition(":")
        if colon and scheme.lower() in SCHEMES:
            raise AddressError(f"'{scheme}:' should be '{scheme}://'", where=text, hint=f"write {scheme}://{rest}")
        return _local_address(text)
    scheme = match[1].lower()
    if scheme not in SCHEMES:
        better = _MISTAKEN_SCHEMES.get(scheme)
        raise AddressError(
            f"'{scheme}://' is not a kind of store",
            where=text,
            hint=f"write {better or 'one of ' + _examples()}",
        )
    rest = text[match.end() :]
    slashes = match[0].count("/")
    if scheme == "file":
        return _file_url(text, rest, slashes)
    if slashes != 2:
        raise AddressError(f"'{match[0]}' should be '{scheme}://'", where=text, hint=f"write {scheme}://{rest}")
    if scheme in ("http", "https"):
        return _http_address(text, scheme, rest)
    if (secret := credentials_in(text)) is not None:
        raise AddressError(
            f"an address with {secret}",
            where=shown_address(text),
            hint="leave it out: credentials come from the environment; a signed URL is written as https://…",
        )
    if scheme == "hf":
        return _hub_address(text, rest)
    return _bucket_address(text, scheme, rest)


def join(root: str, path: str) -> str:
    """Return the address of `path` below the address `root`."""
    if not path:
        return root
    if root in ("", "."):
        return path
    return root + path if root.endswith("/") else f"{root}/{path}"


def _examples() -> str:
    return "s3://bucket/path, gs://bucket/path, az://account/container/path, hf://org/name, https://host/file"


def _local_address(text: str) -> Address:
    text = os.path.expanduser(text)
    if HAS_DRIVES:
        text = text.replace("\\", "/")
        if _DRIVE.match(text):
            return Address("file", text[:3], _tidy(text[3:]))
    return Address("file", "/" if text.startswith("/") else ".", _tidy(text))


def _tidy(path: str) -> str:
    # '..' stays: where a folder before it is a symbolic link, only the disk knows what it means.
    return "/".join(part for part in path.split("/") if part not in ("", "."))


def _file_url(text: str, rest: str, slashes: int) -> Address:
    host, slash, path = ("", "/", rest) if slashes >= 3 else rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise AddressError(
            "a file:// address names a host", where=text, hint="write file:///absolute/path or a plain path"
        )
    path = unquote(path)
    if HAS_DRIVES and _DRIVE.match(path):
        return _local_address(path)
    return Address("file", "/", _tidy(path))


def _http_address(text: str, scheme: str, rest: str) -> Address:
    host, _, path = rest.partition("/")
    if not host.rpartition("@")[2]:
        raise AddressError("a web address without a host", where=text, hint=f"write {scheme}://host/file")
    # Kept as it was written: servers are free to treat any two spellings of a URL as different.
    return Address(scheme, host, path)


def _bucket_address(text: str, scheme: str, rest: str) -> Address:
    if scheme == "az":
        account, _, rest = rest.partition("/")
        container, _, path = rest.partition("/")
        if not _ACCOUNT.fullmatch(account) or not _BUCKET.fullmatch(container):
            raise AddressError(
                "an Azure address needs a storage account and a container",
                where=text,
                hint="write az://account/container/path",
            )
        return Address(scheme, f"{account}/{container}", _object_path(text, path))
    bucket, _, path = rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise AddressError(f"'{bucket}' is not a bucket name", where=text, hint=f"write {scheme}://bucket/path")
    return Address(scheme, bucket, _object_path(text, path))


def _hub_address(text: str, rest: str) -> Address:
    expected = "write hf://org/name, hf://datasets/org/name or hf://datasets/org/name@revision/path"
    kind, _, after = rest.partition("/")
    if kind in ("datasets", "spaces", "models"):
        rest = after
    prefix = f"{kind}/" if kind in ("datasets", "spaces") else ""
    org, _, rest = rest.partition("/")
    name_and_revision, _, path = rest.partition("/")
    name, at, revision = name_and_revision.partition("@")
    if at:
        refs = _HUB_REFS.match(rest.partition("@")[2])
        if refs:
            revision, path = refs[0], rest.partition("@")[2][refs.end() :].lstrip("/")
        revision = unquote(revision)
        if not revision:
            raise AddressError("an '@' with no revision after it", where=text, hint=expected)
    if not _HUB_NAME.fullmatch(org) or not _HUB_NAME.fullmatch(name):
        raise AddressError("a Hub address needs an organisation and a name", where=text, hint=expected)
    pinned = f"@{hub_revision(revision)}" if revision else ""
    return Address("hf", f"{prefix}{org}/{name}{pinned}", _object_path(text, path))


def hub_revision(revision: str) -> str:
    """Spell a Hub revision so that it can stand in an address."""
    return revision if _HUB_REFS.fullmatch(revision) else quote(revision, safe="")


def _object_path(text: str, path: str) -> str:
    path = path.rstrip("/")
    parts = path.split("/") if path else []
    if any(part in ("", ".", "..") for part in parts):
        raise AddressError(
            "a path in a bucket cannot hold '//', '.' or '..'",
            where=text,
            hint=f"write {text[: len(text) - len(path)]}{'/'.join(p for p in parts if p not in ('', '.', '..'))}"
            if text.endswith(path)
            else "write the path without them",
        )
    return path
