"""The weights of our own checkpoints, in training or alone: any box of them, or what is wrong with them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from support.models.tiny_models import VARIANTS, save_tiny_hf
from support.runs.checkpoint_parts import RUN, Ranks, by_rows
from trainshed.checkpoints.hf.weights import HfWeights
from trainshed.checkpoints.native.folder import checkpoints_folder, complete_checkpoints, find_checkpoint
from trainshed.checkpoints.native.index import read_index
from trainshed.checkpoints.native.weights import NativeWeights, NativeWeightsWriter
from trainshed.checkpoints.weights import Weights
from trainshed.errors import CorruptData, InputError, NotFound
from trainshed.models.parameters import Parameter, parameters
from trainshed.storage import LocalStore, sha256_of
from trainshed.storage.attempts import take_attempt


def whole(weights: Weights, parameter: Parameter, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return weights.read(parameter, [0] * len(parameter.shape), parameter.shape, dtype)


def written(source: HfWeights, folder: Path, unit_bytes: int = 20_000) -> NativeWeightsWriter:
    writer = NativeWeightsWriter(source.config, dtype=torch.float32, unit_bytes=unit_bytes)
    for unit in writer.output_files():
        (folder / unit.path).parent.mkdir(parents=True, exist_ok=True)
        writer.write(unit, source, folder / unit.path, lambda _: None)
    writer.finish(folder, [])
    return writer


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_alone_are_a_checkpoint_that_anyone_reads(variant: str, tmp_path: Path) -> None:
    config = save_tiny_hf(variant, tmp_path / "hf", seed=1)
    source = HfWeights(tmp_path / "hf")
    assert len(written(source, tmp_path / "made").output_files()) > 3
    (found,) = complete_checkpoints(LocalStore(tmp_path), checkpoints_folder("made"))
    found.manifest.verify_files(LocalStore(tmp_path), found.path)
    with NativeWeights(LocalStore(tmp_path), "made") as weights:
        assert (weights.config, weights.dtypes) == (config, ["float32"])
        stock = {f"model.{each.name}": torch.empty(each.shape) for each in parameters(config)}
        dcp.load(stock, checkpoint_id=tmp_path / found.path)
        for each in parameters(config):
            exact = whole(source, each)
            assert torch.equal(whole(weights, each), exact)
            assert torch.equal(stock[f"model.{each.name}"], exact)
            corner = [length // 2 for length in each.shape]
            box = [length - start for length, start in zip(each.shape, corner, strict=True)]
            inside = tuple(slice(start, None) for start in corner)
            assert torch.equal(weights.read(each, corner, box, torch.bfloat16), exact[inside].bfloat16())


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, HfWeights]:
    """A run whose three ranks have saved two steps of a training, an optimiser's state beside the weights."""
    config = save_tiny_hf("qwen3", tmp_path / "hf", seed=1)
    source = HfWeights(tmp_path / "hf")
    attempt = take_attempt(LocalStore(tmp_path), RUN)
    ranks = Ranks(attempt, 3, spec={"model": config.model_dump(mode="json", exclude_none=True)})
    for step in (1, 2):
        state = {f"model.{each.name}": step * whole(source, each) for each in parameters(config)}
        state["optimizer.momentum.norm.weight"] = torch.ones(config.hidden)
        assert ranks.save(step, by_rows(state, 3)) == [None] * 3
    return tmp_path, source


def test_of_a_run_the_latest_checkpoint_is_read_and_of_a_step_that_one(run: tuple[Path, HfWeights]) -> None:
    folder, source = run
    store = LocalStore(folder)
    every = list(parameters(source.config))
    addresses = {RUN: 2, f"{RUN}/checkpoints": 2, f"{RUN}/checkpoints/step-00000001": 1}
    for path, step in addresses.items():
        with NativeWeights(store, path) as weights:
            assert weights.checkpoint.step == step
            assert all(torch.equal(whole(weights, each), step * whole(source, each)) for each in every), path


def test_a_folder_without_a_complete_checkpoint_is_said_to_be_none(run: tuple[Path, HfWeights]) -> None:
    with pytest.raises(NotFound, match="no complete checkpoint"):
        NativeWeights(LocalStore(run[0]), "hf")


def test_bytes_that_are_not_those_written_are_found(run: tuple[Path, HfWeights]) -> None:
    folder, _ = run
    for file in (folder / RUN / "checkpoints" / "step-00000002").glob("*.distcp"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    weights = NativeWeights(LocalStore(folder), RUN)
    each_is_read = [lambda each=each: whole(weights, each) for each in parameters(weights.config)]
    with pytest.raises(CorruptData, match="are not those written"):
        [read() for read in each_is_read]


def test_another_model_is_refused_by_name(run: tuple[Path, HfWeights]) -> None:
    folder, source = run
    store = LocalStore(folder)
    with pytest.raises(InputError, match=r"`layers.2.attention.norm.weight` is missing"):
        NativeWeights(store, RUN, source.config.model_copy(update={"layers": 3}))
    with pytest.raises(InputError, match=r"`layers.1.attention.norm.weight` is left over"):
        NativeWeights(store, RUN, source.config.model_copy(update={"layers": 1}))
    with pytest.raises(InputError, match=r"`embedding.weight` is \[96, 48\], not \[97, 48\]"):
        NativeWeights(store, RUN, source.config.model_copy(update={"vocab_size": 97}))
    manifest = folder / RUN / "checkpoints" / "step-00000002" / "manifest.json"
    body = json.loads(manifest.read_text())
    del body["spec"]["model"]
    manifest.write_text(json.dumps(body))
    with pytest.raises(InputError, match="does not say what model it is of"):
        NativeWeights(store, RUN)


def test_a_checkpoint_of_before_is_read_its_items_saved_by_torch_and_hashed_with_sha256(
    run: tuple[Path, HfWeights],
) -> None:
    folder, source = run
    step = folder / RUN / "checkpoints" / "step-00000002"
    stored = read_index(LocalStore(folder), find_checkpoint(LocalStore(folder), RUN))
    manifest = json.loads((step / "manifest.json").read_text())
    facts = manifest["facts"]
    (step / facts.pop("pieces")).unlink()
    del facts["pieces_header"]
    names = sorted(entry["path"] for entry in manifest["files"] if entry["path"].endswith(".distcp"))
    files = [bytearray() for _ in names]
    tensors: dict[str, Any] = {}
    for name, tensor in stored.items():
        items = []
        for item in tensor.items:
            saved, file = io.BytesIO(), names.index(item.file)
            now = (step / item.file).read_bytes()[item.start : item.start + item.length]
            torch.save(torch.load(io.BytesIO(now)), saved)
            place = [len(files[file]), len(saved.getvalue()), sha256_of(saved.getvalue())]
            items.append([item.offset, item.sizes, file, *place])
            files[file] += saved.getvalue()
        tensors[name] = {"shape": tensor.shape, "dtype": tensor.dtype, "items": items}
    for name, data in zip(names, files, strict=True):
        (step / name).write_bytes(data)
    (step / "pieces-0001.json").write_text(json.dumps({"format": 1, "files": names, "tensors": tensors}))
    facts |= {"format": 1, "pieces": "pieces-0001.json"}
    for entry in manifest["files"]:
        entry["path"] = entry["path"].replace("pieces-0001.bin", "pieces-0001.json")
    for entry in manifest["files"]:
        data = (step / entry["path"]).read_bytes()
        del entry["checksum"]
        entry |= {"size": len(data), "sha256": sha256_of(data)}
    manifest["totals"]["bytes"] = sum(entry["size"] for entry in manifest["files"])
    (step / "manifest.json").write_text(json.dumps(manifest | {"format": 1}))
    with NativeWeights(LocalStore(folder), RUN) as weights:
        weights.checkpoint.manifest.verify_files(LocalStore(folder), weights.checkpoint.path)
        for each in parameters(source.config):
            assert torch.equal(whole(weights, each), 2 * whole(source, each))
            with weights.borrow(each, [0] * len(each.shape), each.shape, torch.float32) as box:
                assert torch.equal(box, 2 * whole(source, each))


def test_a_unit_whose_record_is_lost_is_told_from_its_bytes(tmp_path: Path) -> None:
    save_tiny_hf("llama", tmp_path / "hf", seed=1)
    source = HfWeights(tmp_path / "hf")
    written(source, tmp_path / "whole")
    writer = NativeWeightsWriter(source.config, dtype=torch.float32, unit_bytes=20_000)
    for number, unit in enumerate(writer.output_files()):
        file = tmp_path / "torn" / unit.path
        file.parent.mkdir(parents=True, exist_ok=True)
        writer.write(unit, source, file, lambda _: None)
        record = file.with_name(f"{file.name}.part")
        record.unlink() if number else record.write_bytes(b"")
    writer.finish(tmp_path / "torn", [])
    made = {
        name: {str(file.relative_to(tmp_path / name)): file.read_bytes() for file in (tmp_path / name).rglob("*.*")}
        for name in ("whole", "torn")
    }
    assert made["torn"] == made["whole"]
