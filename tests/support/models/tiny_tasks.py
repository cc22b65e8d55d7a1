"""Small tasks of lm-eval over a local JSONL file: one of each way in which lm-eval asks a model."""

from __future__ import annotations

import json
from pathlib import Path

_DATA = """\
dataset_path: json
dataset_kwargs: {data_files: {test: lines.jsonl}}
test_split: test
"""
TASKS = {
    "choose": """\
output_type: multiple_choice
doc_to_text: "Q: {{question}}\\nA:"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
""",
    "write": """\
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {max_gen_toks: 8, until: ["e"], do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
    "roll": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} {{choices[0]}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
""",
}
NAMES = tuple(TASKS)


def write_tasks(folder: Path, documents: int = 10) -> Path:
    """Write the tasks and their file; one text is longer than 64 bytes, which is all that a tiny model takes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{_DATA}{text}")
    lines = []
    for number in range(documents):
        question = f"is {number} the {'large ' * (number % 5)}one?"
        lines.append({"question": question, "choices": [" y", " no", f" not {number}", " it is"], "answer": number % 4})
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
