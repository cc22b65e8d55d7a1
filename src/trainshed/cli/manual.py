"""`trainshed man`: the manual page of all commands, made from the commands themselves."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from cyclopts import App

_FILES = (
    ("./store", "Where runs and artefacts of this machine are kept; `cluster.store=PATH` names another place."),
    ("./clusters, ~/.config/trainshed/clusters", "Cluster files that `--on NAME` finds."),
)
_EXIT_CODES = (("0", "done"), ("1", "the work failed"), ("2", "the input is wrong"), ("130", "interrupted"))


def man() -> None:
    """Print the manual page in the format of man(1): `trainshed man | man -l -`."""
    import sys

    from trainshed.cli import build_app

    sys.stdout.write(manual_page(build_app()))


def manual_page(app: App) -> str:
    """Return the manual page of the whole application."""
    from trainshed.cli.examples import EXAMPLES

    lines = [
        # No date and no version: the page changes only with the commands.
        '.TH TRAINSHED 1 "" "Trainshed" "Trainshed manual"',
        ".SH NAME",
        _text("trainshed - one recipe carries a language model from raw text to a served model"),
        ".SH SYNOPSIS",
        r".B trainshed",
        r"\fICOMMAND\fR [\fIARGUMENTS\fR] [\fIOPTIONS\fR]",
        ".SH DESCRIPTION",
        _text(
            "A recipe says what to train, a cluster file where. Any key of either can be changed on the command line: "
            "train.steps=100, cluster.nodes.default=4. Commands that report take -o json. --debug prints the traceback "
            "of an error."
        ),
        ".SH COMMANDS",
    ]
    for words, command in _walk(app, ()):
        lines += _command_lines(words, command, EXAMPLES.get(" ".join(words), ()))
    lines.append(".SH FILES")
    for file, meaning in _FILES:
        lines += [".TP", rf".I {_text(file)}", _text(meaning)]
    lines.append(".SH EXIT STATUS")
    for code, meaning in _EXIT_CODES:
        lines += [".TP", rf".B {code}", _text(meaning)]
    return "\n".join(lines) + "\n"


def _walk(app: App, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], App]]:
    """Yield every command that help shows, with the words that call it."""
    for name in app:
        command = app[name]
        if name.startswith("-") or not command.show:
            continue
        if command.default_command is not None:
            yield (*words, name), command
        yield from _walk(command, (*words, name))


def _command_lines(words: tuple[str, ...], command: App, examples: tuple[str, ...]) -> Iterator[str]:
    function = command.default_command
    assert function is not None, "the walk yields only what can be called"
    arguments = [
        argument
        for argument in command.assemble_argument_collection(parse_docstring=True)
        if argument.show and argument.parameter.help
    ]
    positional = [argument for argument in arguments if argument.index is not None]
    shown = " ".join(rf"\fI{_text(_word(argument.names))}\fR" for argument in positional)
    yield f".SS trainshed {_text(' '.join(words))} {shown}".rstrip()
    description = inspect.cleandoc(function.__doc__ or "").partition("\nParameters\n")[0]
    yield _text(" ".join(description.split("\n\n")[0].split()))
    for paragraph in description.split("\n\n")[1:]:
        if paragraph.strip():
            yield ".PP"
            yield _text(" ".join(paragraph.split()))
    for argument in arguments:
        flags = [name for name in argument.names if name.startswith("-") and not name.startswith("--no-")]
        is_word = argument in positional
        yield ".TP"
        yield rf"\fI{_text(_word(argument.names))}\fR" if is_word else rf"\fB{_text(', '.join(flags))}\fR"
        yield _text(" ".join(str(argument.parameter.help).split()))
    if examples:
        yield ".PP"
        yield "Examples:"
        for example in examples:
            yield ".RS"
            yield _text(f"$ {example}")
            yield ".RE"


def _word(names: tuple[str, ...]) -> str:
    """Return what stands for a positional argument."""
    return next((name for name in names if not name.startswith("-")), names[0].lstrip("-")).upper().replace("-", "_")


def _text(text: str) -> str:
    """Return a text that roff takes as it is."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    escaped = "".join(letter if letter.isascii() else rf"\[u{ord(letter):04X}]" for letter in escaped)
    return rf"\&{escaped}" if escaped.startswith((".", "'")) else escaped
