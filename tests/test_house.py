"""A stranger finds their way: depth, one meaning for each public class, variables that say what they hold."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "trainshed"
MODULES = sorted(PACKAGE.rglob("*.py"))
VAGUE = {"found", "each", "told", "said"}
ROOT = PACKAGE.parents[1]
NAMED_FILE = re.compile(r"(?<![\w/.-])((?:[a-z_]+/)+[a-z_]+\.py)\b")
OF_OTHERS = {"torch/distributed/checkpoint/filesystem.py", "pipeline_parallel/schedules.py", "models/base.py"}
"""Files of PyTorch, Megatron-LM and nanotron that comments cite."""
JOB_FILES = {"engines/megatron/build_index.py", "engines/torchtune/start.py"}
"""Scripts that are shipped into foreign images byte for byte: golden files hold them still."""


def shown(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def bound_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield every variable and parameter with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno


def test_a_public_class_name_has_one_meaning_in_the_whole_package() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for file in MODULES:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(shown(file))
    assert not {name: files for name, files in homes.items() if len(files) > 1}


def test_folders_are_at_most_two_deep() -> None:
    assert not [shown(file) for file in MODULES if len(file.relative_to(PACKAGE).parts) > 3]


def test_variables_say_what_they_hold() -> None:
    vague = [
        f"{shown(file)}:{line} {name}"
        for file in MODULES
        if shown(file) not in JOB_FILES
        for name, line in bound_names(ast.parse(file.read_text()))
        if name in VAGUE
    ]
    assert not vague


def test_files_that_are_named_exist() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "tests" / "README.md"]
    absent = [
        f"{file.name} names {name}"
        for file in [*MODULES, *pages]
        for name in NAMED_FILE.findall(file.read_text())
        if name not in OF_OTHERS
        and not any(place.is_file() for place in (PACKAGE / name, ROOT / name, ROOT / "src" / name))
        and not list(PACKAGE.glob(f"*/{name}"))
    ]
    assert not absent


def files_with(pattern: str) -> set[str]:
    return {shown(file) for file in MODULES if re.search(pattern, file.read_text())}


def test_paths_of_a_run_and_handlers_of_signals_have_one_home() -> None:
    assert files_with(r"(attempt|rank|node)-\{\w+:0|step-\{\w+:0|re\.compile\(r\"(attempt|step)-") == {"run_folder.py"}
    # Two more: files that run in foreign images, without the rest of the package.
    foreign = {"launch/ray/script_driver.py", "engines/megatron/run_program.py"}
    assert files_with(r"signal\.signal\(") == {"signals.py", *foreign}


def test_autograd_functions_of_a_model_are_taken_into_graphs_whole() -> None:
    """Dynamo of PyTorch 2.11 traces through others and then loses gradients without a word (float32, a no-op `to`).

    `_AttachLosses` returns a view and is traced: on an H200 it gave the gradients of uncompiled blocks in both dtypes.
    """
    for file in MODULES:
        if not shown(file).startswith(("models/", "engines/torch/")):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ClassDef) or node.name == "_AttachLosses":
                continue
            if "torch.autograd.Function" in map(ast.unparse, node.bases):
                decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
                assert decorators == ["torch._dynamo.allow_in_graph"], f"{shown(file)}: {node.name}"


def test_a_program_of_ours_never_takes_a_module_from_the_users_folder() -> None:
    """`python -m` and `-c` put the current folder first, where a `numbers.py` of the user's hides the library's."""
    started = re.compile(r"\[sys\.executable,(?! \"-[PI]\")[^\]]*\"-[mc]\"")
    unsafe = [f"{shown(file)}: {line}" for file in MODULES for line in started.findall(file.read_text())]
    assert unsafe == []
