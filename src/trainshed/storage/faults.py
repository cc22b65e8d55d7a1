"""What went wrong in a bucket, in our own words: obstore's errors become ours, without anything secret in them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from obstore import exceptions

from trainshed.errors import AccessDenied, AddressError, Conflict, NotFound, StorageError, TrainshedError
from trainshed.redaction import redacted, shown_address

OBSTORE_ERRORS = (exceptions.BaseError, FileNotFoundError, ValueError, OSError)

_STATUS = re.compile(r"status code: (\d{3}) ?([A-Za-z ]*)")
# How obstore begins the text of a request that failed, and what the system said of the connection.
_SENT = re.compile(r"Error performing \w+ (\S+) in ([\d.]+)(m?s), after (\d+) retries")
_REASON = re.compile(r'message: "([^"]+)"|"(dns error)"|Custom \{[^}]*error: "([^"]+)"')
_CODE = re.compile(r"<Code>([A-Za-z0-9]+)</Code>|\"code\": ?\"?([A-Za-z0-9]+)")
_SECRET_NAME = re.compile(r"SECRET|TOKEN|PASSWORD|SAS|ACCESS_KEY|ACCOUNT_KEY|CREDENTIAL", re.IGNORECASE)
# Addresses that only instances of a cloud answer; reaching for them means that nothing else gave credentials.
_METADATA_HOSTS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal", "metadata/identity")
_LOGIN = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE), "
    "or write stores: {s3: {anonymous: true}} for a public bucket",
    "gs": "run `gcloud auth application-default login`, set GOOGLE_APPLICATION_CREDENTIALS, "
    "or write stores: {gs: {anonymous: true}} for a public bucket",
    "az": "set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_KEY, or sign in with a managed identity",
}


@contextmanager
def explained(where: str, scheme: str) -> Iterator[None]:
    """Turn whatever obstore raises inside into one of our errors.

    The original is left out of the chain on purpose: its text is a dump of the request.
    """
    try:
        yield
    except TrainshedError:
        raise
    except OBSTORE_ERRORS as error:
        raise translated(error, where, scheme) from None


def translated(error: BaseException, where: str, scheme: str) -> TrainshedError:
    """Our error for one of obstore's."""
    text = str(error)
    status, code = status_of(error), _code(text)
    reason = f" ({code})" if code else ""
    if code == "NoSuchBucket" or (status == 404 and code in ("ContainerNotFound", "NoSuchBucket")):
        return NotFound("there is no such bucket", where=where, hint="check its name and the endpoint")
    if any(host in text for host in _METADATA_HOSTS):
        return AccessDenied("no credentials were found for it", where=where, hint=_LOGIN.get(scheme))
    if isinstance(error, exceptions.AlreadyExistsError):
        return Conflict("it is there already", where=where)
    if isinstance(error, exceptions.PreconditionError):
        return Conflict("another writer changed it first", where=where)
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError) or status in (
        401,
        403,
    ):
        return AccessDenied(f"the store refused the credentials{reason}", where=where, hint=_refused(code, scheme))
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
        return _unreachable(text, where)
    return StorageError(f"{_first_line(text)}{reason}", where=where)


def _unreachable(text: str, where: str) -> StorageError:
    """Our error for a store that could not be talked to: which server, why, and how often it was tried."""
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


def status_of(error: BaseException) -> int | None:
    """The HTTP status inside an error, where there is one."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def scrubbed(text: str) -> str:
    """Text with its addresses as they may be shown, and without any value that the environment holds as a secret."""
    text = redacted(text)
    for name, value in os.environ.items():
        if len(value) >= 6 and _SECRET_NAME.search(name):
            text = text.replace(value, "…")
    return text


def _refused(code: str | None, scheme: str) -> str | None:
    if code == "SignatureDoesNotMatch":
        return "the access key is known but the secret is not the right one"
    if code == "InvalidAccessKeyId":
        return "this endpoint does not know the access key; are endpoint and key from the same place?"
    if code in ("ExpiredToken", "TokenRefreshRequired"):
        return "the session has expired: sign in again"
    if code == "RequestTimeTooSkewed":
        return "the clock of this machine is wrong"
    return _LOGIN.get(scheme)


def _code(text: str) -> str | None:
    found = _CODE.search(text)
    return (found[1] or found[2]) if found else None


def _first_line(text: str) -> str:
    line = scrubbed(text.split("\n", 1)[0])
    line = re.sub(r"<\?xml.*", "", line).rstrip(" :")
    return line if len(line) <= 300 else line[:300] + "…"
