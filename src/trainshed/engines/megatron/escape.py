"""`engine.args`: arguments handed to Megatron as they are, once they are known, well typed and contradict nothing."""

from __future__ import annotations

from typing import Any

from trainshed.engines.foreign import EngineTask
from trainshed.engines.megatron.combinations import clashes
from trainshed.engines.megatron.known import Argument, ArgumentList
from trainshed.engines.megatron.retired import RETIRED
from trainshed.engines.megatron.settings import Setting, Settings
from trainshed.recipe.messages import as_recipe_error
from trainshed.recipe.section import Problem


def add_engine_args(settings: Settings, task: EngineTask) -> None:
    """Add the recipe's `engine.args`, or raise one error with all that is wrong with them."""
    problems: list[Problem] = []
    asked: dict[str, str] = {}
    for name, value in task.recipe.engine.args.items():
        found = _setting(settings, name, value)
        if isinstance(found, Problem):
            problems.append(found)
        elif found is not None:
            settings.add(found)
            asked[found.dest] = name
    for dest, needs in clashes(settings):
        name = asked.get(dest)
        path = ("engine", "args", name) if name else ("engine", "args")
        problems.append(
            Problem(path, f"Megatron refuses {_said(settings, dest)} without {needs}", "delete it, or both")
        )
    if problems:
        raise as_recipe_error(problems, task.recipe.places)


def option_of(name: str) -> str:
    """Return the option that a key means: `tp-comm-overlap`, `tp_comm_overlap` and `--tp-comm-overlap` are one."""
    return f"--{name.lstrip('-').replace('_', '-')}"


def find(known: ArgumentList, name: str) -> Argument | None:
    """Return the argument that a key means; some of Megatron's own have an underscore in the middle."""
    exact = f"--{name.lstrip('-')}"
    return known.option(exact) or known.option(option_of(name))


def _setting(settings: Settings, name: str, value: Any) -> Setting | Problem | None:
    path = ("engine", "args", name)
    argument = find(settings.known, name)
    retired = RETIRED.get(option_of(name))
    if retired is not None and (argument is None or retired.fate in ("ignored", "refused")):
        return Problem(path, f"`{option_of(name)}`: {retired}", "delete it")
    if argument is None:
        near = settings.known.nearest(option_of(name))
        return Problem(
            path,
            f"Megatron-LM {settings.known.version} has no argument `{option_of(name)}`",
            f"did you mean {near.removeprefix('--')}?"
            if near
            else "delete it, or write the engine.version that has it",
        )
    if value is None:
        return None
    read = _read(argument, option_of(name), value)
    if isinstance(read, str):
        return Problem(path, f"`{value}` is not what {argument.option} takes", f"write {read}")
    decided = settings.decided(argument.dest)
    if decided is None or decided.key is None:
        return Setting(argument.dest, read[0], "engine.args")
    if decided.value == read[0] or (not decided.value and not read[0]):
        return None
    said = f"says {_said(settings, argument.dest)}" if decided.value is not None else "leaves it out"
    return Problem(
        path, f"`{argument.option}` contradicts `{decided.key}`, which {said}", f"delete it and write `{decided.key}`"
    )


def _said(settings: Settings, dest: str) -> str:
    words = settings.known.written(dest, settings.value(dest))
    return " ".join(words) if words else f"{settings.known.setting(dest)[0].option} as it is by default"


def _read(argument: Argument, option: str, value: Any) -> tuple[Any] | str:
    """Return the value as Megatron's parser would, in a tuple; or what should have been written."""
    if not argument.takes_value:
        if not isinstance(value, bool):
            return "true or false"
        negative = argument.kind == "unflag" or option in argument.also
        return (not value if negative else value,)
    many = isinstance(value, list | tuple)
    if many != (argument.nargs is not None or argument.kind == "ints"):
        return argument.wants
    values = [_one(argument, each) for each in (value if many else [value])]
    if any(each is None for each in values) or (isinstance(argument.nargs, int) and len(values) != argument.nargs):
        return argument.wants
    if many and not values and argument.nargs != "*":
        return argument.wants
    return (tuple(values) if many else values[0],)


def _one(argument: Argument, value: Any) -> Any:
    """Return a single value in the argument's type, None where it has another or is no choice."""
    if isinstance(value, bool):
        return None
    if argument.kind in ("int", "ints"):
        read = value if isinstance(value, int) else None
    elif argument.kind == "float":
        read = float(value) if isinstance(value, int | float) else None
    else:
        read = value if argument.kind == "pattern" and isinstance(value, int) else str(value)
    return None if argument.choices is not None and read not in argument.choices else read
