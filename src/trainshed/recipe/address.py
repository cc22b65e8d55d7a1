"""Addresses as recipes write them: their form only; whether something is there is for the stores to say."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from trainshed.recipe.section import as_list, wrong
from trainshed.redaction import credentials_in

SCHEMES = ("s3", "gs", "az", "hf", "http", "https")
_MISTAKEN = {
    "gcs": "gs",
    "s3a": "s3",
    "s3n": "s3",
    "minio": "s3",
    "azure": "az",
    "abfs": "az",
    "abfss": "az",
    "wasb": "az",
    "wasbs": "az",
    "huggingface": "hf",
    "hub": "hf",
}
_FORMS = {
    "s3": "s3://bucket/path",
    "gs": "gs://bucket/path",
    "az": "az://account/container/path",
    "hf": "hf://org/name@revision or hf://datasets/org/name@revision/path",
    "http": "http://host/path",
    "https": "https://host/path",
}


def check_address(text: str) -> str:
    """Return the address, or raise for one that no store could read."""
    if not text.strip():
        raise wrong("an empty address", "write a path, or s3://, gs://, az:// or hf://…")
    found = re.match(r"^([A-Za-z][A-Za-z0-9+.-]*):(//)?", text)
    if not found or (not found[2] and found[1].lower() not in (*SCHEMES, *_MISTAKEN)):
        return text  # a plain path
    scheme, rest = found[1].lower(), text[found.end() :]
    if scheme == "file":
        raise wrong(f"`{text}`: files are written as plain paths", f"write {rest}")
    if scheme in _MISTAKEN:
        raise wrong(f"`{scheme}://` is not known here", f"write {_FORMS[_MISTAKEN[scheme]]}")
    if scheme not in SCHEMES:
        raise wrong(f"`{scheme}://` is not known", f"write one of {', '.join(s + '://' for s in SCHEMES)}, or a path")
    # Not shown in the message: what stands there is a secret, and a recipe is kept with every run.
    if (secret := credentials_in(text)) is not None:
        instead = "use the cluster file's `secrets`, or the environment"
        if scheme in ("http", "https"):
            instead += "; or run `trainshed data fetch 'https://…' FOLDER` first, and write that folder"
        raise wrong(f"credentials do not belong into an address: this one has {secret}", instead)
    steps = [step for step in rest.removeprefix("datasets/").split("/") if step]
    if not found[2] or len(steps) < {"hf": 2, "az": 2}.get(scheme, 1):
        raise wrong(f"`{text}` names no place to read", f"write {_FORMS[scheme]}")
    return text


Address = Annotated[str, AfterValidator(check_address)]
"""A path or a URL of a store."""


def _list_of_text(value: Any) -> Any:
    return as_list(value) if isinstance(value, str) else value


Addresses = Annotated[
    tuple[Address, ...],
    Field(strict=False, min_length=1),
    BeforeValidator(_list_of_text, json_schema_input_type=str | Annotated[list[str], Field(min_length=1)]),
]
"""One address or glob, or a list of them; always a tuple once loaded."""
