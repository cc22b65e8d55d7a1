"""Documents kept apart in megatron-core's words: all three flags, only where attention reads them, and back again."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import yaml

from support.recipes.foreign_tasks import task_of, written
from support.recipes.megatron_tasks import megatron_task
from trainshed.engines.document_flags import DOCUMENT_FLAGS
from trainshed.engines.importing import ImportedConfig, import_text
from trainshed.engines.launch import build_launch
from trainshed.engines.megatron import megatron_launch, read_megatron
from trainshed.errors import InputError

APART = "data.document_mask=true"
OWN_ATTENTION = "engine.args={transformer-impl: local, no-masked-softmax-fusion: true}"
NEMO = """
name: pretraining
model: {preset: llama3-8b, init: random}
tokenizer: hf://org/tokens@abc
data: {sequence_length: 4096, train: [{tokens: corpus_text_document}]}
train: {steps: 1000, global_batch: 512, optimizer: {lr: 3.0e-4}}
layout: {tp: 2}
engine: {name: nemo, version: "%s"}
"""
OLD_NEMO, NEW_NEMO = NEMO % "24.07", NEMO % "26.06"
UNMASKED_NEMO = "engine.args={model.transformer_engine: false, model.get_attention_mask_from_fusion: false}"


def megatron_words(*overrides: str, **options: Any) -> list[str]:
    return list(megatron_launch(megatron_task("llama3-8b", *overrides, **options)).arguments)


def nemo_files(text: str, *overrides: str) -> dict[str, str]:
    return dict(build_launch(task_of(written(text, overrides), nodes=1)).files)


def mistakes(imported: ImportedConfig) -> str:
    return " ".join(mistake.what for mistake in imported.mistakes)


@pytest.mark.parametrize(
    ("overrides", "more"),
    [
        (("engine.version=head",), "--dataloader-inter-document-masking"),
        (('engine.version="0.16.1"', OWN_ATTENTION), "--transformer-impl"),
    ],
)
def test_megatron_is_given_all_three_flags_and_reads_back_as_the_same_key(
    overrides: tuple[str, ...], more: str
) -> None:
    flags = {f"--{flag.replace('_', '-')}" for flag in DOCUMENT_FLAGS}
    words = megatron_words(APART, *overrides)
    assert flags | {more} <= set(words)
    imported = read_megatron(shlex.join(words), "again.txt")
    assert imported.recipe["data"]["document_mask"] is True
    assert "ignores the mask" not in mistakes(imported)
    without = megatron_words(*overrides)
    assert not (flags | {"--dataloader-inter-document-masking"}) & set(without)
    assert "document_mask" not in read_megatron(shlex.join(without), "again.txt").recipe["data"]


def test_a_mask_that_megatrons_own_attention_reads_is_made_as_a_tensor() -> None:
    assert "--no-create-attention-mask-in-dataloader" in megatron_words(APART, "engine.version=head")
    assert "--no-create-attention-mask-in-dataloader" not in megatron_words(
        APART, 'engine.version="0.16.1"', OWN_ATTENTION
    )


def test_nemo_is_given_all_three_flags_and_reads_back_as_the_same_key() -> None:
    file = nemo_files(OLD_NEMO, APART, UNMASKED_NEMO)["nemo.yaml"]
    data = yaml.safe_load(file)["model"]["data"]
    assert {flag: data[flag] for flag in DOCUMENT_FLAGS} == dict.fromkeys(DOCUMENT_FLAGS, True)
    imported = import_text(file, "nemo.yaml")
    assert imported.recipe["data"]["document_mask"] is True
    assert "ignores the mask" not in mistakes(imported)


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (('engine.version="0.16.1"',), "in Megatron-LM 0.16.1 TransformerEngine's attention ignores the mask"),
        (("engine.version=head", "engine.args={transformer-impl: local}"), "takes no packed documents"),
        (("data.eod=false",), "`data.eod` is False"),
        (("data.eod=<end>",), "`data.eod` is <end>"),
        (("tokenizer=null", "data.train=[{tokens: a}]"), "which only a tokenizer tells"),
        (("layout={cp: 2}",), "that cp: 2 cuts"),
    ],
)
def test_megatron_refuses_documents_that_it_would_not_keep_apart(overrides: tuple[str, ...], what: str) -> None:
    with pytest.raises(InputError) as caught:
        megatron_words(APART, *overrides)
    assert what in str(caught.value)
    assert "data.document_mask" in str(caught.value)


@pytest.mark.parametrize("text", [OLD_NEMO, NEW_NEMO])
def test_nemo_refuses_documents_whose_mask_transformer_engine_would_ignore(text: str) -> None:
    with pytest.raises(InputError, match="ignores the mask") as caught:
        nemo_files(text, APART)
    assert "data.document_mask" in str(caught.value)


def test_flags_that_had_no_effect_are_named_where_they_are_imported() -> None:
    words = shlex.join(megatron_words("engine.version=head"))
    imported = read_megatron(f"{words} --reset-position-ids --reset-attention-mask --eod-mask-loss", "seed.sh")
    assert imported.recipe["data"]["document_mask"] is True
    assert "ignores the mask that reset_attention_mask makes" in mistakes(imported)
    script = nemo_files(NEW_NEMO)["pretrain.py"]
    for flag in DOCUMENT_FLAGS:
        script = script.replace(f"{flag}=False", f"{flag}=True")
    assert "ignores the mask that reset_attention_mask makes" in mistakes(import_text(script, "pretrain.py"))


@pytest.mark.parametrize(
    "some",
    ["--eod-mask-loss", "--reset-position-ids --reset-attention-mask", "--dataloader-inter-document-masking"],
)
def test_some_of_the_flags_are_asked_about_and_not_taken_for_all(some: str) -> None:
    imported = read_megatron(f"{shlex.join(megatron_words('engine.version=head'))} {some}", "seed.sh")
    assert "document_mask" not in imported.recipe["data"]
    assert any("in none of them" in question for question in imported.open_questions)
    assert all(flag not in str(imported.recipe.get("engine")) for flag in ("eod-mask", "reset-"))


def test_boundaries_and_the_loss_at_the_end_of_documents_are_all_that_a_recipe_says() -> None:
    words = shlex.join(megatron_words("engine.version=head"))
    imported = read_megatron(f"{words} --dataloader-inter-document-masking --eod-mask-loss", "seed.sh")
    assert imported.recipe["data"]["document_mask"] is True
    assert "ignores the mask" not in mistakes(imported)
