"""How addresses are written where people and files see them: without whatever lets their reader in.

A signed URL carries its signature in the query, an older one its user and password before the host. `shown_address` is
the one function that writes an address into a message, an event, a manifest or a log; `redacted` does the same to the
addresses inside a text that others wrote, such as an error of a library.
"""

from __future__ import annotations

import re

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(/*)")
_IN_TEXT = re.compile(r"(?:https?:/*|[A-Za-z][A-Za-z0-9+.-]*:/+)(?:[^\s@/]*@)?[^\s\"'<>`|]+")
_KEPT_IN_TEXT = re.compile(r"[).,;:\]}]*$")
_WEB = ("http", "https")
_PATTERN_SCHEMES = ("s3", "gs", "az", "hf", "file")
"""In their paths `?` is a pattern, unless what follows is a parameter with its value."""
_QUERY = re.compile(r"\?(?!…)")
_PARAMETER = re.compile(r"\?[\w.~%-]+=")
_CREDENTIAL = re.compile(
    r"x-(?:amz|goog|oss|cos)-|sig$|signature|token|secret|passw|credential|api[-_]?key|access[-_]?key|^key$|^auth|policy$",
    re.IGNORECASE,
)


def shown_address(address: str) -> str:
    """Return an address as it may be shown or stored: no user, no password, no query, no fragment.

    Plain paths stay as they are: a `?` in them is a pattern. What is shown once stays so when it is shown again.
    """
    match = _ADDRESS.match(address)
    if match is None:
        return address
    scheme, rest = match[1].lower(), address[match.end() :]
    if not match[2] and scheme not in (*_WEB, *_PATTERN_SCHEMES):
        return address  # `file.txt:12`, `a:b`
    rest, mark = _without_query(rest, scheme)
    rest = rest[_user_end(rest) :]
    host, slash, path = rest.partition("/")
    return f"{match[0]}{host}{slash}{redacted(path)}{mark}"


def redacted(text: str) -> str:
    """Return a text with every address in it as `shown_address` writes it."""
    return _IN_TEXT.sub(_shown_in_text, text) if ":" in text else text


def credentials_in(address: str) -> str | None:
    """Say in what way an address carries a secret; None where it carries none that we know of.

    A query may be harmless (`?download=true`): what tells are the names of its parameters.
    """
    match = _ADDRESS.match(address)
    if match is None or (not match[2] and match[1].lower() not in (*_WEB, *_PATTERN_SCHEMES)):
        return None
    rest = address[match.end() :]
    if _user_end(rest):
        return "a user or password before the host"
    for parameter in re.split(r"[?&#;]", rest)[1:]:
        name, equals, _ = parameter.partition("=")
        if equals and _CREDENTIAL.search(name):
            return f"a credential in its query ({name})"
    return None


def _without_query(text: str, scheme: str) -> tuple[str, str]:
    """Cut query and fragment off; the second part is what is shown in place of a query."""
    query = (_PARAMETER if scheme in _PATTERN_SCHEMES else _QUERY).search(text)
    before = text[: query.start()] if query else text
    return before if scheme in _PATTERN_SCHEMES else before.partition("#")[0], "?…" if query else ""


def _user_end(rest: str) -> int:
    """Where the host begins after a user and password; 0 where there are none.

    An `@` later than the host is a part of the path (`hf://org/name@revision`), unless what looks like the host is a
    user with a password that holds a slash.
    """
    host = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if "@" not in host and re.fullmatch(r"[^\[\]]*:\D.*", host):
        host = re.split(r"[?#]", rest, maxsplit=1)[0]
    return host.rfind("@") + 1


def _shown_in_text(match: re.Match[str]) -> str:
    address = match[0]
    end = _KEPT_IN_TEXT.search(address)
    assert end is not None  # it may be empty
    return shown_address(address[: end.start()]) + end[0]
