"""Checkpoints of other engines: listed, proven by their own checksums, removed where the engine does not."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemWriter, save

from trainshed.checkpoints.foreign import find_damage, list_foreign, newest_torchtune
from trainshed.cli import run_cli


def save_iteration(folder: Path, iteration: int) -> Path:
    """An iteration as torch.distributed.checkpoint writes it for Megatron."""
    path = folder / f"iter_{iteration:07d}"
    state = {"decoder.weight": torch.arange(4096.0), "optimizer.state": torch.ones(4096), "args": {"lr": 1}}
    with warnings.catch_warnings(action="ignore"):  # it says that there is one process
        save(state, storage_writer=FileSystemWriter(path), no_dist=True)
    torch.save({"iteration": iteration}, path / "common.pt")
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for iteration in (100, 200, 300):
        save_iteration(tmp_path / "checkpoints-megatron", iteration)
    return tmp_path


def spoil(file: Path, place: float) -> None:
    content = bytearray(file.read_bytes())
    content[int(len(content) * place)] ^= 1
    file.write_bytes(content)


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = run_cli(["checkpoints", *arguments, "-o", "json"])
    return code, json.loads(capsys.readouterr().out)


def test_megatrons_are_listed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints-megatron" / "iter_0000400").mkdir()
    code, data = report(capsys, str(run))
    assert (code, data["engine"], data["latest"]) == (0, "megatron", 300)
    assert [(row["step"], row["complete"], row["latest"]) for row in data["checkpoints"]] == [
        (400, False, False),
        (300, True, True),
        (200, True, False),
        (100, True, False),
    ]
    assert run_cli(["checkpoints", str(run)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{run}: 3 checkpoints of megatron, ")
    assert "complete  <- latest" in shown


def test_megatrons_are_proven_by_the_checksums_of_their_tensors(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(capsys, str(run), "--verify")[0] == 0
    spoil(next((run / "checkpoints-megatron/iter_0000200").glob("*.distcp")), 0.25)
    code, data = report(capsys, str(run), "--verify")
    rows = {row["step"]: row for row in data["checkpoints"]}
    assert code == 1
    assert [step for step, row in rows.items() if not row["verified"]] == [200]
    assert "does not have its checksum" in rows[200]["problem"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda path: next(path.glob("*.distcp")).unlink(), "is missing"),
        (lambda path: _cut(next(path.glob("*.distcp"))), "and `"),
        (lambda path: _cut(path / "common.pt"), "common.pt: a tensor does not have its checksum"),
        (lambda path: (path / "metadata.json").write_text("{"), "metadata.json: is not JSON"),
        (lambda path: (path / ".metadata").write_bytes(b"junk"), "broken pickle"),
    ],
)
def test_damage_is_named(run: Path, change: Any, what: str) -> None:
    change(run / "checkpoints-megatron/iter_0000100")
    listing = list_foreign(run)
    assert listing is not None
    damage = find_damage(listing.checkpoints[-1])
    assert what in (damage or "")


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-200])


def test_megatrons_are_pruned_and_the_newest_stays(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, data = report(capsys, str(run), "--prune", "--keep", "2")
    assert (code, data["removed"]) == (0, [100])
    assert [row["step"] for row in data["checkpoints"]] == [300, 200]
    assert report(capsys, str(run), "--prune", "--keep", "1")[1]["removed"] == [200]
    assert run_cli(["checkpoints", str(run), "--prune", "--keep", "0"]) == 2


def save_torchtune(folder: Path, name: str, *, adapter: bool = False) -> Path:
    """Weights as torchtune leaves them; the state of the run lies elsewhere, or nowhere for the last of a run."""
    path = folder / name
    path.mkdir(parents=True)
    file = "adapter_model.safetensors" if adapter else "model-00001-of-00001.safetensors"
    save_file({"weight": torch.ones(64)}, path / file)
    if adapter:
        (path / "adapter_config.json").write_text('{"r": 2}')
    else:
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": file}}))
    return path


@pytest.mark.parametrize("adapter", [False, True])
def test_torchtunes_are_listed_and_proven_and_not_pruned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], adapter: bool
) -> None:
    """The last weights of a run have no state beside them, and were called unfinished for it."""
    for number in (0, 1):
        save_torchtune(tmp_path / "checkpoints", f"epoch_{number}", adapter=adapter)
    (tmp_path / "checkpoints" / "epoch_2").mkdir()
    code, data = report(capsys, str(tmp_path), "--verify")
    assert (code, data["engine"]) == (0, "torchtune")
    assert [(row["step"], row["verified"]) for row in data["checkpoints"]] == [(2, None), (1, True), (0, True)]
    assert newest_torchtune(tmp_path) == tmp_path / "checkpoints/epoch_1"
    _cut(next((tmp_path / "checkpoints/epoch_1").glob("*.safetensors")))
    assert newest_torchtune(tmp_path) == tmp_path / "checkpoints/epoch_0"
    assert run_cli(["checkpoints", str(tmp_path), "--prune"]) == 2
    assert "torchtune removes its old checkpoints itself" in capsys.readouterr().err


def test_nemos_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "checkpoints"
    for name in ("megatron_gpt--step=100-consumed_samples=6400.0", "megatron_gpt--step=200-consumed_samples=12800.0"):
        (folder / name).mkdir(parents=True)
    (folder / "megatron_gpt--step=200-consumed_samples=12800.0-unfinished").touch()
    _, data = report(capsys, str(tmp_path))
    assert (data["engine"], data["latest"]) == ("nemo", 100)
    assert [(row["step"], row["complete"]) for row in data["checkpoints"]] == [(200, False), (100, True)]


def test_bridges_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_iteration(tmp_path / "checkpoints", 50)
    (path.parent / "latest_checkpointed_iteration.txt").unlink()
    for file in (path / "train_state.pt", path.parent / "latest_train_state.pt"):
        torch.save({"step": 50}, file)
    # It is the last file of a save: without it Megatron-Bridge takes the folder for one of Megatron-LM, and stops.
    assert not report(capsys, str(tmp_path))[1]["checkpoints"][0]["complete"]
    (path / "run_config.yaml").write_text("model: {}")
    code, data = report(capsys, str(tmp_path), "--verify")
    assert (code, data["engine"], data["latest"]) == (0, "megatron-bridge", 50)
