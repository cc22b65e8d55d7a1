"""Recipes over a little text that a script writes: seconds to prepare, the whole line behind them."""

from __future__ import annotations

from pathlib import Path

RECIPE = """
trainshed: 1
name: small
model: {{preset: tiny, init: random}}
tokenizer: {tokenizer}
data:
  sequence_length: 32
  train:
{sources}
train: {{steps: 3, global_batch: 2, precision: fp32, optimizer: {{lr: 1.0e-3}}}}
layout: {{dp: 1}}
"""
SCRIPT = """
import json, pathlib, sys
target = pathlib.Path(sys.argv[sys.argv.index("--target-dir") + 1])
words = "one two three four five six seven eight nine ten".split()
with open(target / "numbers.jsonl", "w") as file:
    for i in range(300):
        file.write(json.dumps({"text": " ".join(words[(i * k) % 10] for k in range(1, 40))}) + "\\n")
print("wrote", len(sys.argv), "arguments")
"""
LEARNED = "{train: {vocab_size: 280}}"


def write_recipe(folder: Path, *sources: str, tokenizer: str = LEARNED) -> Path:
    """Write a recipe with these sources."""
    (folder / "recipe.yaml").write_text(
        RECIPE.format(tokenizer=tokenizer, sources="\n".join(f"    - {source}" for source in sources))
    )
    return folder / "recipe.yaml"


def write_script(folder: Path, text: str = SCRIPT, name: str = "numbers.py") -> Path:
    """Write the script that makes the text."""
    (folder / name).write_text(text)
    return folder / name


def write_small_recipe(folder: Path, *, name: str = "small") -> Path:
    """Write a recipe of two small layers over the script's text: what comes behind training is seen in seconds."""
    sizes = "layers: 2, hidden: 16, heads: 4, kv_heads: 2, head_dim: 4, ffn: 24, vocab_size: 280, max_positions: 32"
    model = f"{{config: {{family: llama, {sizes}, rope: {{base: 10000.0}}}}, init: random}}"
    text = RECIPE.format(tokenizer=LEARNED, sources="    - {script: numbers.py}")
    text = text.replace("{preset: tiny, init: random}", model).replace("name: small", f"name: {name}")
    (folder / "recipe.yaml").write_text(text)
    return folder / "recipe.yaml"
