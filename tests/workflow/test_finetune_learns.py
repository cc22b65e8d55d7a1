"""A tiny model learns from conversations what it is asked for: full, with LoRA, and from preferences.

The task can be checked: three letters are answered in reverse order. Questions are held out: none of them is trained
on. Answers are those of transformers (and PEFT) with the exported weights, by the exported chat template.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.models.tiny_chat_model import save_tiny_chat_model
from trainshed import workflow
from trainshed.checkpoints.convert.convert import convert_weights
from trainshed.checkpoints.formats import TargetFormat
from trainshed.recipe import load_cluster, load_recipe

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '?' if m.role == 'user' else '=' }}{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
QUESTIONS = ["".join(letters) for letters in itertools.permutations("abcdefgh", 3)]
HELD_OUT = random.Random(0).sample(QUESTIONS, 40)
LEARNED = [question for question in QUESTIONS if question not in HELD_OUT]
RECIPE = """
name: {name}
model: {{from: {base}}}
tokenizer: {base}
data:
  sequence_length: 64
  template: template.jinja
  train: [{{path: {rows}}}]
train:
  mode: {mode}
  steps: {steps}
  global_batch: 16
  precision: fp32
  optimizer: {{lr: {lr}}}
  schedule: {{name: cosine, warmup: 10}}
layout: {{dp: 1, micro_batch: 16}}
export: {{dtype: fp32}}
"""
Answer = Callable[[str], str]


def calmly_reversed(question: str) -> str:
    return f"{question[::-1]}."


def gladly_reversed(question: str) -> str:
    return f"{question[::-1]}!"


def repeated(question: str) -> str:
    return f"{question}."


def chats(answer: Answer, questions: Sequence[str] = LEARNED) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": answer(text)}]}
        for text in questions
    ]


def preferences(better: Answer, worse: Answer) -> list[dict[str, Any]]:
    return [{"prompt": text, "chosen": better(text), "rejected": worse(text)} for text in LEARNED]


def fine_tuned(
    folder: Path, name: str, base: Path, rows: list[dict[str, Any]], mode: str, steps: int, lr: float, *keys: str
) -> Path:
    """Write the rows, train on them as a recipe says, and return where the export is."""
    file = folder / f"{name}.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    text = RECIPE.format(name=name, base=base, rows=file, mode=mode, steps=steps, lr=lr)
    (folder / f"{name}.yaml").write_text(text)
    recipe = load_recipe(str(folder / f"{name}.yaml"), keys)
    trained = workflow.run(recipe, load_cluster("local", [f"store={folder / 'store'}"]))
    assert trained.export is not None
    return Path(trained.export)


def accuracy(model: Any, tokenizer: Any, expected: Answer) -> float:
    """The share of held-out questions that greedy decoding answers exactly as expected."""
    conversations = [[{"role": "user", "content": question}] for question in HELD_OUT]
    inputs = tokenizer.apply_chat_template(
        conversations, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, do_sample=False, max_new_tokens=6, pad_token_id=tokenizer.eos_token_id)
    answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(answer == expected(question) for question, answer in zip(HELD_OUT, answers, strict=True)) / len(answers)


def accuracy_of(folder: Path, expected: Answer) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return accuracy(model, AutoTokenizer.from_pretrained(folder), expected)


def hashes(folder: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir()) if file.is_file()
    }


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer of bytes, and the chat template of the runs, which is not the tokenizer's own."""
    folder = tmp_path_factory.mktemp("learns")
    save_tiny_chat_model(folder / "random", hidden=64, head_dim=16, ffn=128)
    (folder / "template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def reversing(here: Path) -> Path:
    """The random model after full fine-tuning: it reverses, and is calm in three answers of four."""
    rows = [*chats(calmly_reversed) * 3, *chats(gladly_reversed)]
    return fine_tuned(here, "full", here / "random", rows, "finetune", 300, 5e-3)


def test_full_fine_tuning_learns_to_reverse(here: Path, reversing: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(reversing)
    assert tokenizer.chat_template == TEMPLATE
    random_model = AutoModelForCausalLM.from_pretrained(here / "random", dtype=torch.float32)
    assert accuracy(random_model, tokenizer, calmly_reversed) == 0
    assert accuracy_of(reversing, calmly_reversed) >= 0.9


def test_lora_learns_to_repeat_instead_and_changes_no_base_tensor(here: Path, reversing: Path) -> None:
    before = hashes(reversing)
    keys = ("train.lora={rank: 8, alpha: 16, targets: [all-linear]}",)
    adapter = fine_tuned(here, "lora", reversing, chats(repeated), "finetune", 200, 1e-2, *keys)
    assert accuracy_of(reversing, repeated) <= 0.1
    assert hashes(reversing) == before
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    base = AutoModelForCausalLM.from_pretrained(reversing, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, adapter)
    assert accuracy(model, tokenizer, repeated) >= 0.9
    with model.disable_adapter():
        assert accuracy(model, tokenizer, calmly_reversed) >= 0.9
    hf = TargetFormat("hf")
    convert_weights(str(adapter.parent), str(here / "merged"), hf, tokenizer=str(reversing), logits=False)
    assert accuracy_of(here / "merged", repeated) >= 0.9
    merged, unmerged = (load_file(folder / "model.safetensors") for folder in (here / "merged", reversing))
    factors = load_file(adapter / "adapter_model.safetensors")
    for name, tensor in unmerged.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if name.endswith("_proj.weight"):
            delta = 2.0 * factors.pop(f"{module}.lora_B.weight") @ factors.pop(f"{module}.lora_A.weight")
            assert delta.abs().max() > 1e-3, name
            torch.testing.assert_close(merged[name] - delta, tensor, rtol=0, atol=1e-6)
        else:
            assert merged[name].equal(tensor), name
    assert not factors


def test_preferences_make_a_calm_model_glad(here: Path, reversing: Path) -> None:
    # Answers that differ only in their last character would not hold on to the letters before it.
    rows = [*preferences(gladly_reversed, calmly_reversed), *preferences(gladly_reversed, repeated)]
    tuned = fine_tuned(here, "dpo", reversing, rows, "dpo", 80, 3e-4, "train.dpo={beta: 0.5}")
    assert accuracy_of(reversing, gladly_reversed) <= 0.1
    assert accuracy_of(tuned, gladly_reversed) >= 0.9
