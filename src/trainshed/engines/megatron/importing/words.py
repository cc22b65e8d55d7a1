"""The arguments in a file, whatever it is: a shell script, a bare argument list, or a YAML or JSON list of words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import yaml

from trainshed.engines.megatron.importing.shell import Script, read_script
from trainshed.errors import InputError

_LAUNCHER = ("--nnodes", "--nproc-per-node", "--num-nodes", "--gpus-per-node")


@dataclass(frozen=True)
class Found:
    """The arguments of one training, and what else the file says."""

    words: tuple[str, ...]
    nodes: int | None = None
    gpus_per_node: int | None = None
    sizes: tuple[str, ...] = ()
    """What the file calls the model's size: `375m`."""
    conditions: bool = False
    prepares_without_eod: bool = False
    """It tokenises too, without --append-eod."""


def find_words(text: str, name: str) -> Found:
    """Find the arguments in a file's text."""
    listed = _listed(text)
    script = Script([listed]) if listed is not None else read_script(text)
    words, before = _training(script)
    if not any(word.startswith("--") for word in words):
        raise InputError(
            "there is no argument of Megatron-LM in it",
            where=name,
            hint="give an argument list, a script that starts pretrain_gpt.py, or a YAML list of arguments",
        )
    launcher = dict(_launcher_options([*before, *words]))
    return Found(
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


def _listed(text: str) -> list[str] | None:
    """Return the words of a YAML or JSON list, or mapping of options; None where the text is neither."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError:
        return None
    if isinstance(document, dict) and len(document) == 1 and isinstance(next(iter(document.values())), list | dict):
        document = next(iter(document.values()))
    if isinstance(document, list):
        return [word for each in document for word in _words_of(each)]
    if isinstance(document, dict) and all(str(key).startswith("--") for key in document):
        return [word for key, value in document.items() for word in (str(key), *_words_of(value))]
    return None


def _words_of(value: Any) -> list[str]:
    if value is None or value is True:
        return []
    if isinstance(value, list):
        return [str(each) for each in value]
    # `- --lr 1e-4` is one element and two words.
    return value.split() if isinstance(value, str) and value.startswith("--") else [str(value)]


def _training(script: Script) -> tuple[list[str], list[str]]:
    """Return the arguments of the program, and the words before it: those of torchrun."""
    for command in script.commands:
        for place, word in enumerate(command):
            if PurePath(word).name in ("pretrain_gpt.py", "ray_entrypoint.py"):
                return command[place + 1 :], command[:place]
    for command in script.commands:
        if command[0].startswith("--"):
            return [word for each in script.commands if each[0].startswith("--") for word in each], []
    # A file that only sets variables, to be read by another.
    strings = [value.split() for value in script.variables.values() if value.lstrip().startswith("--")]
    return [word for words in (*strings, *script.arrays.values()) for word in words], []


def _launcher_options(words: list[str]) -> Iterator[tuple[str, int]]:
    for place, word in enumerate(words):
        option, sign, value = word.replace("_", "-").partition("=")
        if option in _LAUNCHER:
            number = value if sign else (words[place + 1] if place + 1 < len(words) else "")
            if number.isdigit():
                yield option, int(number)


def _without_launcher(words: list[str]) -> Iterator[str]:
    """Drop what is the launcher's own, and redirections that came along."""
    skip = False
    for word in words:
        option, sign, _ = word.replace("_", "-").partition("=")
        if option in _LAUNCHER:
            skip = not sign
        elif skip:
            skip = False
        else:
            yield word


def _sizes(name: str, script: Script) -> Iterator[str]:
    yield from re.findall(r"(?<![\w.])(\d+(?:\.\d+)?[mMbB])(?![A-Za-z0-9])", PurePath(name).stem.replace("_", "-"))
    for variable, value in script.variables.items():
        if "SIZE" in variable.upper() and re.fullmatch(r"\d+(?:\.\d+)?[mMbB]", value):
            yield value
