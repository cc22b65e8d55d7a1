"""What others may rely on: exported names, and the tree of errors with their exit codes."""

from __future__ import annotations

import importlib
import pickle
import re

import pytest

import trainshed
from support.recipes.golden_files import check_golden
from trainshed import errors
from trainshed.errors import MissingExtra, TrainshedError

ROOMS = ["trainshed", "trainshed.storage", "trainshed.recipe", "trainshed.catalog"]


def test_the_exported_names_are_pinned() -> None:
    lines = []
    for room in ROOMS:
        module = importlib.import_module(room)
        names = getattr(module, "__all__", [])
        assert all(hasattr(module, name) for name in names), room
        assert len(set(names)) == len(names), room
        lines.append(f"{room}: {' '.join(sorted(names)) or '(nothing)'}")
    check_golden("surface.txt", "\n".join(lines) + "\n")


def tree(kind: type[TrainshedError], before: str = "", joint: str = "") -> list[tuple[str, str, int]]:
    """Every error as the docstring draws it: the lines before it, its name, its exit code."""
    found = [(before + joint, kind.__name__, kind.exit_code)]
    children = [child for child in kind.__subclasses__() if child.__module__ == errors.__name__]
    deeper = before + {"": "", "├── ": "│   ", "└── ": "    "}[joint]
    for number, child in enumerate(children, start=1):
        found += tree(child, deeper, "└── " if number == len(children) else "├── ")
    return found


def test_the_tree_of_errors_is_the_one_drawn_in_its_docstring() -> None:
    drawn = re.findall(r"^    ([│├└─ ]*)(\w+) +(\d)  \S", errors.__doc__ or "", re.MULTILINE)
    assert [(lines, name, int(code)) for lines, name, code in drawn] == tree(TrainshedError)


def test_every_error_is_in_the_tree() -> None:
    kinds = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, BaseException)]
    assert {kind.__name__ for kind in kinds} == {name for _, name, _ in tree(TrainshedError)}


@pytest.mark.parametrize("name", [name for _, name, _ in tree(TrainshedError)])
def test_errors_keep_all_three_parts_across_processes(name: str) -> None:
    error = getattr(errors, name)("it broke", where="file:3", hint="mend it")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (again.what, again.where, again.hint) == ("it broke", "file:3", "mend it")
    assert str(again) == "file:3: it broke\nmend it"
    assert str(getattr(errors, name)("it broke")) == "it broke"


def test_a_missing_extra_says_the_pip_line() -> None:
    error = MissingExtra.named("data", "reading parquet files")
    assert str(error) == "reading parquet files needs the extra 'data'\npip install 'trainshed[data]'"
    assert error.exit_code == 2


def test_the_version_is_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", trainshed.__version__)
