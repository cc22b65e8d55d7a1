"""What plans advise exists: every key of a recipe or cluster that a message names, and every flag."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainshed.catalog
import trainshed.plan
from trainshed.cli.plan import plan, validate
from trainshed.cli.plan_calibrate import calibrate
from trainshed.recipe import Cluster, Recipe
from trainshed.recipe.validation import known_keys

FILES = [
    file
    for package in (trainshed.plan, trainshed.catalog)
    for folder in package.__path__
    for file in sorted(Path(folder).rglob("*.py"))
    if file.name != "fabrics.py"  # it names keys of pods
]
KEYS = {".".join(map(str, path)) for kind in (Recipe, Cluster) for path in known_keys(kind)}
SECTIONS = sorted({key.split(".")[0] for key in KEYS if "." in key})
WRITTEN_KEY = re.compile(rf"\b((?:{'|'.join(SECTIONS)})\.[a-z_]+)")
FLAG = re.compile(r"(?<![\w-])--([a-z][a-z-]*)")
FLAGS = {
    name.replace("_", "-") for command in (plan, calibrate, validate) for name in inspect.signature(command).parameters
}
OF_OTHERS = {"tp-comm-overlap", "make-vocab-size-divisible-by", "pipeline-model-parallel-layout"}
"""Megatron's, named where its habits are described."""


def messages(file: Path) -> Iterator[str]:
    """Every text of a file that is not documentation, values filled in left out."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented | inside:
            yield node.value


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_key_and_flag_that_is_advised_exists(file: Path) -> None:
    for text in messages(file):
        for key in WRITTEN_KEY.findall(text):
            assert key in KEYS, text
        for flag in FLAG.findall(text):
            assert flag in FLAGS | OF_OTHERS, text
