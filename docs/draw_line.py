"""Draw the picture of the line, from text to server: `python docs/draw_line.py` writes docs/images/line.svg.

It is readable on a light and on a dark page: the colours follow the reader's own setting.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

STAGES = [
    ("text", "JSONL, parquet,", "Hub, buckets", "inputs", "hashed"),
    ("tokens", "trainshed data", "prepare", "same ids as", "tokenizers"),
    ("plan", "trainshed plan", "layout, time, cost", "held against", "3,059 measurements"),
    ("train", "trainshed run", "any layout", "same losses as", "one process"),
    ("export", "Hugging Face,", "Megatron", "tensors and", "logits compared"),
    ("serve", "trainshed serve", "OpenAI's API", "greedy tokens", "of transformers"),
]
TARGETS = ["this machine", "Slurm", "Kubernetes", "Ray"]
BOX_WIDTH, BOX_HEIGHT, GAP, LEFT, TOP = 138, 128, 18, 20, 96
WIDTH = 2 * LEFT + len(STAGES) * BOX_WIDTH + (len(STAGES) - 1) * GAP
HEIGHT = 320

STYLE = """
  text { font-family: system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2933; }
  .name { font-size: 17px; font-weight: 600; }
  .small { font-size: 12.5px; fill: #52606d; }
  .proof { font-size: 12px; fill: #046c4e; }
  .page { fill: #ffffff; }
  .box { fill: #f5f7fa; stroke: #9aa5b1; }
  .recipe { fill: #e6f0ff; stroke: #4a7bd0; }
  .target { fill: none; stroke: #9aa5b1; stroke-dasharray: 4 3; }
  .line { stroke: #4a7bd0; stroke-width: 2; fill: none; }
  .tip { fill: #4a7bd0; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e7eb; }
    .small { fill: #b8c2cc; }
    .proof { fill: #5fd3a5; }
    .page { fill: #12181f; }
    .box { fill: #202b36; stroke: #616e7c; }
    .recipe { fill: #1c2f4d; stroke: #7aa5f0; }
    .target { stroke: #7b8794; }
    .line { stroke: #7aa5f0; }
    .tip { fill: #7aa5f0; }
  }
"""


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="middle">{escape(words)}</text>'


def _box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" class="{kind}"/>'


def line_svg() -> str:
    """Return the picture."""
    middle = WIDTH / 2
    parts = [
        _box(0, 0, WIDTH, HEIGHT, "page"),
        _box(middle - 255, 16, 510, 44, "recipe"),
        _text(middle, 44, "recipe.yaml: model, data, training, layout, export", "name"),
        f'<path d="M{middle:g} 60 V{TOP - 8}" class="line"/>',
        f'<path d="M{middle - 5:g} {TOP - 12} l5 9 l5 -9 z" class="tip"/>',
    ]
    for number, (name, *words) in enumerate(STAGES):
        x = LEFT + number * (BOX_WIDTH + GAP)
        centre = x + BOX_WIDTH / 2
        parts += [
            _box(x, TOP, BOX_WIDTH, BOX_HEIGHT, "box"),
            _text(centre, TOP + 26, name, "name"),
            _text(centre, TOP + 48, words[0], "small"),
            _text(centre, TOP + 65, words[1], "small"),
            _text(centre, TOP + 94, f"✓ {words[2]}", "proof"),
            _text(centre, TOP + 111, words[3], "proof"),
        ]
        if number:
            y = TOP + 26
            parts.append(f'<path d="M{x - GAP + 1} {y} H{x - 6}" class="line"/>')
            parts.append(f'<path d="M{x - 8} {y - 5} l8 5 l-8 5 z" class="tip"/>')
    width = (WIDTH - 2 * LEFT - 3 * GAP) / len(TARGETS)
    parts.append(_text(middle, TOP + BOX_HEIGHT + 28, "the same recipe, unchanged, with --on CLUSTER", "small"))
    for number, name in enumerate(TARGETS):
        x = LEFT + number * (width + GAP)
        parts += [_box(x, HEIGHT - 56, width, 40, "target"), _text(x + width / 2, HEIGHT - 31, name, "name")]
    title = "One recipe from text to a served model: text, tokens, plan, train, export, serve, each with its proof"
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img"><title>{title}</title><style>{STYLE}</style>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    (Path(__file__).parent / "images" / "line.svg").write_text(line_svg(), encoding="utf-8")
