"""A web server as a store that can only be read, one named file at a time, and the HTTP client that the Hub's store
uses too.

One GET continues where it broke, waits when told to, and never mixes two versions. A server that says nothing is
left alone for `Retry.answer_seconds`, asked again, and given up after `Retry.silent_seconds` with its address;
after a few seconds the listener of `reporting.waiting` hears of it. Not through obstore: its HTTP client refuses
answers without a Content-Length and addresses with a query.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn
from urllib.parse import urlsplit

from trainshed.errors import AccessDenied, AddressError, NotFound, StorageError, TrainshedError
from trainshed.redaction import redacted, shown_address
from trainshed.reporting import waiting
from trainshed.storage.address import Address
from trainshed.storage.store import CHUNK_BYTES, ObjectInfo, ReadOnlyStore, Retry

_TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 522, 524})
_RATE_LIMIT = re.compile(r"\bt\s*=\s*(\d+)")  # the Hub's `ratelimit: "resolvers";r=0;t=55`
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")

ExplainStatus = Callable[[int, Mapping[str, str], str], TrainshedError | None]


@dataclass(frozen=True)
class RemoteFile:
    """What a server says about a URL; `version` is empty where it says nothing that could change."""

    size: int | None
    version: str


class HttpClient:
    """One pool of connections, with our retries and our errors.

    `headers` is asked for each request (a token may be refreshed meanwhile); a redirect to another host does not get
    them. `explain` may turn a refusal into a better error than the plain ones here.
    """

    def __init__(
        self,
        retry: Retry,
        headers: Callable[[], Mapping[str, str]] = dict,
        explain: ExplainStatus = lambda status, headers, where: None,
    ) -> None:
        self._retry = retry
        self._headers = headers
        self._explain = explain
        self._lock = threading.Lock()
        self._shared: Any = None

    def close(self) -> None:
        """Close the connections that are kept for the next request."""
        with self._lock:
            client, self._shared = self._shared, None
        if client is not None:
            client.close()

    def inspect(self, url: str, where: str) -> RemoteFile:
        """Ask what is at a URL without reading it."""
        with self._request("HEAD", url, {}, where, tolerate=(403, 405, 501)) as answer:
            if answer.status_code < 400:
                return _remote_file(answer)
        # Some servers refuse HEAD, or sign their URLs for GET alone: ask for one byte.
        with self._request("GET", url, {"Range": "bytes=0-0"}, where, tolerate=(416,)) as answer:
            if answer.status_code == 416:
                return RemoteFile(0, _remote_file(answer).version)
            return _remote_file(answer)

    def stream(
        self, url: str, where: str, start: int = 0, end: int | None = None, chunk_bytes: int = 1 << 20
    ) -> Iterator[bytes]:
        """The bytes [start, end) of what is at a URL, in chunks."""
        if end is not None and end <= start:
            return
        done, first, failures, silent_seconds = start, None, 0, 0.0
        while True:
            before = done
            wanted = f"bytes={done}-{'' if end is None else end - 1}"
            headers = {"Range": wanted} if done or end is not None else {}
            with self._request("GET", url, headers, where, tolerate=(416,)) as answer:
                if answer.status_code == 416:
                    return  # nothing there: an empty file, or a start past its end
                remote = _remote_file(answer)
                first = first or remote
                _check_same_version(first, remote, where)
                skip = done if answer.status_code == 200 else done - _range_start(answer, done)
                stop = min(end, remote.size) if end is not None and remote.size is not None else end or remote.size
                opened = time.monotonic()
                for chunk, whole in _body_chunks(answer, skip, chunk_bytes, _waited_for(url, where)):
                    if stop is not None:
                        chunk = chunk[: stop - done]
                    if chunk:
                        done += len(chunk)
                        yield chunk
                    if stop is not None and done >= stop:
                        return
                    if whole and stop is None:
                        return
            failures = 0 if done > before else failures + 1
            silent_seconds = 0.0 if done > before else silent_seconds + time.monotonic() - opened
            if failures >= self._retry.attempts or silent_seconds > self._retry.silent_seconds:
                raise StorageError(
                    f"the connection to {_host(url)} broke {failures} times in a row at byte {done}",
                    where=where,
                    hint="run the same command again: it goes on where it stopped",
                )
            self._retry.pause(failures)

    def json(self, url: str, where: str, form: Mapping[str, Any] | None = None) -> tuple[Any, str | None]:
        """What is at a URL as JSON, and the URL of the page after it; with a `form`, the answer to it."""
        import httpx2

        begun = time.monotonic()
        for attempt in range(1, self._retry.attempts + 1):
            with self._request("GET" if form is None else "POST", url, {}, where, form=form) as answer:
                try:
                    with waiting(_waited_for(url, where)):
                        answer.read()
                    return answer.json(), answer.links.get("next", {}).get("url")
                except httpx2.HTTPError as error:
                    seconds = time.monotonic() - begun
                    if attempt == self._retry.attempts or seconds >= self._retry.silent_seconds:
                        raise self._unreachable(error, url, where, attempt, seconds) from None
                except ValueError:
                    raise StorageError(f"{_host(url)} did not answer with JSON", where=where) from None
            self._retry.pause(attempt - 1)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _request(
        self,
        method: str,
        url: str,
        headers: dict[str, str],
        where: str,
        tolerate: tuple[int, ...] = (),
        form: Mapping[str, Any] | None = None,
    ) -> Any:
        """Send until there is an answer that is not a passing failure; the caller closes it."""
        import httpx2

        begun = time.monotonic()
        with waiting(_waited_for(url, where)) as wait:
            for attempt in range(1, self._retry.attempts + 1):
                asked = None
                # Without this a server may send gzip, and byte positions would mean something else.
                sent = {"Accept-Encoding": "identity", **self._headers(), **headers}
                client = self._client()
                try:
                    request = client.build_request(method, url, headers=sent, data=form)
                    answer = client.send(request, stream=True)
                except (httpx2.InvalidURL, httpx2.UnsupportedProtocol):
                    raise StorageError("not a URL that can be read", where=where) from None
                except httpx2.HTTPError as error:
                    seconds = time.monotonic() - begun
                    if attempt == self._retry.attempts or seconds >= self._retry.silent_seconds:
                        raise self._unreachable(error, url, where, attempt, seconds) from None
                    trouble = self._silence(error)
                else:
                    status = answer.status_code
                    if status < 400 or status in tolerate:
                        return _ClosingResponse(answer)
                    asked = _retry_after_seconds(answer)
                    answer.close()
                    if status not in _TRANSIENT_STATUSES or attempt == self._retry.attempts:
                        raise self._explain(status, answer.headers, where) or _status_error(status, where)
                    trouble = f"it answered {status}" + (f" and asked for {asked:.0f} s" if asked else "")
                wait.detail = f"attempt {attempt + 1} of {self._retry.attempts}; the one before: {trouble}"
                self._retry.pause(attempt - 1, asked)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _unreachable(self, error: Exception, url: str, where: str, attempts: int, seconds: float) -> StorageError:
        """Our error for a server that could not be reached; httpx's own text may hold the URL."""
        tries = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        return StorageError(
            f"{_host(url)} cannot be reached: {self._silence(error)} ({tries} in {seconds:.0f} s)",
            where=where,
            hint="check the network and the address, then run it again",
        )

    def _silence(self, error: Exception) -> str:
        import httpx2

        if isinstance(error, httpx2.ConnectTimeout):
            return f"no connection within {self._retry.connect_seconds:g} s"
        if isinstance(error, httpx2.TimeoutException):
            return f"it accepts connections and did not answer within {self._retry.answer_seconds:g} s"
        return redacted(f"{type(error).__name__}: {error}")

    def _client(self) -> Any:
        with self._lock:
            if self._shared is None:
                import httpx2

                _redact_request_log()
                self._shared = httpx2.Client(
                    follow_redirects=True,
                    timeout=httpx2.Timeout(self._retry.answer_seconds, connect=self._retry.connect_seconds, pool=None),
                    limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
                )
            return self._shared


class _ClosingResponse:
    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def __enter__(self) -> Any:
        return self._answer

    def __exit__(self, *_: object) -> None:
        self._answer.close()


def _host(url: str) -> str:
    """The server of a URL, as it may be shown."""
    parts = urlsplit(url)
    return shown_address(f"{parts.scheme}://{parts.netloc}")


def _waited_for(url: str, where: str) -> str:
    """An address, with its server where the address does not name it (the Hub's)."""
    return where if _host(url) in where else f"{where} ({_host(url)})"


def _body_chunks(answer: Any, skip: int, chunk_bytes: int, waited_for: str) -> Iterator[tuple[bytes, bool]]:
    """Chunks of a body, the last one marked with whether the body ended as it should."""
    import httpx2

    held, length, whole = [], 0, True
    pieces = answer.iter_raw()
    while True:
        try:
            with waiting(waited_for):
                piece = next(pieces, None)
        except httpx2.HTTPError:
            piece, whole = None, False
        if piece is None:
            yield b"".join(held), whole
            return
        if skip:
            skip, piece = max(0, skip - len(piece)), piece[skip:]
        held.append(piece)
        length += len(piece)
        if length >= chunk_bytes:
            data = b"".join(held)
            held, length = [], 0
            yield data, False


def _remote_file(answer: Any) -> RemoteFile:
    headers = answer.headers
    total = headers.get("content-length")
    match = _CONTENT_RANGE.match(headers.get("content-range", ""))
    if match:
        total = None if match[3] == "*" else match[3]
    elif answer.status_code == 206:
        total = None
    version = headers.get("etag", "").removeprefix("W/") or headers.get("last-modified", "")
    return RemoteFile(int(total) if total and total.isdigit() else None, version)


def _range_start(answer: Any, expected: int) -> int:
    match = _CONTENT_RANGE.match(answer.headers.get("content-range", ""))
    return int(match[1]) if match else expected


def _check_same_version(first: RemoteFile, now: RemoteFile, where: str) -> None:
    differs = first.version != now.version or (None not in (first.size, now.size) and first.size != now.size)
    if differs:
        raise StorageError(
            "it was replaced while it was being read",
            where=where,
            hint="run it again once nobody writes there",
        )


def _retry_after_seconds(answer: Any) -> float | None:
    """How long the server asks us to wait: Retry-After in seconds or as a date, or the Hub's own header."""
    text = answer.headers.get("retry-after", "").strip()
    if text.isdigit():
        return float(text)
    if text:
        with suppress(ValueError, TypeError):
            return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    limit = _RATE_LIMIT.search(answer.headers.get("ratelimit", "")) if answer.status_code == 429 else None
    return float(limit[1]) if limit else None


def _status_error(status: int, where: str) -> TrainshedError:
    if status in (404, 410):
        return NotFound("nothing at this address", where=where, hint="check the address")
    if status in (401, 403, 407):
        return AccessDenied(f"the server refused ({status})", where=where, hint="check the address and who may read it")
    if status == 429:
        return StorageError(
            "the server keeps limiting us (429)", where=where, hint="use fewer --workers or wait a while"
        )
    return StorageError(f"the server answered {status}", where=where)


class _RedactQueries(logging.Filter):
    """httpx logs each URL it asks for; redirects to a CDN carry a signature in their query."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(
                redacted(str(argument)) if "://" in str(argument) else argument for argument in record.args
            )
        return True


def _redact_request_log() -> None:
    logger = logging.getLogger("httpx2")
    if not any(isinstance(filter, _RedactQueries) for filter in logger.filters):
        logger.addFilter(_RedactQueries())


UNKNOWN_SIZE = -1


class HttpStore(ReadOnlyStore):
    """All files of one web server."""

    def __init__(self, address: Address, retry: Retry) -> None:
        self._root = address.url
        self._web = HttpClient(retry)

    def __repr__(self) -> str:
        return f"HttpStore({self.url!r})"

    @property
    def url(self) -> str:
        """The server's address, without a user or password."""
        return shown_address(self._root)

    def close(self) -> None:
        """Close the connections that are kept for the next request."""
        self._web.close()

    def head(self, path: str) -> ObjectInfo | None:
        """Describe one file; the size is -1 where the server does not tell it."""
        try:
            remote = self._web.inspect(self._url(path), self._shown(path))
        except NotFound:
            return None
        return ObjectInfo(path, UNKNOWN_SIZE if remote.size is None else remote.size, remote.version)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Refuse: HTTP has no listing."""
        raise AddressError(
            "a web server cannot be listed",
            where=self._shown(prefix),
            hint="name one file, or put the URLs one per line into a text file and write @that-file",
        )

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        """Read the bytes [start, end) of a file."""
        return b"".join(self._web.stream(self._url(path), self._shown(path), start, end))

    def stream(self, path: str, start: int = 0, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Read a file from `start` to its end in chunks."""
        return self._web.stream(self._url(path), self._shown(path), start, None, chunk_bytes)

    def _url(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _shown(self, path: str) -> str:
        return shown_address(self._url(path))

    def _refuse(self, path: str) -> NoReturn:
        raise StorageError(
            "a web server is read-only here",
            where=self._shown(path),
            hint="write to a path, s3://, gs:// or az://",
        )
