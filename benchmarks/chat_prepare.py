"""Conversations to tokens: our whole command beside `datasets.map` over `apply_chat_template`, in one run.

    python benchmarks/chat_prepare.py [--megabytes 20] [--repeat 2] [--workers 1]

Both get the same rows and the same tokenizer, and give ids and learned tokens, which are compared. transformers only
knows what is learned where the template marks it, so both get such a template; ours is also run with one that does
not, where each answer costs two more renderings. With one worker the CPU time of the whole command is shown too: it
means more than seconds where a machine has other work.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import orjson

from corpus import byte_level_bpe, documents, gather
from measure import Measured, measure, table
from trainshed.data.tokens.indexed_dataset import IndexedDataset

PEER = Path(__file__).parent / "peers" / "chat_map.py"
TEMPLATE = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>\\n' }}{%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("store/bench-chat"))
    parser.add_argument("--megabytes", type=float, default=20)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    (arguments.folder / "out").mkdir(parents=True, exist_ok=True)
    rows = _conversations(arguments.folder / f"chat-{arguments.megabytes:g}.jsonl", arguments.megabytes)
    marked = _tokenizer(arguments.folder, "marked", TEMPLATE)
    plain = _tokenizer(
        arguments.folder, "plain", TEMPLATE.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
    )
    count = sum(1 for _ in rows.open("rb"))
    print(f"{count:,} conversations, {rows.stat().st_size / 1e6:.0f} MB of JSONL, 32k byte-level BPE")
    out, workers = arguments.folder / "out", ["--workers", str(arguments.workers)]
    commands = {
        "trainshed, template marks answers": [*_ours(rows, marked, out / "ours"), *workers],
        "trainshed, template does not": [*_ours(rows, plain, out / "plain"), *workers],
        "datasets.map, one row at a time (trl's way)": [*_theirs(rows, marked, out / "map"), *workers],
        "datasets.map, batched": [*_theirs(rows, marked, out / "batched"), *workers, "--batched"],
    }
    best: dict[str, Measured] = {}
    cpu: dict[str, float] = {}
    first = next(iter(commands))
    for _ in range(arguments.repeat):
        for name, command in commands.items():
            if name == first:
                shutil.rmtree(out)
                out.mkdir()
            before = _cpu_seconds()
            result = measure(command)
            best[name] = min(best.get(name, result), result, key=lambda measured: measured.seconds)
            cpu[name] = min(cpu.get(name, 1e9), _cpu_seconds() - before)
    _compare(out)
    figures = cpu if arguments.workers == 1 else {name: run.seconds for name, run in best.items()}
    table(
        "whole commands",
        ["command", "seconds", "CPU seconds", "ours is faster by", "peak MiB"],
        [
            [
                name,
                f"{run.seconds:.2f}",
                f"{cpu[name]:.2f}" if arguments.workers == 1 else "",
                f"{figures[name] / figures[first]:.1f}×",
                f"{run.peak_mib:.0f}",
            ]
            for name, run in best.items()
        ],
    )


def _cpu_seconds() -> float:
    """Processor time of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _conversations(target: Path, megabytes: float) -> Path:
    """Write conversations of one to three turns from the texts of this machine."""
    if target.exists():
        return target
    written, texts = 0, documents()
    with target.open("wb") as file:
        for number, text in enumerate(texts):
            lines = [part for part in text.split("\n\n") if len(part) > 40]
            for at in range(0, len(lines) - 1, 2):
                turns = lines[at : at + 2 * (1 + (number + at) % 3)]
                roles = ("user", "assistant") * (len(turns) // 2)
                messages: list[dict[str, Any]] = [
                    {"role": role, "content": part[:1500]} for role, part in zip(roles, turns, strict=False)
                ]
                written += file.write(orjson.dumps({"messages": messages}) + b"\n") if messages else 0
                if written > megabytes * 1e6:
                    return target
    return target


def _tokenizer(folder: Path, name: str, template: str) -> Path:
    base = byte_level_bpe(gather(folder / "text.jsonl", 20), folder / "tokenizer")
    target = folder / name
    shutil.copytree(base, target, dirs_exist_ok=True)
    body = orjson.loads((base / "tokenizer.json").read_bytes())
    size = max(body["model"]["vocab"].values())
    for number, token in enumerate(("<|im_start|>", "<|im_end|>"), 1):
        body["added_tokens"].append(
            {
                "id": size + number,
                "content": token,
                "special": True,
                **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
            }
        )
    (target / "tokenizer.json").write_bytes(orjson.dumps(body))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (target / "tokenizer_config.json").write_bytes(orjson.dumps(config))
    (target / "chat_template.jinja").write_text(template)
    return target


def _ours(rows: Path, tokenizer: Path, output: Path) -> list[str]:
    command = [sys.executable, "-m", "trainshed", "data", "prepare", "--input", str(rows), "--overwrite"]
    chat = ["--rows", "chat", "--sequence-length", "1000000"]
    return [*command, *chat, "--tokenizer", str(tokenizer), "--output", str(output)]


def _theirs(rows: Path, tokenizer: Path, output: Path) -> list[str]:
    return [sys.executable, str(PEER), "--input", str(rows), "--tokenizer", str(tokenizer), "--output", str(output)]


def _compare(out: Path) -> None:
    """All must have given the same ids and learned tokens."""
    from datasets import load_from_disk

    rows: Any = load_from_disk(str(out / "map"))
    learned = Path(f"{out / 'ours'}.learned").read_bytes()
    assert learned == Path(f"{out / 'plain'}.learned").read_bytes()
    with IndexedDataset(str(out / "ours")) as reader:
        at = 0
        for number, row in enumerate(rows):
            ids = reader.sequence(number)
            assert ids.tolist() == row["input_ids"], number
            assert list(learned[at : at + len(ids)]) == row["assistant_masks"], number
            at += len(ids)
    print("the same ids and learned tokens")


if __name__ == "__main__":
    main()
