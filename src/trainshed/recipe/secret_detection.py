"""Whether a value that somebody wrote is a secret: by the name it has, or by its shape. The value is never repeated.

What is written into a cluster file or a recipe is kept with every run, and written into scripts and manifests that
others may read. Few ordinary values are taken for secrets: paths, numbers,
hashes with a name and NCCL's variables pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from trainshed.recipe.yaml_io import KeyPath

# Names by which programs read secrets. What ends in FILE, PATH or DIR says where one lies.
_SECRET_NAME = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CONNECTION_STRING|(^|_)(TOKEN|API_?KEY|CREDENTIALS?|PAT|SAS)(_|$)|_KEY(_ID)?$"
)
# Options are of all kinds of programs: `--eod-token` and `--text-key` are not secrets.
_SECRET_OPTION = re.compile(r"SECRET|PASSWORD|PASSWD|PASSPHRASE|API_?KEY|ACCESS_?(KEY|TOKEN)|^TOKEN$|HF_TOKEN")
_PLACE_NAME = re.compile(r"_(FILE|PATH|DIR|FOLDER|HOME|URL|NAME)$")
_HASH_NAME = re.compile(r"SHA|HASH|DIGEST|COMMIT|REVISION|VERSION|UUID")
# Values that are not secrets whatever the name: nothing, a switch, a number, a path, a reference of the shell.
_PLAIN_VALUE = re.compile(r"|true|false|yes|no|on|off|none|auto|[-+.0-9]{1,12}|[/.~$][^\s]*|\$\(.*\)", re.IGNORECASE)

_SHAPES = {
    r"\bhf_[A-Za-z0-9]{16,}": "a token of Hugging Face",
    r"\b(AKIA|ASIA)[0-9A-Z]{16}\b": "an access key of AWS",
    r"\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_[A-Za-z0-9_]{20,}": "a token of GitHub",
    r"\bglpat-[A-Za-z0-9_-]{16,}": "a token of GitLab",
    r"\bsk-[A-Za-z0-9_-]{20,}": "an API key",
    r"\bnvapi-[A-Za-z0-9_-]{20,}": "an API key of NVIDIA",
    r"\bAIza[A-Za-z0-9_-]{30,}": "an API key of Google",
    r"\bxox[abprs]-[A-Za-z0-9-]{10,}": "a token of Slack",
    r"\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+": "a signed token (JWT)",
    r"-----BEGIN [A-Z ]*PRIVATE KEY": "a private key",
    r"[A-Za-z][A-Za-z0-9+.-]*://[^/\s:@]+:[^/\s@]+@": "an address with a password",
    r"[?&](X-Amz-Signature|X-Goog-Signature|sig)=": "a signed address",
    r"\bAccountKey=": "a connection string with its key",
    r"https?://(hooks\.slack\.com|[\w.-]*discord(app)?\.com/api/webhooks|[\w.-]*\.webhook\.office\.com|"
    r"chat\.googleapis\.com)/\S": "an address where everybody who knows it may post",
}
_SHAPE_PATTERNS = [(re.compile(pattern), what) for pattern, what in _SHAPES.items()]
_NOT_SECRET = re.compile(
    r"sha256:[0-9a-f]{64}|\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b"
)
"""Digests of images, and UUIDs (of GPUs, of clients)."""
_LONG_WORD = re.compile(r"(?<![A-Za-z0-9+/=_.$~-])[A-Za-z0-9+=_-][A-Za-z0-9+/=_-]{31,}")
_MIN_CHANGE_SHARE = 0.4
"""Of the neighbours in random text some half are of different kinds (large, small, digit); in words and paths few."""


def secret_shape(value: str) -> str | None:
    """Say which kind of secret a value is by its shape; None where it is not known to be one."""
    return next((what for pattern, what in _SHAPE_PATTERNS if pattern.search(value)), None)


def secret_texts(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield every text of plain values that is a secret by its shape: at which key, and what it is."""
    if isinstance(value, str):
        if (what := secret_shape(value)) is not None:
            yield path, what
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from secret_texts(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from secret_texts(inner, (*path, number))


def secret_arguments(arguments: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield which of a program's arguments are secrets by the option they follow: `--token VALUE`, `--token=VALUE`."""
    option = ""
    for number, argument in enumerate(arguments):
        name, joined, value = argument.partition("=")
        if argument.startswith("-") and not joined:
            option = argument
            continue
        name, value = (name, value) if joined and argument.startswith("-") else (option, argument)
        option = ""
        name = name.lstrip("-").replace("-", "_").upper()
        if _SECRET_OPTION.search(name) and not _PLACE_NAME.search(name) and not _PLAIN_VALUE.fullmatch(value):
            yield number, "a secret by its name"


def find_secret(name: str, value: str) -> str | None:
    """Say which kind of secret a variable holds, by its name or its shape; None where it holds no secret."""
    shape = secret_shape(value)
    if shape is not None:
        return shape
    wanted = name.upper()
    if _SECRET_NAME.search(wanted) and not _PLACE_NAME.search(wanted) and not _PLAIN_VALUE.fullmatch(value):
        return "a secret by its name"
    if not _HASH_NAME.search(wanted) and _looks_random(value):
        return "what looks like a key: long, and random"
    return None


def _looks_random(value: str) -> bool:
    return any(_is_random(word) for word in _LONG_WORD.findall(_NOT_SECRET.sub("", value)))


def _is_random(text: str) -> bool:
    if re.fullmatch(r"[0-9a-f]+", text):
        return not text.isdigit()
    kinds = [_character_class(letter) for letter in text]
    changes = sum(left != right for left, right in pairwise(kinds))
    # Of words that dashes or slashes join (a list of devices, a path) the letters between them are of one kind.
    return {"small", "digit"} <= set(kinds) and changes / (len(text) - 1) >= _MIN_CHANGE_SHARE


def _character_class(letter: str) -> str:
    if letter.isdigit():
        return "digit"
    if letter.isalpha():
        return "large" if letter.isupper() else "small"
    return "other"
