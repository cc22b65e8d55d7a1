"""`export` of a run with `train.lora`: a folder of PEFT's with its tokenizer, or merged weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import orjson
import pytest
import torch

from support.models.lora_checkpoints import save_lora_checkpoint
from support.models.tiny_chat_model import save_tiny_chat_model
from support.models.tiny_models import hf_model
from support.runs.small_generators import Notes
from trainshed.checkpoints.base import BaseWeights, fetch_base
from trainshed.checkpoints.hf.weights import HfWeights
from trainshed.checkpoints.prove.verdict import read_verdict
from trainshed.data.tokenize.tokenizer import load_tokenizer
from trainshed.errors import InputError, RecipeError
from trainshed.recipe import Recipe, load_recipe, parse_recipe, to_yaml
from trainshed.run_folder import PREPARED_FILE, RECIPE_FILE
from trainshed.serve.loading import load_model
from trainshed.workflow.stages import export_run

TOKENS = torch.arange(3, 23)[None]
RECIPE = """
name: talks
model: {{from: {base}}}
tokenizer: {base}
data: {{sequence_length: 32, format: text, train: [{{path: x.jsonl}}]}}
train:
  mode: finetune
  steps: 3
  global_batch: 4
  optimizer: {{lr: 1.0e-3}}
  lora: {{rank: 4, alpha: 8, targets: [attn, mlp], dora: true}}
export: {{dtype: fp32}}
"""


@pytest.fixture
def run(tmp_path: Path) -> tuple[Recipe, Path, BaseWeights]:
    """A LoRA run as it is after training, in a store; the base is an artefact there."""
    folder = save_tiny_chat_model(tmp_path / "models" / "tiny")
    base = fetch_base(str(folder), tmp_path / "store" / "artefacts")
    recipe = parse_recipe(RECIPE.format(base=folder))
    assert recipe.train.lora is not None
    with HfWeights(folder) as weights:
        config = weights.config
    run = tmp_path / "store" / "runs" / "talks" / "0123abcd"
    save_lora_checkpoint(run, config, recipe.train.lora, folder, sha256=base.sha256)
    (run / RECIPE_FILE).write_text(RECIPE.format(base=folder))
    (run / PREPARED_FILE).write_bytes(orjson.dumps({"base": str(base.folder), "data": {"sources": []}}))
    return recipe, run, base


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return hf_model(folder)(TOKENS).logits


def test_adapters_become_a_folder_of_pefts_that_is_served_at_once(run: tuple[Recipe, Path, BaseWeights]) -> None:
    recipe, folder, base = run
    target = Path(export_run(recipe, folder, tokenizer=load_tokenizer(str(base.files))))
    assert target == folder / "export"
    names = {path.name for path in target.iterdir()}
    assert names >= {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert not names & {"config.json", "chat_template.jinja"}
    verdict = read_verdict(target)
    assert verdict is not None
    assert verdict.passed
    body = json.loads((target / "adapter_config.json").read_text())
    assert body["base_model_name_or_path"] == str(base.files)
    notes = Notes()
    model = load_model(str(target), device="cpu", reporter=notes)
    assert any(f"its base is {base.files}" in text for text in notes.said)
    assert model.name == "talks"
    assert model.tokenizer is not None


@pytest.mark.parametrize("merge", [False, True])
def test_a_run_and_its_export_are_asked_by_the_template_of_its_conversations(
    run: tuple[Recipe, Path, BaseWeights], merge: bool
) -> None:
    _, folder, base = run
    text = "{% for m in messages %}[{{ m.content }}{% if m.role == 'assistant' %}{{ bos_token }}{% endif %}{% endfor %}"
    (folder / "own.jinja").write_text(text)
    keys = ["data.format=chat", "data.template=own.jinja", f"export.merge={str(merge).lower()}"]
    recipe = load_recipe(str(folder / RECIPE_FILE), keys)
    (folder / RECIPE_FILE).write_text(to_yaml(recipe))
    words = load_tokenizer(str(base.files))
    begin, end = words.beginning_of_document().id, words.end_of_document().id
    trained = load_model(str(folder), device="cpu")
    exported = load_model(export_run(recipe, folder, tokenizer=words), device="cpu")
    for model in (trained, exported):
        assert model.tokenizer is not None
        assert model.tokenizer.decode(model.tokenizer.encode_chat([{"role": "user", "content": "hi"}])) == "[hi"
        assert model.tokenizer.eos_tokens == {begin, end}, "its answers end with <s>"
    files = folder / "export"
    assert (files / "chat_template.jinja").read_text() == text
    assert "chat_template" not in json.loads((files / "tokenizer_config.json").read_text())
    settings = json.loads((files / "generation_config.json").read_text())
    assert settings == {"eos_token_id": [end, begin], "bos_token_id": begin}


def test_merged_weights_are_those_that_peft_merges(run: tuple[Recipe, Path, BaseWeights]) -> None:
    from peft import PeftModel

    recipe, folder, base = run
    adapter = Path(export_run(recipe, folder))
    theirs = PeftModel.from_pretrained(hf_model(base.files), adapter).eval()
    with torch.no_grad():
        expected = theirs(TOKENS).logits
    shutil.rmtree(adapter)
    overrides = ["export.merge=true"]
    merged = parse_recipe((folder / RECIPE_FILE).read_text(), overrides)
    words = load_tokenizer(str(base.files))
    target = Path(export_run(merged, folder, tokenizer=words))
    assert (target / "config.json").is_file()
    assert (target / "tokenizer.json").is_file()
    torch.testing.assert_close(logits(target), expected, rtol=0, atol=1e-5)
    verdict = read_verdict(target)
    assert verdict is not None
    assert verdict.passed
    assert verdict.logits["passed"]
    shutil.rmtree(target)
    megatron = parse_recipe((folder / RECIPE_FILE).read_text(), [*overrides, "export.format=megatron"])
    assert (Path(export_run(megatron, folder)) / "latest_checkpointed_iteration.txt").is_file()


def test_a_base_that_has_changed_since_is_not_merged(run: tuple[Recipe, Path, BaseWeights], tmp_path: Path) -> None:
    recipe, folder, base = run
    save_tiny_chat_model(tmp_path / "other", max_positions=32)
    other = fetch_base(str(tmp_path / "other"), tmp_path / "store" / "artefacts")
    (folder / PREPARED_FILE).write_bytes(orjson.dumps({"base": str(other.folder), "data": {"sources": []}}))
    with pytest.raises(InputError, match="not those that these adapters were trained on"):
        export_run(parse_recipe((folder / RECIPE_FILE).read_text(), ["export.merge=true"]), folder)
    assert Path(export_run(recipe, folder)).is_dir(), "adapters alone do not need it"
    assert base.files.is_dir()


@pytest.mark.parametrize(
    ("overrides", "key", "what", "hint"),
    [
        (["train.lora=null", "export.merge=true"], "export.merge", "there is nothing to merge", "delete it"),
        (["export.format=megatron"], "export.format", "adapters are exported for PEFT", "`merge: true`"),
        (["serve={engine: vllm}"], "export", "vllm is given whole weights", "`export: {merge: true}`"),
        (["serve={adapters: {talks: /a}}"], "serve.adapters.talks", "themselves have this name", "choose another"),
        (["serve={adapters: {'a=b': /a}}"], "serve.adapters", "`a=b` is not a name of an adapter", "letters"),
        (
            ["serve={engine: vllm, adapters: {a: 's3://b/a'}}", "export.merge=true"],
            "serve.adapters.a",
            "vLLM reads adapters from a path",
            "fetch it",
        ),
    ],
)
def test_what_cannot_become_of_adapters_is_refused_where_it_is_written(
    overrides: list[str], key: str, what: str, hint: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(RECIPE.format(base="hf://org/name"), overrides)
    assert what in caught.value.what
    assert hint in (caught.value.hint or "")
    assert key in (caught.value.where or "")
