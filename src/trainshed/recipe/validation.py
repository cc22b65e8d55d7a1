"""Checks a parsed file against a schema, and says in sentences what is wrong, at which line, and what to write instead.

The first half knows which keys a schema has, and the nearest known one to a key that nobody reads; the second
half turns what pydantic found into one `RecipeError`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from trainshed.errors import RecipeError
from trainshed.plugins import MODULE_PATTERN
from trainshed.recipe import yaml_io
from trainshed.recipe.schema import MAX_NAME_LENGTH, NAME_PATTERN, RESERVED_KEYS, Recipe
from trainshed.recipe.section import (
    LINE_PATTERN,
    PATH_PATTERN,
    PROBLEMS_ERROR_TYPE,
    QUANTITY_PATTERN,
    TEXT_PATTERN,
    URL_PATTERN,
    VARIABLE_PATTERN,
    Problem,
)
from trainshed.recipe.serving import ADAPTER_NAME_PATTERN
from trainshed.recipe.yaml_io import KeyPath, SourceMap, YamlDocument, dotted_key

ELEMENT = "*"
"""Stands for any list index, or any name in a mapping of free names."""

# What the same thing is called elsewhere (Megatron-LM, NeMo, torchtune, Hugging Face; in cluster files of NeMo-Run and
# SkyPilot), so that a person who moves here is told the key at once.
FOREIGN_NAMES = {
    "batch_size": "train.global_batch",
    "global_batch_size": "train.global_batch",
    "micro_batch_size": "layout.micro_batch",
    "max_steps": "train.steps",
    "train_iters": "train.steps",
    "iterations": "train.steps",
    "learning_rate": "train.optimizer.lr",
    "clip_grad": "train.optimizer.clip",
    "grad_clip": "train.optimizer.clip",
    "max_grad_norm": "train.optimizer.clip",
    "warmup_steps": "train.schedule.warmup",
    "lr_scheduler": "train.schedule",
    "seq_length": "data.sequence_length",
    "seq_len": "data.sequence_length",
    "max_seq_len": "data.sequence_length",
    "dtype": "train.precision",
    "save_interval": "checkpoint.every",
    "eval_interval": "data.validation.every",
    "eval_iters": "data.validation.batches",
    "json_keys": "data.train.0.key",
    "rampup_batch_size": "train.batch_ramp",
    "tensor_model_parallel_size": "layout.tp",
    "tensor_parallel_dim": "layout.tp",
    "pipeline_model_parallel_size": "layout.pp",
    "context_parallel_size": "layout.cp",
    "expert_model_parallel_size": "layout.ep",
    "activation_checkpointing": "layout.recompute",
    "dataset": "data",
    "weights": "model.from",
    "trainer": "train",
    "parallelism": "layout",
    "env": "environment",
    "envs": "environment",
    "env_vars": "environment",
    "modules": "setup",
    "module": "setup",
    "prolog": "setup",
    "prologue": "setup",
    "setup_lines": "setup",
    "time": "limits.hours",
    "walltime": "limits.hours",
    "container_image": "image",
    "container_mounts": "volumes",
    "mounts": "volumes",
    "instance_type": "machine",
    "accelerators": "machine",
    "use_spot": "capacity.spot",
    "ssh": "slurm.login",
    "gres": "slurm.gpus",
    "backend": "target",
    "cloud": "target",
}


@dataclass(frozen=True)
class SchemaKey:
    """One key of a schema, with its field."""

    path: KeyPath
    field: FieldInfo
    sections: tuple[type[BaseModel], ...]


@cache
def known_keys(kind: type[BaseModel]) -> dict[KeyPath, SchemaKey]:
    """Return every key of a schema by path, list elements as `*`, in the order of the schema."""
    return {key.path: key for key in _walk(kind, ())}


def _walk(kind: type[BaseModel], path: KeyPath) -> Iterator[SchemaKey]:
    for name, field in kind.model_fields.items():
        here = (*path, field.alias or name)
        nested = list(_sections(field.annotation, ()))
        yield SchemaKey(here, field, tuple(section for _, section in nested))
        for steps, section in nested:
            yield from _walk(section, here + steps)


def _sections(annotation: Any, steps: KeyPath) -> Iterator[tuple[KeyPath, type[BaseModel]]]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _sections(get_args(annotation)[0], steps)
    elif origin in (Union, UnionType):
        for choice in get_args(annotation):
            yield from _sections(choice, steps)
    elif origin in (tuple, list):
        yield from _sections(get_args(annotation)[0], (*steps, ELEMENT))
    elif origin is dict:
        yield from _sections(get_args(annotation)[1], (*steps, ELEMENT))
    elif isinstance(annotation, type) and annotation is not NoneType and issubclass(annotation, BaseModel):
        yield steps, annotation


def find_key(kind: type[BaseModel], path: KeyPath) -> SchemaKey | None:
    """Return the key at a concrete path such as `("data", "train", 0, "path")`."""
    known = known_keys(kind)
    generic: KeyPath = ()
    for step in path:
        generic = next((option for option in ((*generic, step), (*generic, ELEMENT)) if _is_prefix(option, known)), ())
        if not generic:
            return None
    return known.get(generic)


def _is_prefix(path: KeyPath, known: dict[KeyPath, SchemaKey]) -> bool:
    return any(option[: len(path)] == path for option in known)


def sibling_keys(kind: type[BaseModel], parent: KeyPath) -> list[str]:
    """Return the keys that may stand below a concrete path."""
    keys: list[str] = []
    for path in known_keys(kind):
        if len(path) == len(parent) + 1 and all(
            ours in (theirs, ELEMENT) for ours, theirs in zip(path, parent, strict=False)
        ):
            keys.append(str(path[-1]))
    return keys


def nearest_key(kind: type[BaseModel], path: KeyPath) -> KeyPath | None:
    """Return the path of the known key that was probably meant."""
    name, parent = str(path[-1]), path[:-1]
    wanted = name.lower().replace("-", "_")
    here = sibling_keys(kind, parent)
    in_reach = [known for known in known_keys(kind) if ELEMENT not in known or known[: len(parent)] == parent]
    everywhere = sorted(in_reach, key=lambda known: ELEMENT in known)  # a key of a list is rarely the one that is meant
    # Two or three letters are near to many others: `train.tp` is `layout.tp`, not `train.mtp`.
    close = difflib.get_close_matches(wanted, here, n=1, cutoff=0.8 if len(wanted) > 3 else 0.9)
    if close:
        return (*parent, close[0])
    foreign = FOREIGN_NAMES.get(wanted)
    if foreign and find_key(kind, _key_path(foreign)):
        return _key_path(foreign)
    same = [known for known in everywhere if known[-1] == wanted]
    if same:
        return _first_elements(same[0])
    close = difflib.get_close_matches(wanted, here, n=1, cutoff=0.6)
    if close:
        return (*parent, close[0])
    elsewhere = {str(known[-1]): known for known in reversed(everywhere)}
    far = difflib.get_close_matches(wanted, elsewhere, n=1, cutoff=0.8)
    return _first_elements(elsewhere[far[0]]) if far else None


def _first_elements(path: KeyPath) -> KeyPath:
    return tuple(0 if step == ELEMENT else step for step in path)


def _key_path(dotted: str) -> KeyPath:
    return tuple(int(step) if step.isdigit() else step for step in dotted.split("."))


Kind = TypeVar("Kind", bound=BaseModel)

_WANTED_TYPES = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
_BOUNDS = {
    "greater_than": ("gt", "must be more than {}"),
    "greater_than_equal": ("ge", "must be at least {}"),
    "less_than": ("lt", "must be less than {}"),
    "less_than_equal": ("le", "must be at most {}"),
}
_PATTERNS = {
    NAME_PATTERN: (
        "`{}` cannot name objects on a cluster",
        "use lower-case letters, digits and dashes; begin with a letter",
    ),
    QUANTITY_PATTERN: ("`{}` is not a size", "write a number and its unit, for example 250Gi"),
    ADAPTER_NAME_PATTERN: ("`{}` is not a name of an adapter", "use letters, digits, dots, dashes and slashes"),
    VARIABLE_PATTERN: ("`{}` is not a name of a variable", "use letters, digits and underscores, for example HF_HOME"),
    PATH_PATTERN: ("`{}` is not an absolute path", "write for example /data, without a colon"),
    URL_PATTERN: ("`{}` is no URL", "write for example http://head:8265"),
    MODULE_PATTERN: ("`{}` is not the name of a module", "write it as Python imports it, without .py: my_plugin"),
    # The value stays out of these: it may be a secret in the wrong place.
    LINE_PATTERN: ("is not one line of text", "write each line as an element of the list"),
    TEXT_PATTERN: ("holds a NUL character, which no job can have", "take it out"),
}
"""What is wrong with a text by the pattern that it does not match, and what to write."""
# What people write for a choice in fewer letters, or by who sells it.
_CHOICE_ALIASES = {
    "k8s": "kubernetes",
    "kube": "kubernetes",
    "gke": "kubernetes",
    "eks": "kubernetes",
    "aks": "kubernetes",
    "sbatch": "slurm",
    "localhost": "local",
    "here": "local",
}


def validate(kind: type[Kind], document: YamlDocument) -> Kind:
    """Build a recipe or cluster file from a parsed document, or raise one error with all that is wrong."""
    try:
        return kind.model_validate(document.value)
    except ValidationError as error:
        problems = [
            problem for detail in error.errors() for problem in _problems_of(kind, dict(detail), document.value)
        ]
    raise recipe_error(_without_duplicates(problems), document.places)


def _without_duplicates(problems: list[Problem]) -> list[Problem]:
    """Say once what pydantic says twice: a misspelt key is also missing, a list of wrong elements also too short."""
    meant = {problem.hint for problem in problems}
    inner = {problem.path[:end] for problem in problems for end in range(len(problem.path))}
    return [
        problem
        for problem in problems
        if not (problem.what == "is missing" and _did_you_mean(problem.path) in meant)
        and not (problem.what.startswith("must have at least") and problem.path in inner)
    ]


def recipe_error(problems: list[Problem], places: SourceMap) -> RecipeError:
    """Make one error of one or more problems whose paths begin at the root."""
    if len(problems) == 1:
        only = problems[0]
        return RecipeError(only.what, where=places.where(only.path), hint=only.hint)
    lines = [f"  {places.where(problem.path)}: {_one_line(problem)}" for problem in problems]
    return RecipeError("\n".join([f"{len(problems)} problems", *lines]), where=places.source)


def _one_line(problem: Problem) -> str:
    return f"{problem.what}; {problem.hint}" if problem.hint else problem.what


def _problems_of(kind: type[BaseModel], error: dict[str, Any], root: Any) -> Iterator[Problem]:
    path = _written_path(error["loc"], root)
    if error["type"] == PROBLEMS_ERROR_TYPE:
        for problem in error["ctx"]["problems"]:
            yield Problem(_written_path((*error["loc"], *problem.path), root), problem.what, problem.hint)
    elif error["type"] == "extra_forbidden":
        yield _unknown_key(kind, path, _schema_path(error["loc"]))
    elif error["type"] == "missing":
        yield _missing(kind, path)
    else:
        what, hint = _value_message(error)
        yield Problem(path, what, hint)


def _written_path(loc: tuple[str | int, ...], root: Any) -> KeyPath:
    """Drop from pydantic's path what nobody wrote: shapes' names, the 0 of a list written as one value, `[key]`."""
    path: list[str | int] = []
    value = root
    for step in loc:
        if isinstance(step, str) and step.startswith("("):
            continue
        if isinstance(step, int) and not isinstance(value, list | tuple):
            continue
        if step == "[key]" and not (isinstance(value, dict) and step in value):
            continue  # the name before it is what is wrong
        path.append(step)
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int):
            value = value[step] if step < len(value) else None
        elif not isinstance(value, dict) and value is not None:
            path.pop()  # `engine: torhc` is complained about as engine.name
    return tuple(path)


def _did_you_mean(path: KeyPath) -> str:
    return f"did you mean {dotted_key(path)}?"


def _schema_path(loc: tuple[str | int, ...]) -> KeyPath:
    return tuple(step for step in loc if not (isinstance(step, str) and step.startswith("(")))


def _unknown_key(kind: type[BaseModel], path: KeyPath, schema_path: KeyPath) -> Problem:
    name = path[-1]
    if kind is Recipe and len(path) == 1 and name in RESERVED_KEYS:
        return Problem(path, f"`{name}` is reserved and not supported by this version of Trainshed", "delete it")
    near = nearest_key(kind, schema_path)
    if near:
        beside = near[:-1] == schema_path[:-1]
        meant = (*path[:-1], near[-1]) if beside else near
        return Problem(path, f"unknown key `{name}`", _did_you_mean(meant))
    here = sibling_keys(kind, schema_path[:-1])
    return Problem(path, f"unknown key `{name}`", f"known here: {', '.join(here)}" if here else "delete it")


def _missing(kind: type[BaseModel], path: KeyPath) -> Problem:
    key = find_key(kind, path)
    example = (key.field.examples or [None])[0] if key else None
    if example is None:
        return Problem(path, "is missing", key.field.description if key else None)
    return Problem(path, "is missing", f"write for example `{path[-1]}: {example}`")


def _value_message(error: dict[str, Any]) -> tuple[str, str | None]:
    kind, value, context = error["type"], error["input"], error.get("ctx") or {}
    if kind in _WANTED_TYPES:
        return _wrong_type(_WANTED_TYPES[kind], value)
    if kind in _BOUNDS:
        name, sentence = _BOUNDS[kind]
        return f"{sentence.format(_plain_value(context[name]))}, and is {shown_value(value)}", None
    if kind == "literal_error":
        return _wrong_choice(re.findall(r"'([^']*)'", context["expected"]), value)
    if kind == "union_tag_invalid":
        return _wrong_type(" or ".join(re.findall(r"\(([^)]*)\)", context["expected_tags"])), value)
    if kind == "finite_number":
        return f"must be a finite number, and is {shown_value(value)}", None
    if kind == "string_pattern_mismatch":
        return _wrong_pattern(context["pattern"], value)
    if kind == "string_too_long":
        return (
            f"is longer than {MAX_NAME_LENGTH} characters",
            "names of objects on a cluster have 63, id and suffix included",
        )
    if kind == "string_too_short":
        return "is empty", "write a value or delete the line"
    if kind in ("too_short", "too_long"):
        return _wrong_length(kind, context)
    return error["msg"], None


def _wrong_pattern(pattern: str, value: str) -> tuple[str, str | None]:
    what, hint = _PATTERNS.get(pattern, ("`{}` is not written as this key wants it", f"it must match {pattern}"))
    return what.format(value), hint


def _wrong_length(kind: str, context: dict[str, Any]) -> tuple[str, str | None]:
    wanted = context["min_length"] if kind == "too_short" else context["max_length"]
    side = "at least" if kind == "too_short" else "at most"
    return (
        f"must have {side} {wanted} element{'s' if wanted != 1 else ''}, and has {context['actual_length']}",
        None,
    )


def _wrong_choice(choices: list[str], value: Any) -> tuple[str, str | None]:
    written = _CHOICE_ALIASES.get(str(value).lower(), str(value).lower())
    near = difflib.get_close_matches(written, choices, n=1, cutoff=0.6)
    if len(choices) == 1:
        return f"{shown_value(value)} is not known", f"this version knows {choices[0]}"
    what = f"{shown_value(value)} is not one of {', '.join(choices)}"
    if isinstance(value, bool) or value is None:
        return what, None
    return what, f"did you mean {near[0]}?" if near else None


def _wrong_type(wanted: str, value: Any) -> tuple[str, str | None]:
    what = f"expected {wanted}, got {shown_value(value)}"
    if value is None:
        return what, "write a value or delete the line"
    if isinstance(value, str):
        return what, _text_hint(wanted, value)
    if isinstance(value, float) and "whole" in wanted:
        # Shown with its point: `1e3` is a decimal number, and 1000 would look like what is wanted.
        return f"expected {wanted}, got {value!r}", f"write {int(value)}" if value.is_integer() else None
    if "text" in wanted and isinstance(value, bool | int | float):
        return what, f'write it in quotes: "{_plain_value(value)}"'
    return what, None


def _text_hint(wanted: str, text: str) -> str | None:
    if "true or false" in wanted:
        return "write true or false" if yaml_io.YAML11_BOOL_PATTERN.match(text) else None
    if "number" not in wanted:
        return None
    if yaml_io.LEADING_ZERO_PATTERN.match(text):
        return f"a leading zero: write {int(text.replace('_', ''))}"
    if re.match(r"^[0-9]+(:[0-5]?[0-9])+$", text):
        return "a time of day is not a number here"
    meant = yaml_io.parse_scalar(text)
    if isinstance(meant, int | float) and not isinstance(meant, bool):
        return f"write it without quotes: {text}"
    return "write the number out" if re.match(r"^[0-9.]+\s*[kKmMbBgGtT]$", text) else None


def shown_value(value: Any) -> str:
    """Show a value in a sentence, shortened where it is long."""
    if isinstance(value, str):
        return f"`{value if len(value) <= 60 else value[:59] + '…'}`"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    return "nothing" if value is None else _plain_value(value)


def _plain_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
