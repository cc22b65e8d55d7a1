"""`model.added_tokens` from the recipe to the answer: tokens that a base lacks are learned, exported and served.

The base knows 256 bytes and two special tokens; its 258 rows have no room, so that its vocabulary grows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.models.tiny_chat_model import save_tiny_chat_model
from support.runs.small_generators import ask, generating
from support.runs.small_runs import events
from trainshed import workflow
from trainshed.checkpoints.lora.merge import merge_adapter
from trainshed.errors import InputError, RecipeError
from trainshed.recipe import Recipe, load_cluster, load_recipe
from trainshed.recipe.load import run_identity
from trainshed.serve.loading import load_model

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
ADDED = ["<tool>", "</tool>", "<|im_start|>", "<|im_end|>"]
ANSWER = "<tool>now</tool>"
RECIPE = """
name: {name}
model: {{from: {base}, added_tokens: {added}}}
tokenizer: {base}
data:
  sequence_length: 64
  template: template.jinja
  train: [{{path: rows.jsonl}}]
train: {{mode: finetune, steps: 40, global_batch: 8, precision: fp32, optimizer: {{lr: 1e-2}}}}
layout: {{dp: 1, micro_batch: 8}}
export: {{dtype: fp32}}
"""
LORA = "train.lora={rank: 4, alpha: 8, targets: [all-linear]}"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer of bytes, and a chat template of tokens that both lack."""
    folder = tmp_path_factory.mktemp("added")
    save_tiny_chat_model(folder / "base", hidden=32, head_dim=8, ffn=64)
    save_tiny_chat_model(folder / "tied", hidden=32, head_dim=8, ffn=64, tied_embeddings=True)
    (folder / "template.jinja").write_text(TEMPLATE)
    questions = [f"{first}{second}" for first in "abcdefgh" for second in "stuv"]
    rows = [[("user", question), ("assistant", ANSWER)] for question in questions]
    messages = [{"messages": [{"role": role, "content": text} for role, text in row]} for row in rows]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in messages))
    pairs = [{"prompt": question, "chosen": ANSWER, "rejected": "no"} for question in questions]
    (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in pairs))
    return folder


def recipe_of(here: Path, name: str, *keys: str, base: str = "base", added: list[str] = ADDED) -> Recipe:
    file = here / f"{name}.yaml"
    file.write_text(RECIPE.format(name=name, base=here / base, added=json.dumps(added)))
    return load_recipe(str(file), [f"data.train=[{{path: {here / 'rows.jsonl'}}}]", *keys])


def trained(here: Path, recipe: Recipe) -> Any:
    return workflow.run(recipe, load_cluster("local", [f"store={here / 'store'}"]))


def answer_of_transformers(model: Any, folder: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "dz"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=8, pad_token_id=0, eos_token_id=end)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]).removesuffix("<|im_end|>")


def answer_of_ours(address: Path | str) -> str:
    model = load_model(str(address), device="cpu")
    assert model.tokenizer is not None
    prompt = model.tokenizer.encode_chat([{"role": "user", "content": "dz"}])
    words = model.tokenizer
    with generating(model.decoder, decode=words.decode_plain, eos_tokens=words.eos_tokens) as generator:
        return ask(generator, prompt, max_tokens=8, temperature=0.0).text


def test_full_fine_tuning_grows_the_vocabulary_and_learns_to_write_the_tokens(here: Path) -> None:
    run = trained(here, recipe_of(here, "full"))
    exported = Path(run.export)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    assert len(tokenizer) == model.config.vocab_size == 262
    assert tokenizer.convert_tokens_to_ids(ADDED) == [258, 259, 260, 261]
    assert answer_of_transformers(model, exported) == ANSWER
    assert answer_of_ours(exported) == answer_of_ours(run.prepared.folder) == ANSWER
    (probe,) = events(run.prepared.folder, "probe")
    assert abs(probe["loss"] - probe["expected"]) <= 1e-4


@pytest.mark.parametrize("base", ["base", "tied"])
def test_lora_trains_the_rows_of_the_tokens_and_peft_says_the_same(here: Path, base: str) -> None:
    run = trained(here, recipe_of(here, f"lora-{base}", LORA, "train.optimizer.lr=3e-2", base=base))
    exported, rows = Path(run.export), [258, 259, 260, 261]
    settings = json.loads((exported / "adapter_config.json").read_text())
    tables = {"embed_tokens"} if base == "tied" else {"embed_tokens", "lm_head"}
    assert settings["trainable_token_indices"] == dict.fromkeys(tables, rows)
    theirs = AutoModelForCausalLM.from_pretrained(here / base, dtype=torch.float32)
    theirs.resize_token_embeddings(262)
    theirs = PeftModel.from_pretrained(theirs, exported).eval()
    assert answer_of_transformers(theirs, exported) == ANSWER
    assert answer_of_ours(exported) == answer_of_ours(run.prepared.folder) == ANSWER
    keys = (LORA, "train.optimizer.lr=3e-2", "export.merge=true", f"export.to={here / f'merged-{base}'}")
    merged = Path(trained(here, recipe_of(here, f"lora-{base}", *keys, base=base)).export)
    tokens = torch.randint(262, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(tokens).logits
        bound = 2e-6 * float(expected.abs().max())
        model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
        assert float((model(tokens).logits - expected).abs().max()) <= bound
        ours = load_model(str(exported), device="cpu").decoder
        assert float((ours.logits(ours(tokens))[:, 0] - expected[0]).abs().max()) <= bound
    assert len(AutoTokenizer.from_pretrained(merged)) == model.config.vocab_size == 262


def test_padding_of_the_base_is_used_before_its_vocabulary_grows(here: Path) -> None:
    save_tiny_chat_model(here / "padded", hidden=32, head_dim=8, ffn=64)
    model = AutoModelForCausalLM.from_pretrained(here / "padded", dtype=torch.float32)
    model.resize_token_embeddings(264)
    model.save_pretrained(here / "padded")
    run = trained(here, recipe_of(here, "padded", LORA, "train.steps=2", base="padded"))
    assert run.prepared.config.vocab_size == 264
    weights = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(here / "padded"), run.export)
    assert weights.get_input_embeddings().weight.shape == (264, 32)
    # `model merge` changes rows in place.
    merged = merge_adapter(here / "padded", run.export, here / "padded-merged")
    assert merged.verdict.passed
    answer_of_ours(here / "padded-merged")


def test_dpo_compares_with_the_base_that_has_the_means(here: Path) -> None:
    keys = ("train.mode=dpo", "train.steps=12", f"data.train=[{{path: {here / 'pairs.jsonl'}}}]")
    for name, more in {"dpo": (), "dpo-lora": (LORA,)}.items():
        run = trained(here, recipe_of(here, name, *keys, *more))
        steps = events(run.prepared.folder, "step")
        assert steps[0]["loss"] == pytest.approx(0.6931, abs=1e-4), "the model is its own reference before step 0"
        assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    with pytest.raises(InputError, match="beyond the 258 of the base"):
        merge_adapter(here / "base", run.export, here / "dpo-merged")


@pytest.mark.parametrize("text", ["</s>", "a"])
def test_a_token_that_the_base_knows_is_refused_before_any_work(here: Path, text: str) -> None:
    with pytest.raises(RecipeError) as refused:
        trained(here, recipe_of(here, "refused", added=[text]))
    assert f"{text!r} is a token already (number " in refused.value.what
    assert refused.value.hint == "delete it: the tokenizer and the weights know it"
    assert "refused.yaml:3 (model.added_tokens.0)" in str(refused.value)
    assert not (here / "store" / "runs" / "refused").exists()


def test_a_recipe_without_the_key_is_the_run_that_it_was(here: Path) -> None:
    recipe = recipe_of(here, "plain", "model.added_tokens=null")
    assert "added_tokens" not in run_identity(recipe)["model"]
