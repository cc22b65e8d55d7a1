"""Fine-tuning asks its prompts as a user would: written by the template of the run, answered as by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.models.tiny_chat_model import save_tiny_chat_model
from trainshed import workflow
from trainshed.data.prompts import encode_prompts, read_answers
from trainshed.data.tokenize.tokenizer import load_tokenizer
from trainshed.errors import InputError
from trainshed.recipe import Recipe, load_cluster, parse_recipe
from trainshed.storage import LocalStore

PROMPTS = ("a?", "bb?", "c")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
RECIPE = """
name: chat
model: {{from: {base}}}
tokenizer: {base}
data:
  sequence_length: 32
  template: {template}
  system: Hi
  train: [{{path: {rows}}}]
  validation: {{path: {rows}, every: 3, batches: 1, prompts: {prompts}, answer_tokens: 6}}
train: {{mode: finetune, steps: 6, global_batch: 4, precision: fp32, optimizer: {{lr: 3.0e-2}}}}
layout: {{dp: 1, micro_batch: 2}}
checkpoint: {{best: {{by: validation}}}}
export: {{dtype: fp32}}
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model with its tokenizer, and conversations in which every answer is `ok`."""
    folder = tmp_path_factory.mktemp("chat")
    save_tiny_chat_model(folder / "base")
    (folder / "template.jinja").write_text(TEMPLATE)
    rows = [
        {"messages": [{"role": "user", "content": f"{word}?"}, {"role": "assistant", "content": "ok"}]}
        for word in ("a", "bb", "ccc", "d")
        for _ in range(4)
    ]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def chat_recipe(here: Path, *overrides: str) -> Recipe:
    text = RECIPE.format(
        base=here / "base",
        rows=here / "rows.jsonl",
        template=here / "template.jinja",
        prompts=json.dumps(PROMPTS),
    )
    return parse_recipe(text, overrides)


def test_prompts_are_written_by_the_template_of_the_run_and_end_where_it_ends_answers(here: Path) -> None:
    recipe, tokenizer = chat_recipe(here), load_tokenizer(str(here / "base"))
    prompts = encode_prompts(recipe, tokenizer)
    assert prompts is not None
    begin, end = tokenizer.token("<s>"), tokenizer.token("</s>")
    assert begin is not None
    assert end is not None
    assert [tokenizer.decode(list(tokens)) for tokens in prompts.tokens] == [
        f"<s>[s]Hi[u]{prompt}[a]" for prompt in PROMPTS
    ]
    assert {tokens.count(begin.id) for tokens in prompts.tokens} == {1}, "the tokenizer adds no second one"
    assert prompts.end_tokens == {end.id}
    texts = chat_recipe(here, "data.template=null", "data.system=null")
    own = encode_prompts(texts, tokenizer)
    assert own is not None
    assert tokenizer.decode(list(own.tokens[0])) == "<s><|user|>a?\n<|assistant|>"
    with pytest.raises(InputError, match="there is no chat template 'nothing'") as error:
        encode_prompts(chat_recipe(here, "data.template=nothing"), tokenizer)
    assert error.value.hint is not None
    assert "data.template" in error.value.hint


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="full"),
        pytest.param(("train.lora={rank: 4, alpha: 8}", "export.merge=true"), id="lora", marks=pytest.mark.full),
    ],
)
def test_answers_of_a_fine_tuning_are_those_of_transformers_with_its_best_weights(
    here: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    trained = workflow.run(chat_recipe(here, *overrides), load_cluster("local", [f"store={tmp_path}"]))
    assert trained.export is not None
    assert trained.best is not None
    model = AutoModelForCausalLM.from_pretrained(trained.export, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(trained.export)
    stored = {step.step: step.answers for step in read_answers(LocalStore(trained.prepared.folder), "")}
    assert list(stored) == [3, 6]
    for prompt, answer in zip(PROMPTS, stored[trained.best["step"]], strict=True):
        messages = [{"role": "system", "content": "Hi"}, {"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            messages, chat_template=TEMPLATE, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**inputs, do_sample=False, max_new_tokens=6, pad_token_id=0)
        tokens = output[0, inputs["input_ids"].shape[1] :].tolist()
        ended = tokenizer.eos_token_id in tokens
        expected = tokens[: tokens.index(tokenizer.eos_token_id)] if ended else tokens
        assert (answer["prompt"], answer["tokens"], answer["ended"]) == (prompt, expected, ended)
        assert answer["answer"] == tokenizer.decode(expected, skip_special_tokens=True)
