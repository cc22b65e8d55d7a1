"""The quickstart's corpus: the docstrings of Python's own standard library, as JSONL. Nothing is downloaded.

A stand-in for your own data script: Trainshed runs it with `--target-dir DIR` and reads the .jsonl files it leaves.
"""

import argparse
import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SHORTEST = 200
"""Characters; shorter docstrings are mostly 'Return True if…' and teach nothing."""


def documents(library: Path) -> Iterator[dict[str, str]]:
    """Yield one document per module: its docstrings in the order of the source."""
    for path in sorted(library.rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts or "tests" in path.parts:
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
        text = "\n\n".join(docstring for docstring in found if docstring)
        if len(text) >= SHORTEST:
            yield {"text": text, "module": path.relative_to(library).as_posix()}


def main() -> None:
    """Write DIR/docstrings.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target-dir", type=Path, required=True)
    target = parser.parse_args().target_dir / "docstrings.jsonl"
    with target.open("w", encoding="utf-8") as file:
        for document in documents(Path(sysconfig.get_paths()["stdlib"])):
            file.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
