"""A repository of the Hugging Face Hub as a store that can only be read, pinned to one commit.

Both metadata and bytes come by plain requests of our own: huggingface_hub waits for an answer without an end, and keeps
what it reads in a cache on disk. It gives the token and the rules for names. The resolve URL serves Git, LFS and Xet
files alike.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn
from urllib.parse import quote, unquote

from trainshed.errors import AccessDenied, MissingExtra, NotFound, StorageError, TrainshedError
from trainshed.storage.address import Address, join
from trainshed.storage.http import HttpClient
from trainshed.storage.store import CHUNK_BYTES, Endpoint, ObjectInfo, ReadOnlyStore, Retry

_COMMIT = re.compile(r"[0-9a-f]{40}")
_TYPES = {"datasets": "dataset", "spaces": "space"}


class HubStore(ReadOnlyStore):
    """All files of one model, dataset or space at one commit."""

    def __init__(self, address: Address, options: Endpoint, retry: Retry) -> None:
        try:
            import huggingface_hub  # noqa: F401 - asked for before anything is read
        except ImportError:
            raise MissingExtra.named("data", "reading from the Hugging Face Hub") from None
        name, _, revision = address.root.partition("@")
        kind, _, rest = name.partition("/")
        self._type = _TYPES.get(kind, "model")
        self._name = name
        self._repo = rest if kind in _TYPES else name
        self._asked = unquote(revision) or None
        self._anonymous = options.anonymous
        # Read now and not at huggingface_hub's import, so that the environment of this moment counts.
        endpoint = options.endpoint or os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
        self._endpoint = endpoint.rstrip("/")
        self._web = HttpClient(retry, self._headers, self._explain)
        self._commit = self._asked if self._asked and _COMMIT.fullmatch(self._asked) else None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"HubStore({self._written!r})"

    @property
    def revision(self) -> str:
        """The commit that everything is read from; a branch or tag is looked up once."""
        with self._lock:
            if self._commit is None:
                revision = f"/revision/{quote(self._asked, safe='')}" if self._asked else ""
                info, _ = self._ask(revision, self._written)
                self._commit = str(info["sha"])
            return self._commit

    @property
    def url(self) -> str:
        """The repository with its commit: an address that means the same bytes for ever."""
        return f"hf://{self._name}@{self.revision}"

    def close(self) -> None:
        """Close the connections that are kept for the next request."""
        self._web.close()

    def head(self, path: str) -> ObjectInfo | None:
        """Describe one file, or None if there is none."""
        form = {"paths": [path], "expand": False}
        entries, _ = self._ask(f"/paths-info/{self.revision}", self._shown(path), form)
        infos = [_file_info(entry) for entry in entries if entry["type"] == "file"]
        return infos[0] if infos else None

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All files below a folder, sorted by path."""
        prefix = prefix.strip("/")
        folder = f"/{quote(prefix, safe='')}" if prefix else ""
        following: str | None = f"/tree/{self.revision}{folder}?recursive=true&expand=false"
        infos: list[ObjectInfo] = []
        try:
            while following is not None:
                page, following = self._ask(following, self._shown(prefix))
                infos += [_file_info(entry) for entry in page if entry["type"] == "file"]
        except _NoEntry:
            return
        yield from sorted(infos, key=lambda info: info.path)

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        """Read the bytes [start, end) of a file."""
        return b"".join(self._web.stream(self._resolve(path), self._shown(path), start, end))

    def stream(self, path: str, start: int = 0, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Read a file from `start` to its end in chunks."""
        return self._web.stream(self._resolve(path), self._shown(path), start, None, chunk_bytes)

    @property
    def _written(self) -> str:
        return f"hf://{self._name}" + (f"@{self._asked}" if self._asked else "")

    def _shown(self, path: str) -> str:
        return join(self._written, path)

    def _resolve(self, path: str) -> str:
        return f"{self._endpoint}/{self._name}/resolve/{self.revision}/{quote(path)}"

    def _token(self) -> str | bool:
        from huggingface_hub import get_token

        return False if self._anonymous else (get_token() or False)

    def _headers(self) -> Mapping[str, str]:
        from huggingface_hub.utils import build_hf_headers

        return build_hf_headers(token=self._token(), library_name="trainshed")

    def _ask(self, path: str, where: str, form: Mapping[str, Any] | None = None) -> tuple[Any, str | None]:
        """What the Hub's API says below this repository, and the path of the page after it."""
        from huggingface_hub import errors
        from huggingface_hub.constants import is_offline_mode
        from huggingface_hub.utils import validate_repo_id

        if is_offline_mode():
            raise StorageError("the Hub is switched off", where=where, hint="unset HF_HUB_OFFLINE")
        try:
            validate_repo_id(self._repo)
        except errors.HFValidationError:
            raise NotFound("not a name the Hub can have", where=where, hint="check organisation and name") from None
        base = f"/api/{self._type}s/{self._repo}"
        body, following = self._web.json(f"{self._endpoint}{base}{path}", where, form)
        # A mirror may name the Hub itself in its links; our token goes to nobody but the endpoint.
        _, mark, rest = (following or "").partition(f"/tree/{self._commit}")
        if following and not mark:
            raise StorageError("the Hub's listing goes on at an address of another kind", where=where)
        return body, f"{mark}{rest}" if following else None

    def _explain(self, status: int, headers: Mapping[str, str], where: str) -> TrainshedError | None:
        code, message = headers.get("x-error-code", ""), headers.get("x-error-message", "")
        signed_in = bool(self._token())
        page = f"{self._endpoint}/{self._name}"
        if code == "GatedRepo":
            who = "as the account of your token" if signed_in else "then set HF_TOKEN to a token of that account"
            hint = f"accept its licence or ask for access at {page}, {who}"
            return AccessDenied("this repository is gated", where=where, hint=hint)
        if code == "RevisionNotFound":
            return NotFound(
                f"the repository has no revision '{self._asked}'", where=where, hint=f"look at {page}/commits"
            )
        if code == "EntryNotFound":
            return _NoEntry("the repository has no such file", where=where, hint=f"look at {page}/tree/main")
        if status == 401 and signed_in and ("Invalid" in message or code not in ("RepoNotFound", "")):
            return AccessDenied("the Hub does not accept the token", where=where, hint="set HF_TOKEN to a valid token")
        if code == "RepoNotFound" or status == 401:
            other = "hf://datasets/…" if self._type == "model" else "hf://org/name without datasets/"
            hint = f"check the name, or write {other}; a private one needs " + (
                "a token with access" if signed_in else "HF_TOKEN"
            )
            return NotFound("the Hub has no such repository, or does not show it to you", where=where, hint=hint)
        if status == 429:
            return StorageError(
                "the Hub keeps limiting us (429)", where=where, hint="set HF_TOKEN for a higher limit, or wait"
            )
        if status == 403:
            return AccessDenied("the token may not read this", where=where, hint=f"check its permissions for {page}")
        return None

    def _refuse(self, path: str) -> NoReturn:
        raise StorageError(
            "the Hub is read-only here",
            where=self._shown(path),
            hint="write to a path, s3://, gs:// or az://",
        )


class _NoEntry(NotFound):
    """A repository without this one file or folder, as opposed to no repository at all."""


def _file_info(file: Mapping[str, Any]) -> ObjectInfo:
    lfs = file.get("lfs")
    sha256 = f"sha256:{lfs['oid']}" if lfs else None
    return ObjectInfo(file["path"], file["size"], sha256 or file["oid"], sha256)
