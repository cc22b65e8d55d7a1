"""The page that lists every command and flag, written from the application itself."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from cyclopts import App
from cyclopts.argument import Argument

from trainshed.cli import build_app

_HEADER = """<!-- Written by docs/write_reference.py; edit the docstrings in src/trainshed/cli. -->
# Every command and flag

`trainshed COMMAND --help` shows the same in a terminal. `-o json` makes a report for programs. Exit codes are 0 (done),
1 (the work failed), 2 (the input is wrong) and 130 (Ctrl-C). `--debug` adds the traceback to any error. A **RUN** is
its name (the newest of that name), `NAME/ID`, its folder or URL, or the recipe file it was started from. `key=value`
changes a key of the [recipe](recipe-reference.md), `cluster.key=value` one of the [cluster file](cluster-reference.md).
"""


def command_reference() -> str:
    """Return the page that lists every command with its flags."""
    commands = dict(_commands(build_app(), ("trainshed",)))
    rows = [f"| [`{name}`](#{name.replace(' ', '-')}) | {_summary(app)} |" for name, app in commands.items()]
    index = ["| command | does |", "|---|---|", *rows]
    sections = [_section(name, app) for name, app in commands.items()]
    return "\n".join([_HEADER, *index, "", *sections])


def _commands(app: App, path: tuple[str, ...]) -> Iterator[tuple[str, App]]:
    """Yield every command that does something and is shown, by its whole name."""
    for name in app:
        if name.startswith("-") or not app[name].show:
            continue
        command, words = app[name], (*path, name)
        if command.default_command is not None:
            yield " ".join(words), command
        yield from _commands(command, words)


def _summary(app: App) -> str:
    return _cell(app.help.split("\n\n")[0])


def _section(name: str, app: App) -> str:
    assert app.default_command is not None
    arguments = [argument for argument in app.assemble_argument_collection(parse_docstring=True) if argument.show]
    positional = [argument for argument in arguments if argument.index is not None]
    flags = [argument for argument in arguments if argument.index is None]
    words = [name, *map(_placeholder, positional), *map(_required_flag, flags), "[FLAGS]" if flags else ""]
    usage = " ".join(word for word in words if word)
    text = re.split(r"^Parameters\n-+$", inspect.cleandoc(app.default_command.__doc__ or ""), flags=re.MULTILINE)[0]
    parts = [f"## {name}", "", f"`{usage}`", "", text.strip(), ""]
    if arguments:
        parts += ["| argument | takes | default | meaning |", "|---|---|---|---|"]
        parts += [_row(argument) for argument in (*positional, *flags)]
        parts.append("")
    return "\n".join(parts)


def _placeholder(argument: Argument) -> str:
    word = argument.name.lstrip("-").upper()
    several = argument.field_info.kind is inspect.Parameter.VAR_POSITIONAL
    if several and word == "OVERRIDES":
        return "[KEY=VALUE …]"
    word = f"{word} …" if several else word
    return word if argument.field_info.required else f"[{word}]"


def _required_flag(argument: Argument) -> str:
    return f"{argument.name} {argument.name.lstrip('-').upper()}" if argument.field_info.required else ""


def _row(argument: Argument) -> str:
    if argument.index is not None:
        name = f"`{_placeholder(argument).strip('[]')}`"
    else:
        longest_first = sorted(argument.names, key=len, reverse=True)
        name = ", ".join(f"`{written}`" for written in longest_first if written not in argument.negatives)
    return f"| {name} | {_type(argument.hint)} | {_default(argument)} | {_cell(argument.parameter.help or '')} |"


def _type(hint: Any) -> str:
    names = [*dict.fromkeys(_type_names(hint))]
    return " \\| ".join(names)


def _type_names(hint: Any) -> Iterator[str]:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        for choice in get_args(hint):
            if choice is not NoneType:
                yield from _type_names(choice)
    elif origin is Annotated:
        yield from _type_names(get_args(hint)[0])
    elif origin is Literal:
        yield from (f"`{choice}`" for choice in get_args(hint))
    elif origin in (list, tuple):
        yield f"{_type(get_args(hint)[0])}, several"
    else:
        words = {int: "whole number", float: "number", str: "text", bool: "", Path: "path"}
        yield words[hint]


def _default(argument: Argument) -> str:
    if argument.field_info.required:
        return "**required**"
    default = argument.field_info.default
    if default in (None, False, (), inspect.Parameter.empty):
        return ""
    return f"`{'yes' if default is True else default}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
