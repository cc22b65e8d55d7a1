"""What every part of a recipe or cluster file is built from: strict, closed, and checked as a whole.

A `Section` yields its cross-key checks from `problems()`, beside the keys they are about. They run whenever
the section is built, all of them, and `validation` turns them into one error with file and line. The types of
single values are here too: numbers with bounds, counts such as `20B`, durations such as `20m`, sizes such as `250Gi`,
and addresses, of which only the form is checked (whether something is there is for the stores to say).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, model_validator
from pydantic_core import PydanticCustomError

from trainshed.recipe.yaml_io import KeyPath
from trainshed.redaction import credentials_in

PROBLEMS_ERROR_TYPE = "recipe_problems"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: at which key (relative to the section), what, and what to write instead."""

    path: KeyPath
    what: str
    hint: str | None = None


def problems_error(problems: list[Problem]) -> PydanticCustomError:
    """Wrap problems so that pydantic carries them, with the section's own path."""
    text = "; ".join(problem.what for problem in problems)
    return PydanticCustomError(PROBLEMS_ERROR_TYPE, "{text}", {"text": text, "problems": problems})


def invalid_value(what: str, hint: str | None = None) -> PydanticCustomError:
    """Return the error of a single value."""
    return problems_error([Problem((), what, hint)])


class Section(BaseModel):
    """A mapping of a recipe or cluster file."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, use_attribute_docstrings=False, allow_inf_nan=False
    )

    def problems(self) -> Iterator[Problem]:
        """Yield what is wrong although each key by itself is right."""
        return iter(())

    def derived_values(self) -> dict[str, Any]:
        """Return the values that keys without a fixed default would get from the others if left out."""
        return {}

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        problems = list(self.problems())
        if problems:
            raise problems_error(problems)
        return self


def shape_of(value: Any) -> str:
    """Name the shape of a value; keys that take several shapes choose by it.

    The names are in parentheses so that they cannot be mistaken for a key in an error's path.
    """
    if isinstance(value, dict | BaseModel):
        return "(a mapping)"
    if isinstance(value, list | tuple):
        return "(a list)"
    if isinstance(value, bool):
        return "(true or false)"
    if isinstance(value, int | float):
        return "(a number)"
    return "(text)" if isinstance(value, str) else "(nothing)"


by_shape = Discriminator(shape_of)

PositiveInt = Annotated[int, Field(ge=1)]
NotNegativeInt = Annotated[int, Field(ge=0)]
Port = Annotated[int, Field(ge=1, le=65535)]
PositiveFloat = Annotated[float, Field(gt=0)]
NotNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?$"
VARIABLE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
PATH_PATTERN = r"^/[^\x00-\x1f\x7f:]*$"
URL_PATTERN = r"^https?://[^\s]+$"
LINE_PATTERN = r"^[^\x00-\x08\x0a-\x1f\x7f]*[^\x00-\x20\x7f][^\x00-\x08\x0a-\x1f\x7f]*$"
TEXT_PATTERN = r"^[^\x00]*$"
Quantity = Annotated[str, Field(pattern=QUANTITY_PATTERN)]
_QUANTITY_UNITS = {"": 1} | {
    unit: base**power
    for base, units in ((1024, ("Ki", "Mi", "Gi", "Ti", "Pi")), (1000, ("k", "M", "G", "T", "P")))
    for power, unit in enumerate(units, start=1)
}


def quantity_bytes(text: str) -> float:
    """Return a size as Kubernetes writes it, `250Gi`, in bytes."""
    number = text.rstrip("KMGTPki")
    return float(number) * _QUANTITY_UNITS[text[len(number) :]]


_COUNT_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


def parse_count(value: Any) -> Any:
    """Read `20B`, `1.5T`, `20e9` or a plain number as a whole number."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str):
        return value
    number, factor = value.strip(), 1
    if number and number[-1].lower() in _COUNT_SUFFIXES:
        number, factor = number[:-1].rstrip(), _COUNT_SUFFIXES[number[-1].lower()]
    try:
        amount = Decimal(number) * factor
    except InvalidOperation:
        raise invalid_value(
            f"`{value}` is not a count", "write a whole number, or one with k, M, B or T: 20B"
        ) from None
    if not amount.is_finite() or amount != amount.to_integral_value():
        raise invalid_value(f"`{value}` is not a whole number", "write for example 1500M instead of 1.5B, or round it")
    if abs(amount) >= 2**63:  # before `int`, which would write out each of its digits
        raise invalid_value(f"`{value}` is more than the 64 bits that a number has", "write for example 20B")
    return int(amount)


Count = Annotated[
    int,
    Field(ge=1),
    BeforeValidator(
        parse_count,
        json_schema_input_type=Annotated[int, Field(ge=1)]
        | Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?[kKmMbBgGtT]$")],
    ),
]
"""A whole number that may be written with a suffix: `20B`."""

_DURATION_SUFFIXES = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION_PATTERN = r"^([0-9]+(\.[0-9]+)?[smhd])+$"
_LONGEST_DURATION_DAYS = 30


def parse_duration(value: Any) -> Any:
    """Read `90s`, `20m`, `1h30m`, `2d` or a plain number as seconds."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return value
    if not isinstance(value, str):
        seconds = float(value)
    elif re.match(_DURATION_PATTERN, value.strip()):
        parts = re.findall(r"([0-9.]+)([smhd])", value)
        seconds = sum(float(number) * _DURATION_SUFFIXES[suffix] for number, suffix in parts)
    else:
        raise invalid_value(f"`{value}` is not a duration", "write seconds, or a number with s, m, h or d: 20m")
    if not 0 < seconds <= _LONGEST_DURATION_DAYS * _DURATION_SUFFIXES["d"]:
        raise invalid_value(
            f"`{value}` is not a duration of more than 0 seconds and at most {_LONGEST_DURATION_DAYS} days",
            "write for example 20m",
        )
    return seconds


def format_short_duration(seconds: float) -> str:
    """Write seconds as a recipe does: `20m`, `1h30m`, `2.5s`."""
    whole, text = int(seconds), ""
    if seconds != whole or whole == 0:
        return f"{seconds:g}s"
    for suffix, length in reversed(_DURATION_SUFFIXES.items()):
        count, whole = divmod(whole, length)
        text += f"{count}{suffix}" if count else ""
    return text


Duration = Annotated[
    float,
    Field(gt=0),
    BeforeValidator(
        parse_duration,
        json_schema_input_type=Annotated[float, Field(gt=0)] | Annotated[str, Field(pattern=_DURATION_PATTERN)],
    ),
]
"""Seconds, or a number with a suffix: `20m`."""


def as_list(value: Any) -> Any:
    """Let one value stand for a list of one."""
    return [value] if isinstance(value, str | dict | BaseModel) else value


ADDRESS_SCHEMES = ("s3", "gs", "az", "hf", "http", "https")
_MISTAKEN_SCHEMES = {
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
_ADDRESS_FORMS = {
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
        raise invalid_value("an empty address", "write a path, or s3://, gs://, az:// or hf://…")
    matched = re.match(r"^([A-Za-z][A-Za-z0-9+.-]*):(//)?", text)
    if not matched or (not matched[2] and matched[1].lower() not in (*ADDRESS_SCHEMES, *_MISTAKEN_SCHEMES)):
        return text  # a plain path
    scheme, rest = matched[1].lower(), text[matched.end() :]
    if scheme == "file":
        raise invalid_value(f"`{text}`: files are written as plain paths", f"write {rest}")
    if scheme in _MISTAKEN_SCHEMES:
        raise invalid_value(f"`{scheme}://` is not known here", f"write {_ADDRESS_FORMS[_MISTAKEN_SCHEMES[scheme]]}")
    if scheme not in ADDRESS_SCHEMES:
        raise invalid_value(
            f"`{scheme}://` is not known", f"write one of {', '.join(s + '://' for s in ADDRESS_SCHEMES)}, or a path"
        )
    # Not shown in the message: what stands there is a secret, and a recipe is kept with every run.
    if (secret := credentials_in(text)) is not None:
        instead = "use the cluster file's `secrets`, or the environment"
        if scheme in ("http", "https"):
            instead += "; or run `trainshed data fetch 'https://…' FOLDER` first, and write that folder"
        raise invalid_value(f"credentials do not belong into an address: this one has {secret}", instead)
    steps = [step for step in rest.removeprefix("datasets/").split("/") if step]
    if not matched[2] or len(steps) < {"hf": 2, "az": 2}.get(scheme, 1):
        raise invalid_value(f"`{text}` names no place to read", f"write {_ADDRESS_FORMS[scheme]}")
    return text


StoreAddress = Annotated[str, AfterValidator(check_address)]
"""A path or a URL of a store."""


def _text_as_list(value: Any) -> Any:
    return as_list(value) if isinstance(value, str) else value


StoreAddresses = Annotated[
    tuple[StoreAddress, ...],
    Field(strict=False, min_length=1),
    BeforeValidator(_text_as_list, json_schema_input_type=str | Annotated[list[str], Field(min_length=1)]),
]
"""One address or glob, or a list of them; always a tuple once loaded."""
