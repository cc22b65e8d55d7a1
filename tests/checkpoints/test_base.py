"""Base weights as an artefact: fetched once and proven, or used where they lie and never changed unnoticed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.models.tiny_models import save_tiny_hf
from support.servers.hub_server import COMMIT, HubServer, running
from trainshed.checkpoints.base import BaseWeights, fetch_base, find_base
from trainshed.checkpoints.convert.convert import convert_weights
from trainshed.checkpoints.formats import TargetFormat
from trainshed.checkpoints.native.folder import BestPointer, LatestPointer, find_checkpoint
from trainshed.errors import AddressError, CorruptData, InputError, NotFound
from trainshed.models.parameters import parameter_count
from trainshed.recipe import ModelConfig
from trainshed.storage import LocalStore, copy_tree

WANTED = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
UNWANTED = ("original/consolidated.00.pth", "consolidated.safetensors", "pytorch_model.bin", "onnx/model.safetensors")


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, ModelConfig]:
    """A model as repositories hold it, with all that is not needed."""
    folder = tmp_path / "model"
    config = save_tiny_hf("llama", folder, seed=1)
    (folder / "tokenizer.json").write_text("{}")
    for name in UNWANTED:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"large and not needed")
    return folder, config


@pytest.fixture
def hub(model: tuple[Path, ModelConfig], no_cloud: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The Hub with that model as org/name."""
    store = LocalStore(model[0])
    with running() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        server.repos["org/name"] = {info.path: store.read(info.path) for info in store.list()}
        yield server


def test_weights_of_the_hub_become_an_artefact_and_are_fetched_once(
    hub: HubServer, model: tuple[Path, ModelConfig], tmp_path: Path
) -> None:
    base = fetch_base("hf://org/name", tmp_path / "artefacts")
    assert {path.name for path in base.files.iterdir()} - {".trainshed"} == WANTED
    assert base.files == base.folder / "files"
    assert base.folder.parent == tmp_path / "artefacts" / "weights"
    assert base.manifest.kind == "weights"
    assert base.manifest.spec["from"] == f"hf://org/name@{COMMIT}"
    assert base.manifest.facts == {"family": "llama", "parameters": parameter_count(model[1]), "dtypes": ["float32"]}
    assert {entry.path for entry in base.manifest.files} == WANTED
    assert base.open().config == model[1]
    requests = sum(hub.requests.values())
    pinned = f"hf://org/name@{COMMIT}"
    assert fetch_base(pinned, tmp_path / "artefacts") == base
    assert find_base(pinned, tmp_path / "artefacts") == base
    assert BaseWeights.from_folder(base.folder) == base
    assert sum(hub.requests.values()) == requests, "a commit that is here needs no network"


def test_weights_that_do_not_fit_their_config_never_become_an_artefact(hub: HubServer, tmp_path: Path) -> None:
    config = json.loads(hub.repos["org/name"]["config.json"])
    hub.repos["org/name"]["config.json"] = json.dumps(config | {"num_hidden_layers": 3}).encode()
    with pytest.raises(InputError, match=r"model.layers.2.input_layernorm.weight, .* missing"):
        fetch_base("hf://org/name", tmp_path / "artefacts")
    with pytest.raises(NotFound, match="are not fetched yet"):
        find_base("hf://org/name", tmp_path / "artefacts")


def test_weights_that_are_not_accepted_never_become_an_artefact(hub: HubServer, tmp_path: Path) -> None:
    hub.repos["org/name"]["verdict.json"] = b"failed"

    def refuse(files: Path) -> None:
        raise InputError((files / "verdict.json").read_text())

    for _ in range(2):
        with pytest.raises(InputError, match="failed"):
            fetch_base("hf://org/name", tmp_path / "artefacts", accept=refuse)
    with pytest.raises(NotFound, match="are not fetched yet"):
        find_base("hf://org/name", tmp_path / "artefacts")
    assert {entry.path for entry in fetch_base("hf://org/name", tmp_path / "artefacts").manifest.files} > WANTED


def test_an_artefact_that_lost_a_file_is_an_error_and_not_an_absence(hub: HubServer, tmp_path: Path) -> None:
    base = fetch_base("hf://org/name", tmp_path / "artefacts")
    (base.files / "model.safetensors").unlink()
    with pytest.raises(CorruptData, match=r"missing: model.safetensors"):
        fetch_base("hf://org/name", tmp_path / "artefacts")


def test_a_local_folder_is_used_where_it_lies_and_hashed_once(
    model: tuple[Path, ModelConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = fetch_base(str(model[0]), tmp_path / "artefacts")
    assert base.files == model[0]
    assert {path.name for path in base.folder.iterdir()} == {"manifest.json", "seen.json"}
    assert {entry.path for entry in base.manifest.files} == WANTED
    monkeypatch.chdir(tmp_path)
    read: list[str] = []
    original = LocalStore.stream

    def stream(self: LocalStore, path: str, *rest: int) -> Iterator[bytes]:
        read.append(path)
        return original(self, path, *rest)

    monkeypatch.setattr(LocalStore, "stream", stream)
    assert fetch_base("./model/", tmp_path / "artefacts") == base
    assert read == []
    os.utime(model[0] / "tokenizer.json", ns=(1, 1))
    assert fetch_base("model", tmp_path / "artefacts") == base
    assert read == ["tokenizer.json"], "touched, so hashed again, and found to be the same"
    assert fetch_base("model", tmp_path / "artefacts") == base
    assert read == ["tokenizer.json"]


def test_a_local_file_that_has_changed_is_an_error_that_names_it(
    model: tuple[Path, ModelConfig], tmp_path: Path
) -> None:
    base = fetch_base(str(model[0]), tmp_path / "artefacts")
    weights = bytearray((model[0] / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model[0] / "model.safetensors").write_bytes(weights)
    with pytest.raises(CorruptData, match=r"changed since they were first used: model.safetensors") as caught:
        fetch_base(str(model[0]), tmp_path / "artefacts")
    assert str(base.folder) in str(caught.value.hint)
    (model[0] / "model.safetensors").write_bytes(weights + b"more")
    with pytest.raises(CorruptData, match="of another size"):
        find_base(str(model[0]), tmp_path / "artefacts")


@pytest.mark.parametrize(
    ("address", "kind", "message"),
    [
        ("https://host/model", AddressError, "a web server lists none"),
        ("nowhere/at/all", NotFound, "there is no such folder"),
        (".", NotFound, "there are no weights that anyone here can read"),
    ],
)
def test_addresses_without_weights(
    address: str, kind: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind, match=message):
        fetch_base(address, tmp_path / "artefacts")


@pytest.mark.s3
def test_weights_in_a_bucket_are_known_by_the_versions_of_their_files(
    model: tuple[Path, ModelConfig], s3_bucket: str, tmp_path: Path
) -> None:
    address = f"s3://{s3_bucket}/model"
    copy_tree(str(model[0]), address)
    base = fetch_base(address, tmp_path / "artefacts")
    assert base.open().config == model[1]
    assert find_base(address, tmp_path / "artefacts") == base
    save_tiny_hf("llama", model[0], seed=2)
    copy_tree(str(model[0]), address)
    with pytest.raises(NotFound, match="not fetched yet"):
        find_base(address, tmp_path / "artefacts")
    assert fetch_base(address, tmp_path / "artefacts").folder != base.folder
    with pytest.raises(NotFound, match="there are no weights"):
        fetch_base(f"s3://{s3_bucket}/nothing", tmp_path / "artefacts")


@pytest.mark.s3
@pytest.mark.parametrize(
    "target", [TargetFormat("native"), TargetFormat("megatron", "torch", tp=2)], ids=["native", "megatron"]
)
def test_weights_of_other_formats_come_from_a_bucket_with_what_points_to_them(
    model: tuple[Path, ModelConfig], target: TargetFormat, s3_bucket: str, tmp_path: Path
) -> None:
    (model[0] / "tokenizer.json").unlink()
    convert_weights(str(model[0]), str(tmp_path / "made"), target, logits=False)
    LocalStore(tmp_path / "made").put("health/notes.txt", b"beside the weights, and none of them")
    copy_tree(str(tmp_path / "made"), f"s3://{s3_bucket}/made")
    base = fetch_base(f"s3://{s3_bucket}/made", tmp_path / "artefacts")
    names = {entry.path for entry in base.manifest.files}
    assert "verdict.json" in names
    assert not {name for name in names if name.startswith("health/")}
    with base.open() as weights:
        assert weights.config == model[1]
    assert find_base(f"s3://{s3_bucket}/made", tmp_path / "artefacts") == base


@pytest.mark.s3
def test_the_best_checkpoint_of_a_run_comes_from_a_bucket_with_the_pointer_to_it(
    model: tuple[Path, ModelConfig], s3_bucket: str, tmp_path: Path
) -> None:
    convert_weights(str(model[0]), str(tmp_path / "made"), TargetFormat("native"), logits=False)
    made = LocalStore(tmp_path / "made")
    made.put("checkpoints/best", BestPointer(0, 2.5, 1).to_bytes())
    made.put("checkpoints/latest", LatestPointer(7, 1, 1).to_bytes())
    made.put("checkpoints/step-00000007/__0_1.distcp", b"newer, and not the best")
    copy_tree(str(tmp_path / "made"), f"s3://{s3_bucket}/made")
    base = fetch_base(f"s3://{s3_bucket}/made", tmp_path / "artefacts")
    assert find_checkpoint(LocalStore(base.files), "").step == 0
    assert not [entry.path for entry in base.manifest.files if "step-00000007" in entry.path]
