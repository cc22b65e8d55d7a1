"""A repository of the Hugging Face Hub as a store that can only be read, pinned to one commit.

Metadata comes through huggingface_hub; bytes come by plain ranged GETs of the resolve URL, which serves Git, LFS and
Xet files alike, so that nothing bulky passes through a cache on disk.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn
from urllib.parse import quote, unquote

from trainshed.errors import AccessDenied, MissingExtra, NotFound, StorageError, TrainshedError
from trainshed.storage.address import Address, join
from trainshed.storage.options import Endpoint
from trainshed.storage.read_only import ReadOnly
from trainshed.storage.retry import Retry
from trainshed.storage.store import CHUNK_BYTES, ObjectInfo
from trainshed.storage.web import Web

_COMMIT = re.compile(r"[0-9a-f]{40}")
_TYPES = {"datasets": "dataset", "spaces": "space"}


class HubStore(ReadOnly):
    """All files of one model, dataset or space at one commit."""

    def __init__(self, address: Address, options: Endpoint, retry: Retry) -> None:
        try:
            import huggingface_hub
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
        self._api = huggingface_hub.HfApi(endpoint=self._endpoint, library_name="trainshed")
        self._web = Web(retry, self._headers, self._explain)
        self._commit = self._asked if self._asked and _COMMIT.fullmatch(self._asked) else None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"HubStore({self._written!r})"

    @property
    def revision(self) -> str:
        """The commit that everything is read from; a branch or tag is looked up once."""
        with self._lock:
            if self._commit is None:
                with self._explained(self._written):
                    info = self._api.repo_info(
                        self._repo, repo_type=self._type, revision=self._asked, token=self._token()
                    )
                self._commit = str(info.sha)
            return self._commit

    @property
    def url(self) -> str:
        """The repository with its commit: an address that means the same bytes for ever."""
        return f"hf://{self._name}@{self.revision}"

    def head(self, path: str) -> ObjectInfo | None:
        """Describe one file, or None if there is none."""
        with self._explained(self._shown(path)):
            found = self._api.get_paths_info(
                self._repo, [path], revision=self.revision, repo_type=self._type, token=self._token()
            )
        infos = [_info(each) for each in found if hasattr(each, "blob_id")]
        return infos[0] if infos else None

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All files below a folder, sorted by path."""
        prefix = prefix.strip("/")
        try:
            with self._explained(self._shown(prefix)):
                tree = self._api.list_repo_tree(
                    self._repo,
                    prefix or None,
                    recursive=True,
                    revision=self.revision,
                    repo_type=self._type,
                    token=self._token(),
                )
                found = [_info(each) for each in tree if hasattr(each, "blob_id")]
        except _NoEntry:
            return
        yield from sorted(found, key=lambda info: info.path)

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

    @contextmanager
    def _explained(self, where: str) -> Iterator[None]:
        import httpx2
        from huggingface_hub import errors

        try:
            yield
        except TrainshedError:
            raise
        except errors.HfHubHTTPError as error:
            status = error.response.status_code if error.response is not None else 0
            headers = error.response.headers if error.response is not None else {}
            raise self._explain(status, headers, where) or _unexplained(status, where) from None
        except errors.HFValidationError:
            raise NotFound("not a name the Hub can have", where=where, hint="check organisation and name") from None
        except (httpx2.HTTPError, OSError) as error:
            hint = "unset HF_HUB_OFFLINE" if os.environ.get("HF_HUB_OFFLINE") else "check the network and HF_ENDPOINT"
            raise StorageError(f"the Hub cannot be reached ({type(error).__name__})", where=where, hint=hint) from None

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


def _unexplained(status: int, where: str) -> TrainshedError:
    if status == 404:
        return NotFound("nothing at this address", where=where, hint="check the address")
    if status == 429:
        return StorageError(
            "the Hub keeps limiting us (429)", where=where, hint="set HF_TOKEN for a higher limit, or wait"
        )
    return StorageError(f"the Hub answered {status}", where=where)


def _info(file: Any) -> ObjectInfo:
    sha256 = f"sha256:{file.lfs.sha256}" if file.lfs is not None else None
    return ObjectInfo(file.path, file.size, sha256 or file.blob_id, sha256)
