"""A bucket as a store: S3 and everything that speaks it, Google Cloud Storage, Azure Blob Storage.

obstore's errors become ours, without anything secret in them.
"""

from __future__ import annotations

import builtins
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore import exceptions
from obstore.exceptions import BaseError, PreconditionError

from trainshed.errors import AccessDenied, AddressError, Conflict, NotFound, StorageError, TrainshedError
from trainshed.redaction import redacted, shown_address
from trainshed.reporting import waiting
from trainshed.storage.address import join
from trainshed.storage.store import ABANDONED_SECONDS, ABSENT, CHUNK_BYTES, ObjectInfo, Retry

OBSTORE_ERRORS = (exceptions.BaseError, FileNotFoundError, ValueError, OSError)

_STATUS = re.compile(r"status code: (\d{3}) ?([A-Za-z ]*)")
# How obstore begins the text of a request that failed, and what the system said of the connection.
_SENT = re.compile(r"Error performing \w+ (\S+) in ([\d.]+)(m?s), after (\d+) retries")
_REASON = re.compile(r'message: "([^"]+)"|"(dns error)"|Custom \{[^}]*error: "([^"]+)"')
_CODE = re.compile(r"<Code>([A-Za-z0-9]+)</Code>|\"code\": ?\"?([A-Za-z0-9]+)")
_SECRET_NAME = re.compile(r"SECRET|TOKEN|PASSWORD|SAS|ACCESS_KEY|ACCOUNT_KEY|CREDENTIAL", re.IGNORECASE)
# Addresses that only instances of a cloud answer; reaching for them means that nothing else gave credentials.
_METADATA_HOSTS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal", "metadata/identity")
_LOGIN_HINTS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE), "
    "or write stores: {s3: {anonymous: true}} for a public bucket",
    "gs": "run `gcloud auth application-default login`, set GOOGLE_APPLICATION_CREDENTIALS, "
    "or write stores: {gs: {anonymous: true}} for a public bucket",
    "az": "set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_KEY, or sign in with a managed identity",
}


@contextmanager
def translated_errors(where: str, scheme: str) -> Iterator[None]:
    """Turn whatever obstore raises inside into one of our errors.

    The original is left out of the chain on purpose: its text is a dump of the request.
    """
    try:
        yield
    except TrainshedError:
        raise
    except OBSTORE_ERRORS as error:
        raise translate_error(error, where, scheme) from None


def translate_error(error: BaseException, where: str, scheme: str) -> TrainshedError:
    """Our error for one of obstore's."""
    text = str(error)
    status, code = http_status(error), _error_code(text)
    reason = f" ({code})" if code else ""
    if code == "NoSuchBucket" or (status == 404 and code in ("ContainerNotFound", "NoSuchBucket")):
        return NotFound("there is no such bucket", where=where, hint="check its name and the endpoint")
    if any(host in text for host in _METADATA_HOSTS):
        return AccessDenied("no credentials were found for it", where=where, hint=_LOGIN_HINTS.get(scheme))
    if isinstance(error, exceptions.AlreadyExistsError):
        return Conflict("it is there already", where=where)
    if isinstance(error, exceptions.PreconditionError):
        return Conflict("another writer changed it first", where=where)
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError) or status in (
        401,
        403,
    ):
        return AccessDenied(f"the store refused the credentials{reason}", where=where, hint=_denied_hint(code, scheme))
    if isinstance(error, FileNotFoundError) or status == 404:
        return NotFound("nothing at this address", where=where, hint="check the path")
    if isinstance(error, ValueError | exceptions.InvalidPathError):
        return AddressError(
            _first_line(text), where=where, hint="write a path without control characters, '//' or '..'"
        )
    if code in ("PermanentRedirect", "AuthorizationHeaderMalformed") or "configured region" in text:
        return StorageError(
            "the bucket is in another region",
            where=where,
            hint="set AWS_REGION or write stores: {s3: {region: …}}",
        )
    if "error sending request" in text or "Connect" in text:
        return _unreachable_error(text, where)
    return StorageError(f"{_first_line(text)}{reason}", where=where)


def _unreachable_error(text: str, where: str) -> StorageError:
    """Our error for a store that could not be reached: which server, why, and how often it was tried."""
    sent, why = _SENT.search(text), _REASON.search(text)
    parts = urlsplit(sent[1]) if sent else None
    host = shown_address(f"{parts.scheme}://{parts.netloc}") if parts else "the store"
    if why:
        reason = ": " + next(group for group in why.groups() if group)
    elif "kind: Timeout" in text:
        reason = ": " + ("no connection in time" if "Connect," in text else "it did not answer in time")
    else:
        reason = ""
    tries = ""
    if sent:
        seconds = float(sent[2]) / (1 if sent[3] == "s" else 1000)
        attempts = int(sent[4]) + 1
        tries = f" ({attempts} attempt{'s' if attempts > 1 else ''} in {seconds:.0f} s)"
    return StorageError(
        f"{host} cannot be reached{reason}{tries}",
        where=where,
        hint="check the network and the endpoint, then run it again",
    )


def http_status(error: BaseException) -> int | None:
    """The HTTP status inside an error, where there is one."""
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None


def scrub_secrets(text: str) -> str:
    """Text with its addresses as they may be shown, and without any value that the environment holds as a secret."""
    text = redacted(text)
    for name, value in os.environ.items():
        if len(value) >= 6 and _SECRET_NAME.search(name):
            text = text.replace(value, "…")
    return text


def _denied_hint(code: str | None, scheme: str) -> str | None:
    if code == "SignatureDoesNotMatch":
        return "the access key is known but the secret is not the right one"
    if code == "InvalidAccessKeyId":
        return "this endpoint does not know the access key; are endpoint and key from the same place?"
    if code in ("ExpiredToken", "TokenRefreshRequired"):
        return "the session has expired: sign in again"
    if code == "RequestTimeTooSkewed":
        return "the clock of this machine is wrong"
    return _LOGIN_HINTS.get(scheme)


def _error_code(text: str) -> str | None:
    match = _CODE.search(text)
    return (match[1] or match[2]) if match else None


def _first_line(text: str) -> str:
    line = scrub_secrets(text.split("\n", 1)[0])
    line = re.sub(r"<\?xml.*", "", line).rstrip(" :")
    return line if len(line) <= 300 else line[:300] + "…"


# Four ranges of 4 MiB in flight fill a 10 Gbit/s link at 10 ms, and sixteen files at a time still fit into a laptop.
PART_BYTES = 4 * 1024 * 1024
PARALLEL_PARTS = 4
# S3 takes 10,000 parts per object, Azure 50,000; a little air for rounding.
MAX_PARTS = 9_000
# Where nobody says how much will come, room for 140 GB must be left.
UPLOAD_PART_BYTES, UNKNOWN_SIZE_PART_BYTES = 8 * 1024 * 1024, 16 * 1024 * 1024
# How much of a part is kept when its connection breaks in the middle.
_PROGRESS_BYTES = 1024 * 1024

_BROKEN_ANSWER = "response body error"
"""What obstore says of an answer that ends too early."""
_process: int | None = None
Answer = TypeVar("Answer")


class ObjectStore:
    """All objects of one bucket."""

    def __init__(self, client: Any, url: str, scheme: str, retry: Retry) -> None:
        self._client = client
        self._url = url
        self._scheme = scheme
        self._retry = retry

    def __repr__(self) -> str:
        return f"ObjectStore({self._url!r})"

    @property
    def url(self) -> str:
        """The bucket's address."""
        return self._url

    def head(self, path: str) -> ObjectInfo | None:
        """Describe one object, or None if there is none."""
        try:
            with self._translated_errors(path):
                return _object_info(obstore.head(self._client, path))
        except NotFound as error:
            if "bucket" in error.what:  # its absence is not a statement about the object
                raise
            return None

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects below a folder, sorted by path."""
        return self._list(prefix.strip("/"))

    def list_after(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        """The objects below a folder that sort after a path; the bucket itself begins there."""
        return self._list(prefix.strip("/"), after)

    def list_folders(self, prefix: str = "") -> builtins.list[str]:
        """The names of the folders directly below a folder, sorted."""
        prefix = prefix.strip("/")
        answer = self._ask(prefix, lambda: obstore.list_with_delimiter(self._client, prefix or None))
        return sorted(path.strip("/").rpartition("/")[2] for path in answer["common_prefixes"])

    def _list(self, prefix: str, after: str | None = None) -> Iterator[ObjectInfo]:
        def listed() -> builtins.list[ObjectInfo]:
            pages = obstore.list(self._client, prefix or None, offset=after, chunk_size=1000)
            return [_object_info(meta) for page in pages for meta in page]

        infos = self._ask(prefix, listed)
        infos.sort(key=lambda info: info.path)
        for index, info in enumerate(infos):
            # Consoles mark a folder by an empty object 'folder/', which obstore shows without its slash.
            following = infos[index + 1].path if index + 1 < len(infos) else ""
            if info.size == 0 and (info.path == prefix or following.startswith(info.path + "/")):
                continue
            yield info

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        """Read the bytes [start, end) of an object, several ranges at a time where it is large."""
        if end is not None and end <= start:
            return b""
        parts = list(self._parts(path, start, end, PART_BYTES))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def stream(self, path: str, start: int = 0, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Read an object from `start` to its end in chunks, fetching a few ranges ahead."""
        for part in self._parts(path, start, None, max(chunk_bytes, PART_BYTES)):
            for offset in range(0, len(part), chunk_bytes):
                yield part if len(part) <= chunk_bytes else part[offset : offset + chunk_bytes]

    def put(self, path: str, data: bytes, *, expect: str | None = None) -> ObjectInfo:
        """Write a small object in one request; with `expect`, only over what is expected."""
        if expect is None or expect == ABSENT:
            mode: Any = "overwrite" if expect is None else "create"
            answer = self._ask(
                path,
                lambda: obstore.put(self._client, path, data, mode=mode, use_multipart=False),
                repeated=expect is None,
            )
        else:
            answer = self._put_over(path, data, expect)
        return ObjectInfo(path, len(data), answer["e_tag"] or "")

    @contextmanager
    def writer(self, path: str, *, size: int | None = None) -> Iterator[_PartWriter]:
        """Open a large object for writing: one request if it stays small, else parts in parallel."""
        part_bytes = UNKNOWN_SIZE_PART_BYTES if size is None else max(UPLOAD_PART_BYTES, -(-size // MAX_PARTS))
        writer = _PartWriter(self, path, part_bytes)
        try:
            yield writer
        except BaseException:
            writer.abort()
            raise
        writer.finish()

    def delete(self, path: str) -> None:
        """Remove an object; removing what is not there is not an error."""
        try:
            self._ask(path, lambda: obstore.delete(self._client, path))
        except NotFound as error:
            if "bucket" in error.what:
                raise

    def sweep(self, prefix: str = "", *, older_than_seconds: float = ABANDONED_SECONDS) -> None:
        """Nothing to do: uploads that were never finished are for the bucket's lifecycle rule."""

    @contextmanager
    def _translated_errors(self, path: str) -> Iterator[None]:
        """Ask the bucket in here: a long wait is reported, and obstore's errors become ours."""
        where = join(self._url, path)
        _check_not_forked(where)
        with translated_errors(where, self._scheme), waiting(where):
            yield

    def _ask(self, path: str, request: Callable[[], Answer], *, repeated: bool = True) -> Answer:
        """Send a request again when its answer breaks off: obstore repeats it only up to the answer's first byte."""
        for attempt in range(self._retry.attempts):
            with self._translated_errors(path):
                try:
                    return request()
                except BaseError as error:
                    if _BROKEN_ANSWER not in str(error) or not repeated or attempt + 1 == self._retry.attempts:
                        raise
            self._retry.pause(attempt)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _put_over(self, path: str, data: bytes, expect: str) -> Any:
        tag: dict[str, str | None] = {"e_tag": expect}
        if self._scheme == "gs":
            # Google compares generations, which its listings do not tell; the ETag is checked here, the rest there.
            with self._translated_errors(path):
                meta = obstore.head(self._client, path)
            if meta["e_tag"] != expect:
                raise Conflict("another writer changed it first", where=join(self._url, path))
            tag["version"] = meta["version"]
        with self._translated_errors(path):
            try:
                return obstore.put(self._client, path, data, mode=tag, use_multipart=False)  # type: ignore[arg-type]
            except PreconditionError:
                if self._scheme != "s3" or obstore.head(self._client, path)["e_tag"] != expect:
                    raise
                # Ceph's gateway compares If-Match with the quotes on; the bare tag is just as conditional.
                bare: Any = {"e_tag": expect.strip('"')}
                return obstore.put(self._client, path, data, mode=bare, use_multipart=False)

    def _parts(self, path: str, start: int, end: int | None, part_bytes: int) -> Iterator[bytes]:
        """The bytes [start, end) in parts, all of one version."""
        first_end = start + part_bytes if end is None else min(end, start + part_bytes)
        info, first = self._fetch(path, start, first_end, None)
        if first:
            yield first
        end = info.size if end is None else min(end, info.size)
        offsets = range(start + part_bytes, end, part_bytes)
        if not offsets:
            return
        pool = ThreadPoolExecutor(min(PARALLEL_PARTS, len(offsets)), thread_name_prefix="trainshed-get")
        try:
            ahead: deque[Future[tuple[ObjectInfo, bytes]]] = deque()
            for offset in offsets:
                ahead.append(pool.submit(self._fetch, path, offset, min(end, offset + part_bytes), info.version))
                if len(ahead) >= PARALLEL_PARTS:
                    yield ahead.popleft().result()[1]
            while ahead:
                yield ahead.popleft().result()[1]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _fetch(self, path: str, start: int, end: int, version: str | None) -> tuple[ObjectInfo, bytes]:
        """One range; when its connection breaks, the rest of it follows from the same version of the object."""
        parts: list[bytes] = []
        done, silent_seconds, attempt = start, 0.0, 0
        while attempt < self._retry.attempts and silent_seconds <= self._retry.silent_seconds:
            options: dict[str, Any] = {"range": (done, end)}
            if version:
                options["if_match"] = version
            with self._translated_errors(path):
                try:
                    answer = obstore.get(self._client, path, options=options)  # type: ignore[arg-type]
                except PreconditionError:
                    raise StorageError(
                        "it was replaced while it was being read",
                        where=join(self._url, path),
                        hint="run it again once nobody writes there",
                    ) from None
                except BaseError as error:
                    if http_status(error) != 416:
                        raise
                    return self._past_the_end(path, start), b""
            info = _object_info(answer.meta)
            version, end = info.version or version, min(end, info.size)
            before, opened = done, time.monotonic()
            with suppress(BaseError):  # what has arrived counts; the length below tells whether it was all
                chunks = iter(answer.stream(min_chunk_size=_PROGRESS_BYTES))
                while (chunk := self._next(chunks, path)) is not None:
                    parts.append(chunk)
                    done += len(chunk)
            if done >= end:
                return info, parts[0] if len(parts) == 1 else b"".join(parts)
            silent_seconds = 0.0 if done > before else silent_seconds + time.monotonic() - opened
            self._retry.pause(attempt)
            attempt += 1
        raise StorageError(
            f"the connection broke {attempt} times",
            where=join(self._url, path),
            hint="run the same command again: it goes on where it stopped",
        )

    def _next(self, chunks: Iterator[Any], path: str) -> bytes | None:
        with waiting(join(self._url, path)):
            chunk = next(chunks, None)
        return None if chunk is None else bytes(chunk)

    def _past_the_end(self, path: str, start: int) -> ObjectInfo:
        info = self.head(path)
        if info is None:
            raise NotFound("nothing at this address", where=join(self._url, path), hint="check the path")
        if info.size > start:
            raise StorageError("the store refused a range inside the object", where=join(self._url, path))
        return info


class _PartWriter:
    """Keeps the first part in memory: an object that ends there costs one request instead of three."""

    def __init__(self, store: ObjectStore, path: str, part_bytes: int) -> None:
        self._store = store
        self._path = path
        self._part_bytes = part_bytes
        self._first = bytearray()
        self._upload: Any = None
        self._room = 10_000 * part_bytes
        self.info: ObjectInfo | None = None

    def write(self, data: bytes | memoryview) -> None:
        self._room -= len(data)
        if self._room < 0:
            raise StorageError(
                f"more than {10_000 * self._part_bytes // 10**9} GB in one object, the most without knowing its size",
                where=join(self._store.url, self._path),
                hint="pass size= to writer(), or write several objects",
            )
        if self._upload is None:
            self._first += data
            if len(self._first) <= self._part_bytes:
                return
            data, self._first = bytes(self._first), bytearray()
            with self._store._translated_errors(self._path):
                self._upload = obstore.open_writer(
                    self._store._client,
                    self._path,
                    buffer_size=self._part_bytes,
                    max_concurrency=PARALLEL_PARTS,
                ).__enter__()
        with self._store._translated_errors(self._path):
            # obstore uploads from the memory it is given, later; whoever passes a view may use that memory again.
            self._upload.write(data if isinstance(data, bytes) else bytes(data))

    def finish(self) -> None:
        if self._upload is None:
            self.info = self._store.put(self._path, bytes(self._first))
            return
        with self._store._translated_errors(self._path):
            self._upload.__exit__(None, None, None)
        self.info = self._store.head(self._path)

    def abort(self) -> None:
        if self._upload is not None:
            upload, self._upload = self._upload, None
            with suppress(Exception):  # the error that led here is the one to tell
                # Leaving with an error makes obstore abort the upload, so that no parts stay behind to be paid for.
                upload.__exit__(RuntimeError, RuntimeError("aborted"), None)


def _check_not_forked(where: str) -> None:
    """obstore's threads stay in the parent, and a forked child would wait for them for ever."""
    global _process
    _process = _process or os.getpid()
    if _process != os.getpid():
        raise StorageError(
            "a bucket was in use before this process was forked",
            where=where,
            hint="start workers by multiprocessing's 'forkserver' or 'spawn'",
        )


def _object_info(meta: Any) -> ObjectInfo:
    modified = meta["last_modified"].timestamp() if meta.get("last_modified") else None
    return ObjectInfo(meta["path"], meta["size"], meta["e_tag"] or "", modified_seconds=modified)
