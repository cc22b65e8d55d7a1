"""The verdict of a conversion: what it proves, how it is stored, and that nobody trains on a failed one unawares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from support.models.tiny_models import save_tiny_hf
from trainshed.checkpoints.convert.convert import convert_weights
from trainshed.checkpoints.formats import TargetFormat
from trainshed.checkpoints.hf.weights import HfWeights
from trainshed.checkpoints.prove.layerwise import measure_probe
from trainshed.checkpoints.prove.probe import read_probe
from trainshed.checkpoints.prove.verdict import VERDICT, Verdict, prove, read_verdict, write_verdict
from trainshed.errors import CorruptData, InputError
from trainshed.recipe import Recipe, parse_recipe
from trainshed.reporting import SILENT
from trainshed.workflow import open_run, prepare_run


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A model, and what a conversion that doubled one norm made of it."""
    for name in ("good", "bad"):
        save_tiny_hf("llama", tmp_path / name, seed=1)
    state = load_file(tmp_path / "bad" / "model.safetensors")
    state["model.norm.weight"] *= 2
    save_file(state, tmp_path / "bad" / "model.safetensors", {"format": "pt"})
    return tmp_path / "good", tmp_path / "bad"


def recipe_from(weights: Path, *overrides: str) -> Recipe:
    body = {
        "trainshed": 1,
        "name": "continued",
        "model": {"from": str(weights)},
        "data": {"synthetic": True, "sequence_length": 64},
        "train": {"steps": 1, "global_batch": 2, "precision": "fp32", "optimizer": {"lr": 1e-3}},
        "store": str(weights.parent / "store"),
    }
    return parse_recipe(yaml.safe_dump(body), overrides)


def test_a_verdict_says_what_was_compared_and_is_read_back_as_it_was_written(pair: tuple[Path, Path]) -> None:
    good, _ = pair
    verdict = prove(HfWeights(good), HfWeights(good))
    assert verdict.passed
    assert (verdict.tensors.compared, verdict.tensors.equal, verdict.tensors.first_difference) == (15, 15, None)
    assert verdict.logits["ran"]
    assert verdict.logits["greedy_equal"] == 128
    assert verdict.probe is not None
    assert verdict.versions["torch"] == torch.__version__
    write_verdict(good, verdict)
    assert read_verdict(good) == verdict
    assert prove(HfWeights(good), HfWeights(good)).to_bytes() == verdict.to_bytes(), "the same proof, the same bytes"


def test_logits_that_nobody_asked_for_are_told_with_the_reason(pair: tuple[Path, Path]) -> None:
    verdict = prove(HfWeights(pair[0]), HfWeights(pair[0]), logits=False)
    assert verdict.passed
    assert verdict.logits == {"ran": False, "reason": "nobody asked for them"}
    assert verdict.probe is None
    assert verdict.lines() == ["tensors  15 of 15 equal bit by bit", "logits   not run: nobody asked for them"]


def test_weights_whose_verdict_failed_are_refused_unless_the_recipe_says_to_take_them(
    pair: tuple[Path, Path],
) -> None:
    good, bad = pair
    first = prepare_run(recipe_from(bad))
    verdict = prove(HfWeights(good), HfWeights(bad))
    assert not verdict.passed
    assert verdict.logits["first_diverging"] == "layer 1", "what follows the last layer is told with it"
    write_verdict(bad, verdict)
    for start in (prepare_run, open_run):
        with pytest.raises(InputError) as caught:
            start(recipe_from(bad))
        assert "failed the proof of their conversion: `norm.weight`: 32 of 32 differ" in caught.value.what
        assert "logits DIFFERENT, apart from layer 1 on" in caught.value.what
        assert caught.value.hint is not None
        assert "`verdict: ignore` under `model`" in caught.value.hint
    warned: list[str] = []

    class Listening:
        note, task = SILENT.note, SILENT.task

        def warn(self, text: str) -> None:
            warned.append(text)

    run = prepare_run(recipe_from(bad, "model.verdict=ignore"), reporter=Listening())
    assert ["failed the proof" in text for text in warned] == [True]
    assert run.id == open_run(recipe_from(bad, "model.verdict=ignore")).id == first.id, "it is the same run"
    write_verdict(bad, prove(HfWeights(bad), HfWeights(bad)))
    assert prepare_run(recipe_from(bad)).id == first.id, "proven again, it goes on"


@pytest.mark.parametrize(
    "target",
    [TargetFormat("native"), TargetFormat("megatron"), TargetFormat("megatron", "torch", tp=2)],
    ids=["native", "torch_dist", "torch"],
)
def test_a_run_on_converted_weights_takes_the_loss_that_the_conversion_measured(
    target: TargetFormat, tmp_path: Path
) -> None:
    save_tiny_hf("llama", tmp_path / "hf", seed=1)
    made = convert_weights(str(tmp_path / "hf"), str(tmp_path / "made"), target)
    assert made.verdict.passed
    assert made.verdict.tensors.dtype is None, "nothing was cast"
    run = prepare_run(recipe_from(tmp_path / "made"))
    assert run.base is not None
    assert run.config == HfWeights(tmp_path / "hf").config
    stored = read_probe(run.base.folder)
    assert stored == made.verdict.probe
    with run.base.open() as weights:
        measured = measure_probe(weights)
    assert measured is not None
    assert stored is not None
    assert measured.loss == pytest.approx(stored.loss, abs=1e-5)


@pytest.mark.parametrize(("target", "step"), [("native", "checkpoints/step-00000000"), ("megatron", "release")])
def test_one_step_of_a_checkpoint_is_judged_with_the_whole(
    target: Literal["native", "megatron"], step: str, tmp_path: Path
) -> None:
    save_tiny_hf("llama", tmp_path / "hf", seed=1)
    convert_weights(str(tmp_path / "hf"), str(tmp_path / "made"), TargetFormat(target), logits=False)
    body = json.loads((tmp_path / "made" / VERDICT).read_text())
    (tmp_path / "made" / VERDICT).write_text(json.dumps(body | {"passed": False}))
    with pytest.raises(InputError, match="failed the proof"):
        prepare_run(recipe_from(tmp_path / "made" / step))


@pytest.mark.parametrize("body", [b"[]", b"{}", b"not json", b'{"schema": "another/1", "passed": true}'])
def test_a_file_that_is_no_verdict_is_an_error_and_not_an_absence(body: bytes, tmp_path: Path) -> None:
    assert read_verdict(tmp_path) is None
    (tmp_path / VERDICT).write_bytes(body)
    with pytest.raises(CorruptData, match="is not a verdict that this Trainshed reads"):
        read_verdict(tmp_path)
    with pytest.raises(CorruptData):
        Verdict.from_bytes(body, "somewhere")
