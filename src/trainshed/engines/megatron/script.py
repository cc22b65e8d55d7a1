"""The Megatron arguments in a file: a shell script, a bare argument list, or a YAML or JSON list of words.

A shell script is read as the commands it would run, and nothing is ever executed. It knows enough of bash for launch
scripts: assignments, `ARGS=(…)`, `ARGS+=(…)`, "$VAR", ${VAR:-default}, "${ARGS[@]}", line continuations and comments.
Conditions are not decided: every branch is read. What only a running shell knows ($1, $(hostname)) is left as it is
written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import yaml

from trainshed.errors import InputError

_LAUNCHER_OPTIONS = ("--nnodes", "--nproc-per-node", "--num-nodes", "--gpus-per-node")


@dataclass(frozen=True)
class ScriptArguments:
    """The arguments of one training, and what else the file says."""

    words: tuple[str, ...]
    nodes: int | None = None
    gpus_per_node: int | None = None
    sizes: tuple[str, ...] = ()
    """What the file calls the model's size: `375m`."""
    conditions: bool = False
    prepares_without_eod: bool = False
    """It tokenises too, without --append-eod."""


def find_arguments(text: str, name: str) -> ScriptArguments:
    """Find the arguments in a file's text."""
    listed = _read_list(text)
    script = ShellScript([listed]) if listed is not None else read_script(text)
    words, before = _training_arguments(script)
    if not any(word.startswith("--") for word in words):
        raise InputError(
            "there is no argument of Megatron-LM in it",
            where=name,
            hint="give an argument list, a script that starts pretrain_gpt.py, or a YAML list of arguments",
        )
    launcher = dict(_launcher_options([*before, *words]))
    return ScriptArguments(
        words=tuple(_without_launcher(words)),
        nodes=launcher.get("--nnodes") or launcher.get("--num-nodes"),
        gpus_per_node=launcher.get("--nproc-per-node") or launcher.get("--gpus-per-node"),
        sizes=tuple(dict.fromkeys(_sizes(name, script))),
        conditions=script.conditions,
        prepares_without_eod=any(
            any(PurePath(word).name.startswith("preprocess_data") for word in command) and "--append-eod" not in command
            for command in script.commands
        ),
    )


def _read_list(text: str) -> list[str] | None:
    """Return the words of a YAML or JSON list, or mapping of options; None where the text is neither."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError:
        return None
    if isinstance(document, dict) and len(document) == 1 and isinstance(next(iter(document.values())), list | dict):
        document = next(iter(document.values()))
    if isinstance(document, list):
        return [word for value in document for word in _words_of_value(value)]
    if isinstance(document, dict) and all(str(key).startswith("--") for key in document):
        return [word for key, value in document.items() for word in (str(key), *_words_of_value(value))]
    return None


def _words_of_value(value: Any) -> list[str]:
    if value is None or value is True:
        return []
    if isinstance(value, list):
        return [str(item) for item in value]
    # `- --lr 1e-4` is one element and two words.
    return value.split() if isinstance(value, str) and value.startswith("--") else [str(value)]


def _training_arguments(script: ShellScript) -> tuple[list[str], list[str]]:
    """Return the arguments of the program, and the words before it: those of torchrun."""
    for command in script.commands:
        for position, word in enumerate(command):
            if PurePath(word).name in ("pretrain_gpt.py", "ray_entrypoint.py"):
                return command[position + 1 :], command[:position]
    for command in script.commands:
        if command[0].startswith("--"):
            return [word for words in script.commands if words[0].startswith("--") for word in words], []
    # A file that only sets variables, to be read by another.
    strings = [value.split() for value in script.variables.values() if value.lstrip().startswith("--")]
    return [word for words in (*strings, *script.arrays.values()) for word in words], []


def _launcher_options(words: list[str]) -> Iterator[tuple[str, int]]:
    for place, word in enumerate(words):
        option, sign, value = word.replace("_", "-").partition("=")
        if option in _LAUNCHER_OPTIONS:
            number = value if sign else (words[place + 1] if place + 1 < len(words) else "")
            if number.isdigit():
                yield option, int(number)


def _without_launcher(words: list[str]) -> Iterator[str]:
    """Drop what is the launcher's own, and redirections that came along."""
    skip = False
    for word in words:
        option, sign, _ = word.replace("_", "-").partition("=")
        if option in _LAUNCHER_OPTIONS:
            skip = not sign
        elif skip:
            skip = False
        else:
            yield word


def _sizes(name: str, script: ShellScript) -> Iterator[str]:
    yield from re.findall(r"(?<![\w.])(\d+(?:\.\d+)?[mMbB])(?![A-Za-z0-9])", PurePath(name).stem.replace("_", "-"))
    for variable, value in script.variables.items():
        if "SIZE" in variable.upper() and re.fullmatch(r"\d+(?:\.\d+)?[mMbB]", value):
            yield value


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_EXPANSION = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[@*]\])?(?::?-(.*))?", re.DOTALL)
# A word is cut here unless it is quoted; `(` and `)` are words of their own.
_WORD_ENDS = " \t\n;&|<>()"
_KEYWORDS = {"if", "then", "else", "elif", "fi", "for", "while", "do", "done", "case", "esac"}
_BEFORE_COMMANDS = _KEYWORDS | {"export", "local", "readonly", "declare", "!", "{", "}", "exec", "time"}


@dataclass
class ShellScript:
    """What a script says."""

    commands: list[list[str]] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    conditions: bool = False
    """Whether it has branches, which are all read."""


def read_script(text: str) -> ShellScript:
    """Read a script, or a bare list of arguments, which is one command."""
    return _ShellReader(text.replace("\r\n", "\n")).read()


class _ShellReader:
    """One pass over the text; `at` is where it stands."""

    def __init__(self, text: str, script: ShellScript | None = None) -> None:
        self.text, self.at = text, 0
        self.script = script or ShellScript()
        self._whole = False  # whether what was just expanded is quoted inside, and no blank cuts it

    def read(self) -> ShellScript:
        command: list[str] = []
        while self._skip_blanks(command):
            if not command and (assignment := _ASSIGNMENT.match(self.text, self.at)):
                self.at = assignment.end()
                self._assign(assignment.group(1), more=bool(assignment.group(2)))
                continue
            start = self.at
            words = self._word()
            if self.at == start:  # a sign that no word begins with: `(`, `)`, `<`, `>`
                self.at += 1
                continue
            if not command and words and words[0] in _BEFORE_COMMANDS:
                self.script.conditions |= words[0] in ("if", "case")
                continue
            command.extend(words)
        self._end(command)
        return self.script

    def _skip_blanks(self, command: list[str]) -> bool:
        """Go to the next word; a line's end or a separator ends the command. False at the end of the text."""
        while self.at < len(self.text):
            sign = self.text[self.at]
            if self._skip_continuation():
                continue
            if sign in "\n;&|":
                self._end(command)
            elif sign == "#" and (self.at == 0 or self.text[self.at - 1] in " \t\n;"):
                self.at = self._find("\n", self.at)
                continue
            elif sign not in " \t\r":
                return True
            self.at += 1
        return False

    def _end(self, command: list[str]) -> None:
        if command:
            self.script.commands.append(list(command))
            command.clear()

    def _assign(self, name: str, *, more: bool) -> None:
        if self.text[self.at : self.at + 1] == "(":
            self.at += 1
            words = self._array()
            self.script.arrays[name] = [*self.script.arrays.get(name, []), *words] if more else words
            return
        value = " ".join(self._word(split=False)) if self.at < len(self.text) else ""
        self.script.variables[name] = self.script.variables.get(name, "") + value if more else value

    def _array(self) -> list[str]:
        words: list[str] = []
        while self.at < len(self.text):
            sign = self.text[self.at]
            if sign == ")":
                self.at += 1
                break
            if self._skip_continuation():
                continue
            if sign == "#" and self.text[self.at - 1] in " \t\n(":
                self.at = self._find("\n", self.at)
            elif sign in _WORD_ENDS or sign == "\r":
                self.at += 1
            else:
                words.extend(self._word())
        return words

    def _word(self, *, split: bool = True) -> list[str]:
        """Read one word; an array or an unquoted variable in it may make several of it."""
        words, quoted = [""], False
        while self.at < len(self.text) and (sign := self.text[self.at]) not in _WORD_ENDS:
            if sign == "'":
                end = self._find("'", self.at + 1)
                words[-1] += self.text[self.at + 1 : end]
                self.at, quoted = end + 1, True
            elif sign == '"':
                quoted = True
                self._double_quoted(words)
            elif self._skip_continuation():
                continue
            elif sign == "\\":
                words[-1] += self.text[self.at + 1 : self.at + 2]
                self.at += 2
            elif sign == "$":
                values = self._expansion()
                if split and not self._whole:
                    values = [part for value in values for part in value.split()]
                _join_words(words, values)
            else:
                words[-1] += sign
                self.at += 1
        return [word for word in words if word or quoted]

    def unquoted(self) -> str:
        """Read the whole text as one word, blanks and all."""
        parts = []
        while self.at < len(self.text):
            if self.text[self.at] in _WORD_ENDS:
                parts.append(self.text[self.at])
                self.at += 1
            else:
                parts.extend(self._word(split=False))
        return "".join(parts)

    def _double_quoted(self, words: list[str]) -> None:
        self.at += 1
        while self.at < len(self.text) and (sign := self.text[self.at]) != '"':
            if self._skip_continuation():
                continue
            if sign == "\\" and self.text[self.at + 1 : self.at + 2] in ('"', "\\", "$", "`"):
                words[-1] += self.text[self.at + 1]
                self.at += 2
            elif sign == "$":
                _join_words(words, self._expansion())
            else:
                words[-1] += sign
                self.at += 1
        self.at += 1

    def _expansion(self) -> list[str]:
        """Read what follows a dollar sign; what is not known stays as written."""
        start, self._whole = self.at, False
        if self.text.startswith("$(", start):
            self.at = self._closing("(", ")", start + 1)
            return [self.text[start : self.at]]
        if self.text.startswith("${", start):
            self.at = self._closing("{", "}", start + 1)
            return self._value(self.text[start + 2 : self.at - 1], self.text[start : self.at])
        name = _NAME.match(self.text, start + 1)
        if name is None:
            self.at = min(start + 2, len(self.text))
            return [self.text[start : self.at]]
        self.at = name.end()
        return self._value(name.group(), name.group())

    def _value(self, inside: str, written: str) -> list[str]:
        expansion = _EXPANSION.fullmatch(inside)
        if expansion is None:
            return [written]
        name, whole, default = expansion.groups()
        if name in self.script.arrays:
            return self.script.arrays[name] if whole else self.script.arrays[name][:1]
        if self.script.variables.get(name):
            return [self.script.variables[name]]
        if default is not None:
            self._whole = default[:1] in ("'", '"')
            return [_ShellReader(default, self.script).unquoted()]
        return [""] if name in self.script.variables else [written if written.startswith("$") else f"${written}"]

    def _skip_continuation(self) -> bool:
        """Go past a backslash at the end of a line, which is nothing everywhere but between single quotes."""
        if not self.text.startswith("\\\n", self.at):
            return False
        self.at += 2
        return True

    def _closing(self, opening: str, closing: str, at: int) -> int:
        depth = 0
        for position in range(at, len(self.text)):
            depth += (self.text[position] == opening) - (self.text[position] == closing)
            if depth == 0:
                return position + 1
        return len(self.text)

    def _find(self, sign: str, start: int) -> int:
        position = self.text.find(sign, start)
        return len(self.text) if position < 0 else position


def _join_words(words: list[str], values: list[str]) -> None:
    """Add expanded words to the word that is being read: the first continues it, the last is continued."""
    if values:
        words[-1] += values[0]
        words.extend(values[1:])
