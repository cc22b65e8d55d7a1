"""A folder published on the Hugging Face Hub as one commit, and compared with what the Hub then has.

The upload is huggingface_hub's: files whose content the Hub already has are not sent again, so an upload that was cut
goes on. Nothing of somebody else's is replaced: a repository that holds other weights is refused.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainshed.errors import AccessDenied, InputError, MissingExtra, StorageError
from trainshed.reporting import SILENT, Reporter, waiting
from trainshed.storage.address import parse
from trainshed.storage.manifest import MANIFEST
from trainshed.storage.open import open_folder
from trainshed.storage.store import CHUNK_BYTES, ObjectInfo, StoreOptions

_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pth", ".pt")


@dataclass(frozen=True)
class PublishedFolder:
    """What the Hub has after an upload."""

    repository: str
    commit: str
    files: int
    sent: bool
    """False where the Hub had all of it already."""

    @property
    def address(self) -> str:
        """Its address, pinned to the commit."""
        return f"hf://{self.repository}@{self.commit}"


def hub_repository(address: str) -> str:
    """Return `org/name` of the address of a model; raises `InputError` for any other."""
    place = parse(address)
    organisation, _, name = place.root.partition("/")
    if place.scheme != "hf" or place.path or "@" in place.root or not name or organisation in ("datasets", "spaces"):
        raise InputError(
            "weights are published as a model of the Hub", where=address, hint="write hf://org/name, without a revision"
        )
    return place.root


def hub_token() -> str:
    """Return the token to write with, from HF_TOKEN or the login of this machine; raises where there is none."""
    try:
        from huggingface_hub import get_token
    except ImportError:
        raise MissingExtra.named("data", "publishing on the Hugging Face Hub") from None
    token = get_token()
    if not token:
        raise InputError(
            "publishing on the Hub needs a token", where="export.to", hint="set HF_TOKEN to one that may write"
        )
    return token


def publish_folder(
    folder: Path,
    address: str,
    *,
    extra: Mapping[str, bytes] | None = None,
    message: str,
    options: StoreOptions | None = None,
    reporter: Reporter = SILENT,
) -> PublishedFolder:
    """Upload a folder that has a manifest, and `extra` files beside it; a new repository is private."""
    repository, token = hub_repository(address), hub_token()
    import httpx2
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    files: dict[str, Path | bytes] = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    }
    files |= extra or {}
    api = HfApi(endpoint=_endpoint(address, options), token=token, library_name="trainshed")
    had_bars = not are_progress_bars_disabled()
    disable_progress_bars()
    size = sum(path.stat().st_size for path in files.values() if isinstance(path, Path))
    try:
        with reporter.task("publishing", total=size, unit="B") as task, waiting(f"{address} (upload)"):
            api.create_repo(repository, private=True, exist_ok=True)
            before = _listed(address, options)
            _refuse_other_weights(address, before, files, folder, options)
            if _differences(before, files):
                operations = [
                    CommitOperationAdd(name, str(content) if isinstance(content, Path) else content)
                    for name, content in files.items()
                ]
                commit, sent = api.create_commit(repository, operations, commit_message=message).oid, True
            else:
                commit, sent = str(api.repo_info(repository).sha), False
            task.advance(size)
    except (HfHubHTTPError, httpx2.HTTPError) as error:
        raise _explained(error, address) from None
    except RuntimeError as error:  # huggingface_hub's own, around what happened to one of the files
        raise _explained(error.__cause__ or error, address) from None
    finally:
        if had_bars:
            enable_progress_bars()
    wrong = _differences(_listed(f"hf://{repository}@{commit}", options), files)
    if wrong:
        raise StorageError(
            f"the Hub has other bytes than were sent: {', '.join(wrong[:5])}", where=address, hint="run it again"
        )
    return PublishedFolder(repository, commit, len(files), sent)


def _endpoint(address: str, options: StoreOptions | None) -> str:
    own = options.endpoint_for(parse(address)).endpoint if options is not None else None
    return (own or os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _listed(address: str, options: StoreOptions | None) -> dict[str, ObjectInfo]:
    return {info.path: info for info in open_folder(address, options).list()}


def _differences(stored: Mapping[str, ObjectInfo], files: Mapping[str, Path | bytes]) -> list[str]:
    """Return the files that the Hub has not, or not as they are: it tells SHA-256 or Git's hash of each."""
    return [name for name, content in files.items() if name not in stored or not _is_same(stored[name], content)]


def _is_same(stored: ObjectInfo, content: Path | bytes) -> bool:
    size = content.stat().st_size if isinstance(content, Path) else len(content)
    if stored.size != size:
        return False
    hasher = hashlib.sha256() if stored.sha256 is not None else hashlib.sha1(b"blob %d\0" % size)
    if isinstance(content, bytes):
        hasher.update(content)
    else:
        with content.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                hasher.update(chunk)
    wanted = stored.version if stored.sha256 is None else stored.sha256.removeprefix("sha256:")
    return hasher.hexdigest() == wanted


def _refuse_other_weights(
    address: str,
    stored: Mapping[str, ObjectInfo],
    files: Mapping[str, Path | bytes],
    folder: Path,
    options: StoreOptions | None,
) -> None:
    """Refuse a repository with weights of another export: readers would load a mixture of both."""
    weights = [name for name in stored if name.endswith(_WEIGHTS)]
    if not weights:
        return
    same = MANIFEST in stored and open_folder(address, options).read(MANIFEST) == (folder / MANIFEST).read_bytes()
    if not same or any(name not in files for name in weights):
        raise InputError(
            f"the repository has other weights already ({weights[0]})",
            where=address,
            hint="write another name in `export.to`, or empty the repository first",
        )


def _explained(error: Any, address: str) -> StorageError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return AccessDenied(
            "the token may not write there", where=address, hint="set HF_TOKEN to one with write access to it"
        )
    if status is None:
        what = f"the Hub cannot be reached: {type(error).__name__}"
        return StorageError(what, where=address, hint="check the network, then run it again: it goes on")
    return StorageError(
        f"the Hub refused the upload ({status})", where=address, hint="run the same command again: it goes on"
    )
