"""Conversions: any format into any other and back, proven, in one piece or not at all."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.models.tiny_models import hf_model, save_tiny_hf
from trainshed.checkpoints.convert.convert import Conversion, convert_weights
from trainshed.checkpoints.formats import TargetFormat, detect_format, open_weights
from trainshed.checkpoints.hf import writer as hf_writer
from trainshed.checkpoints.prove.verdict import read_verdict
from trainshed.cli import run_cli
from trainshed.errors import CorruptData, InputError, NoSpace, NotFound, TokenizerError, TrainshedError
from trainshed.serve.loading import load_model
from trainshed.storage import LocalStore, Manifest

TOKENIZER = {"tokenizer.json": b'{"a": 1}', "tokenizer_config.json": b"{}", "chat_template.jinja": b"{{ messages }}"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model as repositories hold it."""
    return saved("llama", tmp_path / "source")


def saved(variant: str, folder: Path) -> Path:
    save_tiny_hf(variant, folder, seed=1)
    for name, data in TOKENIZER.items():
        (folder / name).write_bytes(data)
    return folder


def made(source: Path, target: Path, to: TargetFormat, **options: Any) -> Conversion:
    done = convert_weights(str(source), str(target), to, **{"logits": False, **options})
    assert done.verdict.passed
    return done


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


LAYOUTS = {"qwen2": {"tp": 2, "pp": 2}, "qwen3_moe": {"tp": 2, "ep": 2}, "gpt2": {"pp": 2}}


@pytest.mark.parametrize("variant", LAYOUTS)
def test_through_every_format_and_back_nothing_has_changed(variant: str, tmp_path: Path) -> None:
    source = saved(variant, tmp_path / "source")
    targets = {
        "megatron-torch_dist": TargetFormat("megatron"),
        "megatron-torch": TargetFormat("megatron", "torch", **LAYOUTS[variant]),
        "native": TargetFormat("native"),
        "hf": TargetFormat("hf"),
    }
    here = source
    for name, to in targets.items():
        made(here, tmp_path / name, to)
        here = tmp_path / name
        assert detect_format(here) == name
        Manifest.read(LocalStore(here), "manifest.json").verify_files(LocalStore(here))
    before, after = (load_file(each / "model.safetensors") for each in (source, here))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((source / "config.json").read_text()) == json.loads((here / "config.json").read_text())
    for name in (*TOKENIZER, "generation_config.json"):
        assert (source / name).read_bytes() == (here / name).read_bytes(), name
    assert leftovers(tmp_path) == []


def test_the_verdict_lies_beside_the_weights_and_the_export_loads_in_transformers(source: Path, tmp_path: Path) -> None:
    done = convert_weights(str(source), str(tmp_path / "native"), TargetFormat("native"), dtype="bf16")
    assert done.dtype == "bfloat16"
    assert done.verdict == read_verdict(tmp_path / "native")
    assert (done.verdict.tensors.compared, done.verdict.tensors.dtype) == (done.verdict.tensors.equal, "bfloat16")
    assert done.verdict.logits["ran"]
    made(tmp_path / "native", tmp_path / "back", TargetFormat("hf"))
    tokens = torch.arange(24)[None]
    rounded = hf_model(source)
    for weight in rounded.parameters():
        weight.data = weight.data.bfloat16().float()
    assert torch.equal(hf_model(tmp_path / "back")(tokens).logits, rounded(tokens).logits)


def test_a_conversion_that_is_done_is_proven_again_and_not_made_again(source: Path, tmp_path: Path) -> None:
    first = made(source, tmp_path / "native", TargetFormat("native"))
    file = tmp_path / "native" / "manifest.json"
    before = file.stat().st_mtime_ns
    again = made(source, tmp_path / "native", TargetFormat("native"))
    assert (again.kept, again.bytes, file.stat().st_mtime_ns) == (first.units, first.bytes, before)
    with pytest.raises(InputError, match=r"there is the conversion of .*source already"):
        made(source, tmp_path / "native", TargetFormat("native"), dtype="bf16")
    state = load_file(source / "model.safetensors")
    save_file({name: -each for name, each in state.items()}, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="a conversion of what was once at"):
        made(source, tmp_path / "native", TargetFormat("native"))
    with pytest.raises(InputError, match="something that is not a finished conversion"):
        made(tmp_path / "native", source.parent, TargetFormat("hf"))
    assert leftovers(tmp_path) == []


def test_weights_stored_in_several_dtypes_become_one_that_holds_them(source: Path, tmp_path: Path) -> None:
    state = load_file(source / "model.safetensors")
    mixed = {name: each if "norm" in name else each.bfloat16() for name, each in state.items()}
    save_file(mixed, source / "model.safetensors", {"format": "pt"})
    assert made(source, tmp_path / "native", TargetFormat("native")).dtype == "float32"


def test_a_tokenizer_that_is_named_goes_with_the_weights(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_bytes(b'{"b": 2}')
    (other / "generation_config.json").write_bytes(b'{"eos_token_id": 5}')
    made(source, tmp_path / "hf", TargetFormat("hf"), tokenizer=str(other))
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == b'{"b": 2}'
    assert not (tmp_path / "hf" / "chat_template.jinja").exists(), "it was the other tokenizer's"
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == 5
    with pytest.raises(TokenizerError, match="there is no tokenizer here"):
        made(source, tmp_path / "none", TargetFormat("hf"), tokenizer=str(tmp_path))


def test_a_target_that_was_begun_goes_on_and_a_changed_source_starts_anew(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_writer, "SHARD_BYTES", 20_000)
    whole = made(source, tmp_path / "whole", TargetFormat("hf"))
    with monkeypatch.context() as broken:
        broken.setattr(hf_writer.HfWeightsWriter, "finish", lambda *_: (_ for _ in ()).throw(OSError(28, "no space")))
        with pytest.raises(NoSpace, match="the disk is full"):
            made(source, tmp_path / "target", TargetFormat("hf"))
    assert not (tmp_path / "target").exists()
    damaged = tmp_path / ".target.converting" / "target" / "model-00002-of-00005.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    again = made(source, tmp_path / "target", TargetFormat("hf"))
    assert (again.units, again.kept) == (whole.units, whole.units - 1), "a file that was damaged is made again"
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "target" / path.name).read_bytes(), path.name

    (tmp_path / ".next.converting").mkdir()
    shutil.copytree(tmp_path / "whole", tmp_path / ".next.converting" / "target")
    (tmp_path / ".next.converting" / "spec.json").write_text("{}")
    assert made(source, tmp_path / "next", TargetFormat("hf")).kept == 0
    assert leftovers(tmp_path) == []


def truncate(source: Path) -> None:
    os.truncate(source / "model.safetensors", 5000)


def change_config(source: Path, **keys: Any) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | keys))


def change_tensors(source: Path, **tensors: torch.Tensor | None) -> None:
    state = load_file(source / "model.safetensors") | tensors
    kept = {name: each for name, each in state.items() if each is not None}
    save_file(kept, source / "model.safetensors", {"format": "pt"})


def lose_a_shard(source: Path) -> None:
    save_tiny_hf("llama", source, seed=1, shard_bytes=20_000)
    (source / "model.safetensors").unlink()
    (source / "model-00002-of-00005.safetensors").unlink()


NORM = "model.norm.weight"
BROKEN = {
    "a missing shard": (lose_a_shard, CorruptData, "model-00002-of-00005.safetensors: is named by the index and not"),
    "a truncated file": (truncate, CorruptData, "is cut short: 5000 bytes"),
    "a dtype nobody reads": (lambda s: change_tensors(s, **{NORM: torch.ones(32).byte()}), InputError, "is U8"),
    "an unknown family": (lambda s: change_config(s, model_type="bert"), InputError, '"bert"` is not a family here'),
    "a tensor left over": (lambda s: change_tensors(s, x=torch.ones(1)), InputError, "x left over"),
    "a tensor missing": (lambda s: change_tensors(s, **{NORM: None}), InputError, f"{NORM} missing"),
    "nothing at all": (lambda s: shutil.rmtree(s), NotFound, "there are no weights that anyone here can read"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_source_is_an_error_by_name_and_leaves_nothing(what: str, source: Path, tmp_path: Path) -> None:
    breaking, kind, match = BROKEN[what]
    breaking(source)
    with pytest.raises(kind, match=match):
        made(source, tmp_path / "target", TargetFormat("native"))
    assert not (tmp_path / "target").exists()
    assert leftovers(tmp_path) == []


def test_a_tied_head_that_differs_from_the_embedding_is_never_lost(tmp_path: Path) -> None:
    source, differs = saved("qwen2", tmp_path / "source"), saved("qwen2", tmp_path / "differs")
    state = load_file(differs / "model.safetensors")
    save_file(
        {**state, "lm_head.weight": state["model.embed_tokens.weight"] + 1},
        differs / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(InputError, match="are one, and they differ"):
        made(differs, tmp_path / "native", TargetFormat("native"))
    with pytest.raises(InputError, match="are one, and they differ"):
        load_model(str(differs), device="cpu")
    assert run_cli(["model", "compare", str(source), str(differs)]) == 2


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"eos_token_id": "</s>"}, '`eos_token_id: "</s>"` is not the id of a token'),
        ({"eos_token_id": []}, "is not the id of a token"),
        ({"rope_parameters": None, "rope_theta": None}, "transformers cannot build this model: TypeError"),
    ],
)
def test_a_config_that_transformers_cannot_use_is_named(
    keys: dict[str, Any], message: str, source: Path, tmp_path: Path
) -> None:
    config = json.loads((source / "config.json").read_bytes())
    (source / "config.json").write_text(json.dumps(config | keys))
    (source / "generation_config.json").unlink(missing_ok=True)
    with pytest.raises(InputError, match=message):
        made(source, tmp_path / "native", TargetFormat("native"), logits=True)


def test_a_file_that_breaks_while_it_is_read_ends_the_conversion(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_short(descriptor: int, pieces: object, start: int) -> int:
        return 0

    monkeypatch.setattr(os, "preadv", cut_short)
    with pytest.raises(CorruptData, match="ends before"):
        made(source, tmp_path / "target", TargetFormat("megatron"))
    assert not (tmp_path / "target").exists()


def test_a_full_disk_is_seen_before_and_nothing_is_written(source: Path, tiny_disk: Path) -> None:
    (tiny_disk / "ballast").write_bytes(bytes(960 * 1024))
    with pytest.raises(NoSpace, match=r"the conversion needs 0\.\d+ GB more, and 0\.0\d+ GB are free"):
        made(source, tiny_disk / "target", TargetFormat("hf"))
    assert not (tiny_disk / "target").exists()
    (tiny_disk / "ballast").unlink()
    made(source, tiny_disk / "target", TargetFormat("hf"))


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"to": "hf", "tp": 2}, "hf has no layout in its files, so there is nothing for --tp 2"),
        ({"to": "native", "pp": 2}, "native has no layout"),
        ({"to": "native", "format": "torch"}, "--format torch: that is Megatron's"),
        ({"to": "megatron", "format": "torch", "tp": 0}, "--tp 0 is not a size"),
    ],
)
def test_options_that_would_do_nothing_are_refused(keys: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        TargetFormat(**keys)


def test_a_layout_for_torch_dist_is_told_to_change_nothing() -> None:
    remark = TargetFormat("megatron", tp=8, pp=2).layout_note
    assert remark is not None
    assert remark.startswith("torch_dist has no layout in its files: --tp 8, --pp 2 changes nothing")
    assert TargetFormat("megatron").layout_note is None
    assert TargetFormat("megatron", format="torch", tp=8).layout_note is None


def test_places_nobody_can_write_or_read_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing can be written there"):
        convert_weights(str(source), "hf://org/name", TargetFormat("native"))
    with pytest.raises(InputError, match="say their vocabulary themselves"):
        made(source, tmp_path / "target", TargetFormat("native"), vocab_size=96)
    with pytest.raises(TrainshedError, match="no weights that anyone here can read"):
        open_weights(tmp_path)


@pytest.mark.s3
def test_between_buckets_files_go_up_as_they_are_done_and_the_manifest_last(
    source: Path, s3_bucket: str, tmp_path: Path
) -> None:
    from trainshed.storage import copy_tree, open_folder

    copy_tree(str(source), f"s3://{s3_bucket}/model")
    scratch = tmp_path / "scratch"
    for here, there, to in (("model", "native", TargetFormat("native")), ("native", "back", TargetFormat("hf"))):
        addresses = [f"s3://{s3_bucket}/{each}" for each in (here, there)]
        done = convert_weights(*addresses, to, logits=False, scratch=scratch)
        assert done.verdict.passed
        store = open_folder(addresses[1])
        Manifest.read(store, "manifest.json").verify_files(store)
        assert not any(scratch.rglob("*.safetensors"))
        again = convert_weights(*addresses, to, logits=False, scratch=scratch)
        assert (again.kept, again.verdict) == (done.units, done.verdict)
    copy_tree(f"s3://{s3_bucket}/back", str(tmp_path / "back"))
    before, after = (load_file(each / "model.safetensors") for each in (source, tmp_path / "back"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_a_run_exports_is_made_anew_when_its_weights_have_changed(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    saved("llama", source)
    first = convert_weights(str(source), str(target), TargetFormat("hf"), replace=True, logits=False)
    assert first.verdict.passed
    # The same once more is found.
    before = (target / "manifest.json").read_bytes()
    convert_weights(str(source), str(target), TargetFormat("hf"), replace=True, logits=False)
    assert (target / "manifest.json").read_bytes() == before
    save_tiny_hf("llama", source, seed=2)
    with pytest.raises(InputError, match="already"):
        convert_weights(str(source), str(target), TargetFormat("hf"))
    assert convert_weights(str(source), str(target), TargetFormat("hf"), replace=True, logits=False).verdict.passed
    new, stored = (load_file(folder / "model.safetensors") for folder in (source, target))
    assert all(torch.equal(new[name], stored[name]) for name in new)
