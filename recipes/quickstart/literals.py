"""The data of quickstart-chat: questions for the type of a Python value, as conversations. Nothing is downloaded.

The held-out questions ask for values that are in none of the others.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

WORDS = ("name", "path", "file", "value", "line", "key", "index", "code", "text", "data", "mode", "size")
QUESTIONS = ("What is {}?", "What type is {}?", "Which type does {} have?", "{} is of the type")
EXAMPLES = {"train": 600, "held-out": 60}
SEEDS = {"train": 1, "held-out": 2}


def _number(draw: random.Random) -> str:
    return str(draw.randrange(1000))


def _word(draw: random.Random) -> str:
    return "'" + " ".join(draw.sample(WORDS, 3)) + "'"


def _several(draw: random.Random) -> str:
    return ", ".join(_number(draw) for _ in range(draw.randrange(2, 5)))


VALUES: dict[str, Callable[[random.Random], str]] = {
    "integer": _number,
    "words": _word,
    "list": lambda draw: f"[{_several(draw)}]",
    "tuple": lambda draw: f"({_several(draw)})",
    "mapping": lambda draw: f"{{{_word(draw)}: {_number(draw)}}}",
}


def conversations(part: str) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Yield the conversations of a part, each type as often as the others."""
    draw = random.Random(SEEDS[part])
    seen = {value for value, _ in _drawn("train")} if part == "held-out" else set()
    for value, kind in _drawn(part):
        if value not in seen:
            user = {"role": "user", "content": draw.choice(QUESTIONS).format(value)}
            yield {"messages": [user, {"role": "assistant", "content": f"{kind}."}]}


def _drawn(part: str) -> Iterator[tuple[str, str]]:
    draw = random.Random(10 + SEEDS[part])
    for number in range(EXAMPLES[part]):
        kind = list(VALUES)[number % len(VALUES)]
        yield VALUES[kind](draw), kind


def main() -> None:
    """Write DIR/literals.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=tuple(EXAMPLES))
    parser.add_argument("--target-dir", type=Path, required=True)
    wanted = parser.parse_args()
    lines = [json.dumps(talk) + "\n" for talk in conversations(wanted.part)]
    (wanted.target_dir / "literals.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
