"""Names that a plugin may add to a key: the modules in `plugins`, and the registered classes that other keys name.

A key with built-in choices takes a registered name beside them. Its errors and its JSON schema stay those of the
choices, widened. The file as a whole checks that `plugins` names the module that has registered a name: every rank
reads the file in a process of its own.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Union, get_args

from pydantic import BeforeValidator, Field, Tag
from pydantic_core import PydanticCustomError

from trainshed.plugins import MODULE_PATTERN, NAME_PATTERN, load_plugins, names_are_checked, registered_names, registry
from trainshed.recipe.section import Problem, as_list, by_shape
from trainshed.recipe.yaml_io import KeyPath, YamlDocument

RegisteredName = Annotated[str, Field(pattern=NAME_PATTERN)]
ModuleName = Annotated[str, Field(pattern=MODULE_PATTERN)]
ModuleNames = Annotated[
    tuple[ModuleName, ...],
    Field(strict=False),
    BeforeValidator(as_list, json_schema_input_type=ModuleName | list[ModuleName]),
]
"""One module or a list of them."""


FlagArgument = Annotated[bool, Tag("(true or false)")]
NumberArgument = Annotated[int | float, Tag("(a number)")]
TextArgument = Annotated[str, Tag("(text)")]
EngineArgument = Annotated[
    FlagArgument
    | NumberArgument
    | TextArgument
    | Annotated[list[Annotated[FlagArgument | NumberArgument | TextArgument, by_shape]], Tag("(a list)")]
    | Annotated[None, Tag("(nothing)")],
    by_shape,
]
"""What an option of a registered class, or an argument of a foreign engine, can be."""


def choice_or_registered(kind: str, choices: Any) -> BeforeValidator:
    """Return what checks a key that takes one of `choices` (a Literal) or the name of a registered class."""
    built_in = get_args(choices)

    def check(value: Any) -> Any:
        if isinstance(value, str) and (value in built_in or is_registered(kind, value)):
            return value
        expected = " or ".join(f"'{name}'" for name in (*built_in, *registered_names(kind)))
        raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})

    return BeforeValidator(check, json_schema_input_type=Union[choices, RegisteredName])  # noqa: UP007


def is_registered(kind: str, name: str) -> bool:
    """Whether a plugin has registered a name; any name will do where recipes are only looked at."""
    if not names_are_checked():
        return re.fullmatch(NAME_PATTERN, name) is not None
    return name in registered_names(kind)


def registered_class(kind: str, name: str | None) -> Any:
    """Return what a plugin has registered under a name; None for a built-in name, or where none is known."""
    table = registry(kind)
    return table[name] if table is not None and name is not None and table.owner(name) is not None else None


def option_problems(
    kind: str, name: str, options: Mapping[str, Any], path: KeyPath, *, positional: int
) -> Iterator[Problem]:
    """Yield why a registered class does not take these options, after the `positional` arguments that we pass."""
    made = registered_class(kind, name)
    if made is None:
        return
    signature = inspect.signature(made)
    try:
        signature.bind(*[None] * positional, **options)
    except TypeError as error:
        own = [text for text, one in signature.parameters.items() if one.kind not in (one.VAR_KEYWORD,)][positional:]
        yield Problem(path, f"the {kind} {name} cannot be made so: {error}", f"it takes {', '.join(own) or 'none'}")


def name_problems(used: Iterable[tuple[KeyPath, str, str | None]], plugins: Sequence[str]) -> Iterator[Problem]:
    """Yield names, as (key, kind, name), that a plugin has registered which `plugins` does not name."""
    packages = {name.partition(".")[0] for name in plugins}
    for number, name in enumerate(plugins):
        if name in plugins[:number]:
            yield Problem(("plugins", number), f"`{name}` stands there twice", "keep one of them")
    for path, kind, name in used:
        table = registry(kind)
        owner = table.owner(name) if table is not None and name is not None else None
        if owner is not None and owner not in packages:
            yield Problem(
                path,
                f"`{name}` is the {kind} of a plugin, and `plugins` does not name `{owner}`: ranks would not know it",
                f"plugins: [{owner}]",
            )


def load_named_plugins(document: YamlDocument) -> None:
    """Load the plugins that a file names, before its other keys are checked; a wrong list is the schema's to refuse."""
    names = as_list(document.value.get("plugins")) if isinstance(document.value, dict) else None
    if not isinstance(names, list) or not names:
        return
    if all(isinstance(name, str) and re.fullmatch(MODULE_PATTERN, name) for name in names):
        places = document.places
        places.plugins = load_plugins(names, places.folder, lambda number: places.where(("plugins", number)))
